"""The counts of traffic: of traces as a GPU gives them, made up here; of a CPU; and, where there is one, of a GPU."""

import pandas as pd
import pytest
import torch

from vitkit import Geometry
from vitkit.lab import cases, traffic
from vitkit.lab.results import Run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def event(cat, name, ts, dur=1.0, **args):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args, "tid": 1}


TRACE = [
    event("user_annotation", traffic.RANGE, 100.0, 50.0),
    event("cuda_runtime", "cudaMemcpyAsync", 90.0, correlation=1),  # before the call
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 101.0, bytes=999, correlation=1, stream=7),
    event("cuda_runtime", "cudaMemcpyAsync", 110.0, correlation=2),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 160.0, bytes=24, correlation=2, stream=7),  # ends later
    event("cuda_runtime", "cudaMemcpyAsync", 112.0, correlation=3),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 170.0, bytes=8, correlation=3, stream=7),
    event("cuda_runtime", "cudaStreamSynchronize", 114.0, 20.0, correlation=4),
    event("cuda_runtime", "cudaLaunchKernel", 140.0, correlation=5),
    event("cuda_driver", "cuLaunchKernel", 140.2, 0.5, correlation=5),  # within the one before
    event("kernel", "fill", 175.0, correlation=5, stream=7),
    event("cuda_driver", "cuLaunchKernelEx", 145.0, correlation=6),
    event("kernel", "triton", 177.0, correlation=6, stream=7),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 178.0, bytes=64, correlation=7, stream=7),
    event("cuda_runtime", "cudaDeviceSynchronize", 151.0, 40.0, correlation=8),  # the profiler's own
]


def made_up(monkeypatch, events):
    monkeypatch.setattr(traffic, "_warm_profiler", lambda device: None)
    monkeypatch.setattr(traffic, "_profiled", lambda call, device: (events, call()))
    return traffic.count(lambda: "result", GPU)


def test_only_what_the_call_starts_counts(monkeypatch):
    out = made_up(monkeypatch, TRACE)
    assert {name: value for name, (value, _) in out.counts.items()} == {
        "cudaStreamSynchronize": 1,
        "cudaDeviceSynchronize": 0,
        "cudaEventSynchronize": 0,
        "DtoH copies": 1,
        "HtoD copies": 1,
        "HtoD bytes": 24,
        "DtoD copies": 1,
        "kernel launches": 2,
    }
    assert out.outputs == "result" and out.counts["HtoD bytes"][1] == "bytes"
    kinds = [(e.kind, e.start_us) for e in out.timeline]
    assert kinds[:3] == [("call", 0.0), ("wait", 14.0), ("copy", 60.0)] and kinds == sorted(kinds, key=lambda x: x[1])
    assert [e.lane for e in out.timeline[:3]] == ["host", "host", "7"]


def test_names_of_rocm(monkeypatch):
    events = [
        TRACE[0],
        event("cuda_runtime", "hipStreamSynchronize", 114.0),
        event("cuda_runtime", "hipMemcpyAsync", 115.0, correlation=2),
        event("gpu_memcpy", "CopyHostToDevice", 120.0, bytes=8, correlation=2),
        event("cuda_runtime", "hipLaunchKernel", 116.0, correlation=3),
    ]
    counts = made_up(monkeypatch, events).counts
    names = ("cudaStreamSynchronize", "HtoD copies", "HtoD bytes", "kernel launches")
    assert [counts[name][0] for name in names] == [1, 1, 8, 1]


def test_a_trace_without_the_range_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="range"):
        made_up(monkeypatch, TRACE[1:])


def test_a_cpu_counts_outermost_operators_and_bytes():
    x = torch.ones(6, 4)
    out = traffic.count(lambda: {"x": (x @ x.T).reshape(-1), "y": x + 1}, CPU, needs=lambda outputs: outputs)
    assert out.counts == {traffic.OPERATORS: (4, ""), traffic.BYTES: (4 * (36 + 24), "bytes")}
    assert [e.kind for e in out.timeline] == ["call", *["operator"] * 4]
    assert all(0 <= e.start_us <= out.timeline[0].duration_us for e in out.timeline)


def test_what_fails_is_a_row():
    def broken():
        raise RuntimeError("no such\nkernel in /usr/some/where.so")

    rows, outputs = traffic.counted("a case", "mine", broken, CPU)
    assert rows == [("a case", "mine", "failed: RuntimeError: no such kernel in where.so", None, "")]
    assert outputs is None


