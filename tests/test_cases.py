"""The gate in front of every time: a result that is wrong is found, by notebooks and benchmark alike."""

import pytest
import torch

from vitkit import Geometry
from vitkit.lab import cases, peers
from vitkit.lab.timing import measure

CPU = torch.device("cpu")


def rotary_case(dtype="bfloat16"):
    return cases.rotary_case("x", [[1, 4, 6]], Geometry(num_heads=2), CPU, dtype, threads=1, limits=False)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_implementation_passes_the_rotary_check(dtype):
    case = rotary_case(dtype)
    case.calls.pop("torch_compile", None)
    assert {"eager", "numba"} <= set(case.calls)
    assert all(row["correct"] for row in measure(case, "e2e", device=CPU, n=1))


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
    r = cases.rotary_inputs([[1, 64, 64]], Geometry(), CPU, torch.bfloat16)[0]
    right = rotary_case().calls["numba"](r)
    assert cases.rotary_error("numba", right, r)[1] <= 1
    for spoil in (lambda q: q[5, 3].__setitem__(7, 0), lambda q: q[4000, 15].neg_()):
        wrong = right[0].clone()
        spoil(wrong)
        assert cases.rotary_error("numba", (wrong, right[1]), r)[1] > 1


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
    case = cases.rotary_case("x", [[1, 4, 6]], Geometry(num_heads=2), CPU, "bfloat16", threads=1, batch=3, limits=False)
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
    tokens = [sum(t * h * w for t, h, w in grid) for _, grid in cases.rotary_grids(cases.SIZES["cpu"])]
    assert tokens == sorted(set(tokens)) and tokens[0] == 64 and tokens[-1] == 12_960
    names = [name for name, _ in cases.index_grids(cases.SIZES["cpu"], [[1, 2, 2]])]
    assert names[-1] == "given" and len(names) == len(set(names)) and len(names) > 15


def test_peers_that_are_not_installed_are_absent(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.rotary_peers(CPU) == {} and peers.index_peers("cu_seqlens", Geometry()) == {}


def test_a_bad_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int8'.*'float32', 'bfloat16', 'float16'"):
        rotary_case("int8")
