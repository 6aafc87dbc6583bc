"""What a call sends to the GPU and how often it waits for it, counted by torch.profiler; and a picture of both.

On a machine without a GPU it counts what can be counted there, under names that say so.
"""

import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from . import plan_cases, results
from .figure import WIDTH, Figure
from .styles import GREY, GRID
from .timing import _said
from .workloads import load_workloads

RANGE = "vitkit.lab.traffic: the call that is counted"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIES = {"DtoH": "DtoH|DeviceToHost", "HtoD": "HtoD|HostToDevice", "DtoD": "DtoD|DeviceToDevice"}
LAUNCH = re.compile(r"(cuda|cu|hip|hipModule)Launch(Cooperative)?Kernel")
OPERATORS, BYTES = "operators called (no GPU here)", "bytes of index tensors (no GPU here: none is uploaded)"
LANES = {"call": ("the call", GREY), "wait": ("host waits", "#D55E00"), "copy": ("copies", "#0072B2"),
         "kernel": ("kernels", "#009E73"), "operator": ("operators", "#56B4E9")}  # fmt: skip


class Event(NamedTuple):
    """kind: a key of LANES; times in us, from the beginning of the call; lane: "host", or the stream's number."""

    name: str
    kind: str
    start_us: float
    duration_us: float
    lane: str


@dataclass
class Traffic:
    """counts: {metric: (value, unit)}; timeline: events by their start; outputs: of the call that was counted."""

    counts: dict = field(default_factory=dict)
    timeline: list = field(default_factory=list)
    outputs: object = None


def traffic_grids(size) -> list[tuple[str, list]]:
    """(name, grid): the two of the published counts, 10 images and 256."""
    published = load_workloads()[1:3]
    images = [(f"1x36x36, {n} times", [[1, 36, 36]] * n) for n in (10, 256)]
    return published[:1] if size.name == "tiny" else published + images


def index_tensors(outputs) -> dict:
    """{name: tensor} of a call of `plan_cases.plan_case`, without the cos and sin that a cache has on the device."""
    return {name: x for name, x in plan_cases.ready(outputs).items() if name not in ("cos", "sin")}