def test_rows_of_a_preparation():
    rows = list(traffic.preparation_rows([("small", [[1, 4, 6]])], Geometry(), CPU, threads=1))
    frame = pd.DataFrame(rows, columns=["case", "version", "metric", "value", "unit"])
    assert set(frame.metric) == {traffic.OPERATORS, traffic.BYTES} and frame.value.gt(0).all()
    n_bytes = frame[frame.metric == traffic.BYTES].set_index("version").value
    assert n_bytes["prepare: numba"] == 4 * (6 + 6 + 2 + 2 + 2 * 24)
    assert n_bytes["prepare: transformers"] == 8 * (6 + 6 + 2 * 24) + 4 * (2 + 2)
    assert n_bytes["prepare: size_cache"] == 4 * (6 + 6 + 2 + 2)


def test_grids():
    assert [len(grid) for _, grid in traffic.traffic_grids(cases.SIZES["cpu"])] == [1, 1, 10, 256]
    assert [name for name, _ in traffic.traffic_grids(cases.SIZES["tiny"])] == ["1x36x36"]


def counted(tmp_path, *rows):
    run = Run("4_host_device_traffic", "cpu", tmp_path)
    for row in rows:
        run.count(*row)
    return run.count_frame(), run.slug


def test_the_published_counts_beside_this_machines(tmp_path):
    frame, slug = counted(
        tmp_path,
        ("1x36x36", "forward varlen: plan", "HtoD copies", 7, ""),
        ("1x36x36", "forward varlen: plan", "HtoD copies", 1, ""),  # newer
        ("1x36x36", "forward varlen: plan", "kernel launches", 500, ""),
        ("1x36x36", "forward varlen", "failed: no such attention", None, ""),
        ("1x36x36", "prepare: numba", "HtoD copies", 3, ""),
        ("1x36x36, 10 times", "forward varlen: plan", "HtoD copies", 9, ""),
    )
    out = traffic.published(frame).set_index(["case", "metric"])
    assert list(out.columns) == ["before (published)", "after (published)", f"forward varlen: plan ({slug})"]
    assert out.loc[("1x36x36", "HtoD copies")].tolist() == [5, 1, 1]
    assert out.loc[("10x36x36", "HtoD bytes")].tolist()[:2] == [286124, 28016]
    assert list(out.index)[4] == ("1x36x36", "kernel launches") and len(out) == 9


def test_the_summary_shows_what_failed(tmp_path):
    frame, _ = counted(
        tmp_path, ("a", "one", "HtoD copies", 1, ""), ("a", "two", "failed: no such attention", None, "")
    )
    out = traffic.summary(frame).set_index("version")
    assert out.loc["one", "HtoD copies"] == 1 and out.loc["two", "failed"] == "failed: no such attention"


def test_a_timeline_has_a_lane_a_kind_and_one_scale(monkeypatch):
    before, after = made_up(monkeypatch, TRACE), made_up(monkeypatch, TRACE[:5])
    fig = traffic.timeline(before, after, title="a title")
    above, below = fig.axes
    lanes = [text.get_text() for text in above.get_yticklabels()]
    assert lanes == ["the call", "host waits", "copies", "kernels"]
    assert above.get_xlim() == below.get_xlim() and above.get_xlim()[1] > 78
    assert above.get_title(loc="left") == "transformers: 1 host waits, 3 copies, 2 kernels"
    assert [len(lane.get_paths()) for lane in above.collections] == [1, 1, 3, 2]
    assert min(text.get_fontsize() for text in (above.title, below.xaxis.label, *above.get_yticklabels())) >= 9


@pytest.mark.gpu
def test_copies_and_waits_of_a_gpu():
    x, pinned = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
    counts = traffic.count(lambda: (x + 1).cpu(), GPU).counts
    assert [counts[n][0] for n in ("cudaStreamSynchronize", "DtoH copies", "HtoD copies", "kernel launches")] == [
        *(1, 1, 0, 1)
    ]
    counts = traffic.count(lambda: pinned.to("cuda", non_blocking=True), GPU).counts
    assert [counts[n][0] for n in ("cudaStreamSynchronize", "HtoD copies", "HtoD bytes")] == [0, 1, 4000]
