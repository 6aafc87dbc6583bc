"""The gate in front of every time: a result that is wrong is found, by notebooks and benchmark alike."""

import importlib.util
import json
import os
import weakref

import pytest
import torch

from vitkit import Geometry
from vitkit.lab import cases, peers, rotary_cases
from vitkit.lab import rotary_sections as sections
from vitkit.lab.timing import measure

CPU = torch.device("cpu")
interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")


def rotary_case(dtype="bfloat16", **options):
    options = {"threads": 1, "limits": False, "compiled": False} | options
    return rotary_cases.rotary_case("x", [[1, 4, 6]], Geometry(num_heads=2), CPU, dtype, **options)


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"batch": 2}], ids=str)
@pytest.mark.parametrize("dtype", rotary_cases.DTYPES)
def test_every_implementation_passes_the_rotary_check(dtype, options):
    case, r = rotary_case(dtype, **options), rotary_case(dtype, **options).inputs[0][0]
    assert set(rotary_cases.CPU_WAYS) <= set(case.calls) and "torch_compile" not in case.calls
    assert case.params["layout"] == ("q and k apart" if options else "packed qkv") and case.direction == "fwd"
    assert (r.qkv is None) == bool(options) and r.q.is_contiguous() == bool(options)
    assert all(row["correct"] for row in measure(case, "e2e", device=CPU, n=1))


@pytest.mark.parametrize("dtype", rotary_cases.DTYPES)
def test_every_implementation_passes_the_check_of_the_backward(dtype):
    case = rotary_case(dtype, backward=True)
    assert {"eager", "numba", "numba_from_pos"} <= set(case.calls) and "numba_in_place" not in case.calls
    rows = measure(case, "e2e", device=CPU, n=2)
    assert all(row["correct"] and row["direction"] == "bwd" for row in rows), rows
    forward = rotary_case(dtype)  # by the angle instead of the negative one
    case.calls = {"wrong": lambda r: forward.calls["eager"](r._replace(q=r.grad_q, k=r.grad_k))}
    assert measure(case, "e2e", device=CPU, n=1)[0]["correct"] is False


def test_the_backward_keeps_a_graph_for_each_inputs_and_lets_go_of_them():
    case, calls = rotary_case(backward=True), []
    forward = rotary_cases.WAYS["eager"]
    backward = peers.Backward(lambda r: calls.append(r) or forward(r))
    inputs = [case.inputs[0][0], case.fresh()[0]]
    results = [backward(r)[0] for r in inputs * 2]
    assert len(calls) == 2 and torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    gone = weakref.ref(backward)
    del backward
    assert gone() is None


def test_a_compiled_backward_serves_twice():
    case = rotary_case(backward=True, compiled=True, ways=("torch_compile",))
    if not case.calls:
        pytest.skip("no compiler here")
    (row,) = measure(case, "e2e", device=CPU, n=2)
    assert row["correct"] and row["n"] == 2 and not row["error"]


def test_fresh_inputs_are_packed_and_share_nothing():
    for batch in (None, 2):
        r = rotary_case(batch=batch, backward=True).inputs[0][0]
        copy, before = r.fresh(), r.q.clone()
        for x, y in zip(r, copy):
            assert (x is None and y is None) or (torch.equal(x, y) and x.data_ptr() != y.data_ptr())
        (copy.q if copy.qkv is None else copy.qkv).zero_()
        assert torch.equal(r.q, before) and not copy.q.any()
        assert r.qkv is None or (r.k.data_ptr() == r.qkv[:, 1].data_ptr() and r.q.stride() == r.qkv[:, 0].stride())


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("one entry", lambda q, k: (q.index_fill(0, torch.tensor([3]), 0), k)),
        ("a nan", lambda q, k: (q, torch.where(torch.arange(80) == 7, float("nan"), k.float()).to(k.dtype))),
        ("q and k exchanged", lambda q, k: (k, q)),
        ("rounded twice as coarsely", lambda q, k: ((q.float() * 64).round() / 64, k)),
        ("another dtype", lambda q, k: (q.float(), k)),
        ("another shape", lambda q, k: (q[:-1], k)),
    ],
)
def test_a_wrong_rotation_gets_no_time(name, spoil):
    case, right = rotary_case(), rotary_case().calls["eager"]
    case.calls = {"wrong": lambda r: tuple(x.to(r.q.dtype) if "coarse" in name else x for x in spoil(*right(r)))}
    (row,) = measure(case, "e2e", device=CPU, n=1)
    assert row["correct"] is not True and "median_us" not in row and (row["error"] or row["note"])