def count(call, device, needs=index_tensors, warmup=2) -> Traffic:
    """The traffic of one `call()`, after `warmup` calls that compile and allocate.

    Only what the call itself starts counts, wherever it ends: not the wait at the end of the profiler. needs(outputs)
    is asked on a CPU alone: {name: tensor} of what a device would have to hold.
    """
    device = torch.device(device)
    _warm_profiler(device)
    for _ in range(warmup):
        call()
    events, outputs = _profiled(call, device)
    span = next((e for e in events if e["cat"] == "user_annotation" and e["name"] == RANGE), None)
    if span is None:
        raise RuntimeError("the profiler has lost the range of the call")
    begin, end = span["ts"], span["ts"] + span["dur"]
    timeline = [Event("the call", "call", 0.0, span["dur"], "host")]
    if device.type == "cpu":
        operators = _outermost([e for e in events if e["cat"] == "cpu_op" and begin <= e["ts"] < end])
        timeline += [Event(e["name"], "operator", e["ts"] - begin, e["dur"], "host") for e in operators]
        n_bytes = sum(x.numel() * x.element_size() for x in needs(outputs).values())
        return Traffic({OPERATORS: (len(operators), ""), BYTES: (n_bytes, "bytes")}, timeline, outputs)
    calls = [e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")]
    inside = [e for e in calls if begin <= e["ts"] < end]
    elsewhere = {_correlation(e) for e in calls} - {_correlation(e) for e in inside}
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = [e for e in work if _correlation(e) not in elsewhere]
    names = Counter(re.sub("^hip", "cuda", e["name"]) for e in inside)
    counts = {name: (names[name], "") for name in WAITS}
    for way, pattern in COPIES.items():
        copies = [e for e in work if e["cat"] == "gpu_memcpy" and re.search(pattern, e["name"])]
        counts[f"{way} copies"] = len(copies), ""
        if way == "HtoD":
            counts["HtoD bytes"] = sum(int(e["args"].get("bytes", 0)) for e in copies), "bytes"
    launches = {_correlation(e) for e in inside if LAUNCH.match(e["name"])}  # a driver's call may stand in a runtime's
    counts["kernel launches"] = len(launches), ""
    timeline += [Event(e["name"], "wait", e["ts"] - begin, e["dur"], "host") for e in inside if _waits(e["name"])]
    for e in work:
        kind = "copy" if e["cat"] == "gpu_memcpy" else "kernel"
        timeline.append(Event(e["name"], kind, e["ts"] - begin, e["dur"], str(e["args"].get("stream", ""))))
    return Traffic(counts, sorted(timeline, key=lambda event: event.start_us), outputs)


def _profiled(call, device):
    """([complete events of the trace], outputs) of one call within the range RANGE."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.13 prints where every profile begins and ends
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    _sync(device)
    with profile(activities=activities) as profiler:
        with record_function(RANGE):
            outputs = call()
        _sync(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    whole = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    return [{"cat": "", "args": {}, **e, "ts": float(e["ts"]), "dur": float(e["dur"])} for e in whole], outputs


@cache
def _warm_profiler(device):
    """The first use of the profiler in a process takes seconds and may miss events."""
    _profiled(lambda: torch.ones(8).to(device).cpu(), device)


def _sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _correlation(event):
    """What a call of the host and its work on the device have in common; where it is missing, the event alone."""
    return event["args"].get("correlation", id(event))


def _waits(name) -> bool:
    return "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpyWithStream")


def _outermost(events) -> list:
    """Operators that were not called by another operator of their thread."""
    out, ends = [], {}
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if e["ts"] >= ends.get(e.get("tid"), 0.0):
            ends[e.get("tid")] = e["ts"] + e["dur"]
            out.append(e)
    return out


def preparation_rows(grids, geometry, device, *, threads):
    """Yields (case, version, metric, value, unit): the traffic of each call of `plan_cases.plan_case`, limits left out.

    What fails is a row with the metric "failed: ..." and no value.
    """
    for name, grid in grids:
        case = plan_cases.plan_case(name, grid, geometry, device, threads=threads)
        for impl, call in case.calls.items():
            if impl not in ("copy", "empty_launch"):
                rows, _ = counted(name, f"prepare: {impl}", partial(call, *case.inputs[0]), device)
                yield from rows


def counted(case, version, call, device, **options):
    """([(case, version, metric, value, unit)], outputs) of a call; of one that raises the error, and None."""
    try:
        traffic = count(call, device, **options)
    except Exception as error:  # out of memory, or a kernel that this device or version has not
        return [(case, version, f"failed: {_said(error)}", None, "")], None
    return [(case, version, metric, *value) for metric, value in traffic.counts.items()], traffic.outputs


def published(counts: pd.DataFrame, root=None) -> pd.DataFrame:
    """The published counts of a forward pass (data/published_traffic.json), and this machine's beside them.

    counts: rows as `Run.count_frame` has them. A line a case and metric; a column a version of the forward.
    """
    path = Path(root or results.repo_root()) / "data" / "published_traffic.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    columns = [f"{name} (published)" for name in info["columns"]]
    keys = [(case, metric) for case in info["rows"] for metric in info["rows"][case]]
    mine = counts[counts.version.str.startswith("forward") & counts.case.isin(info["rows"]) & counts.value.notna()]
    own = dict.fromkeys(zip(mine.case, mine.metric))
    keys = sorted(dict.fromkeys([*keys, *own]), key=lambda key: list(info["rows"]).index(key[0]))  # cases together
    blank = [None] * len(columns)
    out = pd.DataFrame([info["rows"][c].get(m, blank) for c, m in keys], columns=columns, dtype=float)
    out.index = pd.MultiIndex.from_tuples(keys, names=["case", "metric"])
    for (version, device), rows in mine.groupby(["version", "device"], sort=False):
        values = rows.set_index(out.index.names)["value"]
        out[f"{version} ({device})"] = values[~values.index.duplicated(keep="last")]
    return out.reset_index()


def summary(counts: pd.DataFrame) -> pd.DataFrame:
    """A line a case and version, a column a metric; what failed in a column of its own."""
    ok = counts.value.notna()
    counts = counts.assign(metric=counts.metric.where(ok, "failed"), shown=counts.value.where(ok, counts.metric))
    keys = {"index": ["case", "version"], "columns": "metric", "values": "shown"}
    out = counts.pivot_table(**keys, aggfunc="last", sort=False).infer_objects()
    out.columns.name = None
    return out.reset_index()


def timeline(before: Traffic, after: Traffic, names=("transformers", "VisionPlan"), title="") -> Figure:
    """Above what `before` did, below `after`, on one scale of time: the call, its waits, and the device's work."""
    kinds = [kind for kind in LANES if any(e.kind == kind for t in (before, after) for e in t.timeline)]
    fig = Figure(figsize=(WIDTH, 1.6 + 0.7 * len(kinds)), layout="constrained")
    for ax, one, name in zip(fig.subplots(2, 1, sharex=True), (before, after), names):
        for y, kind in enumerate(kinds):
            bars = [(e.start_us, e.duration_us) for e in one.timeline if e.kind == kind]
            ax.broken_barh(bars, (y - 0.35, 0.7), color=LANES[kind][1], lw=0.8)  # an edge, so that 1 us can be seen
        ax.set_yticks(range(len(kinds)), [LANES[kind][0] for kind in kinds])
        ax.set_ylim(len(kinds) - 0.5, -0.5)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, axis="x", color=GRID, lw=0.7)
        ax.set_axisbelow(True)
        said = [f"{sum(e.kind == kind for e in one.timeline)} {LANES[kind][0]}" for kind in kinds if kind != "call"]
        ax.set_title(f"{name}: {', '.join(said)}", fontsize=10, loc="left")
    ax.set_xlim(left=0)
    ax.set_xlabel("µs from the beginning of the call, slowed by the profiler")
    if title:
        fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig
