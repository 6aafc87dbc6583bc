"""What notebook 4 times is checked first, and each check finds what is wrong."""

import pytest
import torch

from vitkit import Geometry
from vitkit.lab import cases, peers, plan_cases
from vitkit.lab.timing import measure

CPU, GRID = torch.device("cpu"), [[2, 6, 10], [1, 8, 8]]
PEERS = {"transformers", "size_cache", "size_cache_numpy", "size_cache_cold"}


def plan_case(grid=GRID):
    return plan_cases.plan_case("x", grid, Geometry(), CPU, threads=1)


def test_every_implementation_passes_the_check():
    rows = measure(plan_case(), "e2e", device=CPU, n=1)
    assert {"reference", "torch", "numba", "auto", "copy", *PEERS} == {row["impl"] for row in rows}
    assert all(row["correct"] and not row["error"] for row in rows), rows
    (auto,) = [row for row in rows if row["impl"] == "auto"]
    assert auto["note"].startswith("took ") and auto["op"] == "VisionPlan.from_grid"
    assert set(peers.PEERS) >= PEERS | {"transformers_cpu_grid"}


def test_a_row_counts_patches_images_and_the_fewest_bytes():
    case = plan_case()
    assert (case.n_tokens, case.n_images) == (184, 2)
    assert case.bytes == 4 * (46 + 46 + 4 + 6 + 2 * 184)
    grid, table = case.inputs[0]
    assert grid.dtype == torch.int64 and grid.device == CPU and grid.tolist() == table.tolist() == GRID


@pytest.mark.parametrize("name", plan_cases.READY)
@pytest.mark.parametrize("impl", ["numba", "transformers"])
def test_a_wrong_entry_gets_no_time(impl, name):
    case = plan_case()
    good = case.calls[impl]

    def wrong(*inputs):
        out = dict(plan_cases.ready(good(*inputs)))
        out[name] = out[name].clone()
        out[name].view(-1)[-1] += 1
        return out

    case.calls = {impl: wrong}
    (row,) = measure(case, "e2e", device=CPU, n=1)
    assert row["correct"] is False and name in row["note"] and "median_us" not in row


def test_ours_are_int32_and_complete():
    case = plan_case()
    good = case.calls["numba"]
    for change in (
        lambda out: {name: x.long() for name, x in out.items()},
        lambda out: {name: x[:-1] for name, x in out.items()},
        lambda out: {name: x for name, x in out.items() if name != "reverse_index"},
    ):
        case.calls = {"numba": lambda *inputs, change=change: change(plan_cases.ready(good(*inputs)))}
        (row,) = measure(case, "e2e", device=CPU, n=1)
        assert row["correct"] is False and row["note"]


@pytest.mark.parametrize("value", [1e-4, float("nan")])
def test_wrong_cos_and_sin_of_a_cache_get_no_time(value):
    case = plan_case()
    good = case.calls["size_cache"]

    def wrong(*inputs):
        out = good(*inputs)
        sin = out.sin.clone()
        sin[5, 3] += value
        return out._replace(sin=sin)

    case.calls = {"size_cache": wrong}
    (row,) = measure(case, "e2e", device=CPU, n=1)
    assert row["correct"] is False and row["note"].startswith("sin")


def test_the_plain_way_is_left_out_of_large_batches():
    assert "reference" in plan_case([[1, 2, 2]] * 100).calls
    assert "reference" not in plan_case([[1, 2, 2]] * 101).calls


def test_the_ladder_and_the_batches():
    ladder, batches = plan_cases.plan_grids(cases.SIZES["gpu"])
    assert [len(grid) for _, grid in ladder] == [1, 1, 1, 10, 10, 256]
    assert [len(grid) for _, grid in batches] == [1, 4, 16, 64, 256]
    assert all(row == [1, 36, 36] for _, grid in batches for row in grid)
    assert len(dict(ladder + batches)) == 9  # one name, one grid
    assert all(dict(ladder).get(name, grid) == grid for name, grid in batches)


def test_peers_that_are_not_installed_are_absent(monkeypatch):
    monkeypatch.setattr(plan_cases, "find_spec", lambda name: None)
    assert set(plan_cases.plan_peers(Geometry(), CPU)) == PEERS - {"transformers"}


@pytest.mark.gpu
def test_every_implementation_passes_the_check_on_a_gpu():
    case = plan_cases.plan_case("x", GRID, Geometry(), "cuda", threads=1)
    rows = measure(case, "e2e", device="cuda", n=2)
    expected = {"reference", "torch", "numba", "triton", "auto", "copy", "empty_launch", *PEERS}
    assert expected | {"transformers_cpu_grid"} == {row["impl"] for row in rows}
    assert all(row["correct"] and not row["error"] for row in rows), rows