@pytest.mark.parametrize("op", ["rot_pos_ids", "window_index", "cu_seqlens"])
def test_every_implementation_passes_the_index_check(op):
    case = cases.index_case(op, "x", [[2, 6, 10], [1, 8, 8]], Geometry(), CPU, threads=1)
    rows = measure(case, "e2e", device=CPU, n=1)
    assert {"reference", "torch", "numba", "copy"} <= {row["impl"] for row in rows}
    assert all(row["correct"] for row in rows), rows


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.long(), lambda x: x[:-1], lambda x: x.flip(0)])
def test_a_wrong_index_tensor_gets_no_time(change):
    case = cases.index_case("cu_seqlens", "x", [[2, 6, 10]], Geometry(), CPU, threads=1)
    good = case.calls["torch"]
    case.calls = {"wrong": lambda grid, table: (change(good(grid, table).cu_seqlens),)}
    (row,) = measure(case, "e2e", device=CPU, n=1)
    assert row["correct"] is False and row["note"] and "median_us" not in row


def test_one_wrong_entry_among_millions_is_found():
    r = rotary_cases.rotary_inputs([[1, 64, 64]], Geometry(), CPU, torch.bfloat16)[0]
    right = rotary_cases.WAYS["numba"](r)
    assert rotary_cases.rotary_error("numba", right, r)[1] <= 1
    for spoil in (lambda q: q[5, 3].__setitem__(7, 0), lambda q: q[4000, 15].neg_()):
        wrong = right[0].clone()
        spoil(wrong)
        assert rotary_cases.rotary_error("numba", (wrong, right[1]), r)[1] > 1


def test_a_wrong_inverse_is_found():
    case = cases.index_case("window_index", "x", [[2, 6, 10]], Geometry(), CPU, threads=1)
    good = case.calls["torch"]

    def wrong(grid, table):
        out = good(grid, table)
        out.reverse = out.reverse.flip(0)
        return out

    case.calls = {"wrong": wrong}
    assert measure(case, "e2e", device=CPU, n=1)[0]["correct"] is False


def test_rows_count_patches_and_the_fewest_bytes():
    case = rotary_cases.rotary_case(
        "x", [[1, 4, 6]], Geometry(num_heads=2), CPU, "bfloat16", threads=1, batch=3, limits=False
    )
    assert (case.n_tokens, case.n_images, case.bytes) == (3 * 24, 1, 2 * 2 * 3 * 24 * 2 * 80 * 2)
    case = cases.index_case("window_index", "x", [[2, 6, 10], [1, 8, 8]], Geometry(), CPU, threads=1)
    assert (case.n_tokens, case.n_images, case.bytes) == (184, 2, 4 * (46 + 46 + 6))


def test_sizes_and_threads():
    assert cases.pick_size("auto", "cpu").name == "cpu" and cases.pick_size("auto", "cuda").name == "gpu"
    with pytest.raises(ValueError, match="size='huge'.*'auto', 'tiny', 'cpu', 'gpu'"):
        cases.pick_size("huge", "cpu")
    before = torch.get_num_threads()
    try:
        assert cases.set_threads(1) == 1 and cases.set_threads(0) == 1
    finally:
        torch.set_num_threads(before)
    for bad in (-1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="threads="):
            cases.set_threads(bad)


def test_grids_rise_and_hold_the_published_sizes():
    tokens = [sum(t * h * w for t, h, w in grid) for _, grid in sections.rotary_grids(cases.SIZES["cpu"])]
    assert tokens == sorted(set(tokens)) and tokens[0] == 64 and tokens[-1] == 12_960
    names = [name for name, _ in cases.index_grids(cases.SIZES["cpu"], [[1, 2, 2]])]
    assert names[-1] == "given" and len(names) == len(set(names)) and len(names) > 15


def test_peers_that_are_not_installed_are_absent(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.rotary_peers(CPU) == {} and peers.index_peers("cu_seqlens", Geometry()) == {}


def test_a_bad_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int8'.*'float32', 'bfloat16', 'float16'"):
        rotary_case("int8")


@pytest.mark.skipif(not interpreted, reason="Triton's interpreter is off")
@pytest.mark.parametrize("name", [name for name in rotary_cases.WAYS if "triton" in name])
def test_the_ways_of_a_gpu_under_the_interpreter(name):
    case = rotary_case("float32", ways=(name,))  # the interpreter truncates to bfloat16
    (row,) = measure(case, "e2e", device=CPU, n=1)
    assert row["impl"] == name and row["correct"], row


@pytest.mark.skipif(not interpreted, reason="Triton's interpreter is off")
def test_the_layouts_and_the_limit_in_place_under_the_interpreter():
    from vitkit.lab.negate import InPlaceNegate

    geometry, options = Geometry(num_heads=16, head_dim=72), {"threads": 1, "limits": False, "section": "tries"}
    case = rotary_cases.rotary_case("x", [[1, 2, 2]], geometry, CPU, "float32", calls=sections.tries(), **options)
    case.calls["in_place_negate"] = negate = InPlaceNegate((4, 3, 16, 72), torch.float32, 2, CPU)
    assert negate.bytes == 4 * 4 * 16 * 72 * 4 and len(case.calls) == 2 * len(sections.LAYOUTS) + 1
    rows = measure(case, "e2e", device=CPU, n=1)
    assert all(row["correct"] for row in rows), rows
    assert json.loads(json.dumps(case.params))["section"] == "tries"
    with pytest.raises(ValueError, match="multiple of 8"):
        InPlaceNegate((4, 3, 1, 4), torch.bfloat16, 1, CPU)


def test_sections_of_a_cpu_and_of_a_gpu():
    tiny, threads = cases.SIZES["tiny"], torch.get_num_threads()
    seen = [(c.params["threads"], c.dtype, torch.get_num_threads()) for c in sections.thread_cases(tiny, CPU, 2, 80)]
    assert [x[:2] for x in seen][:2] == [(1, "bfloat16"), (1, "float32")] and all(x[0] == x[2] for x in seen)
    assert torch.get_num_threads() == threads and len(sections.thread_cases(tiny, CPU, 2, 80)) == len(seen)
    assert len(sections.forward_cases(tiny, CPU, "bfloat16", 2, [80, 72], 1)) == 1
    assert "needs a GPU" in sections.missing("cpu", "all", "limit", "GPU")
    assert "needs a CPU" in sections.missing("cuda", "all", "limit", "CPU")
    assert "part='forward'" in sections.missing("cpu", "forward", "limit", "CPU")
    assert "no rows" in sections.missing("cpu", "all", "limit", "CPU")
    assert not list(sections.limit_cases(tiny, CPU, "bfloat16", 2, 1))
    assert not list(sections.tries_cases(tiny, CPU, "bfloat16", 2, 1))
    assert [c.params["D"] for c in sections.forward_cases(tiny, CPU, "bfloat16", 2, [80, 72], 1)] == [80]
    assert [c.direction for c in sections.backward_cases(tiny, CPU, "bfloat16", 2, [80, 72], 1)] == ["bwd"]
    gpu = [cases.tokens(grid) for _, grid in sections.rotary_grids(cases.SIZES["gpu"])]
    assert gpu == [64, 324, 1296, 4096, 12_960, 32_768, 65_536, 129_600, 262_144]
    for wanted in (sections.BACKWARD_TOKENS, sections.LIMIT_TOKENS, sections.COMPILED_TOKENS):
        assert set(wanted) <= set(gpu)
