"""A forward of transformers' tower with a plan's index tensors gives the same result as with its own."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from vitkit import Geometry
from vitkit.lab import tower, traffic

CPU, GEOMETRY, GRID = torch.device("cpu"), Geometry.qwen2_5_vl(), [[2, 12, 10], [1, 18, 8]]


def loop(q, k, v, cu_q, cu_k, max_q, max_k):
    """What torch's varlen_attn computes, (S, H, D), segment by segment."""
    assert cu_q.dtype == torch.int32 and max_q == max_k == int(cu_q.diff().max())
    pieces = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in zip(cu_q, cu_q[1:])]
    return torch.cat([F.scaled_dot_product_attention(*piece).transpose(0, 1) for piece in pieces])


@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
def test_a_plan_changes_nothing(kind, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop)  # it serves GPUs alone
    one = tower.make_tower(GEOMETRY, CPU)
    plain = tower.forwards(one, GRID, GEOMETRY, CPU)["transformers"]()
    assert plain.shape == (96, 64) and plain.std() > 0
    with tower.attention(one, kind):
        outputs = {name: call() for name, call in tower.forwards(one, GRID, GEOMETRY, CPU).items()}
    assert one.config._attn_implementation == "sdpa"
    torch.testing.assert_close(outputs["plan"], outputs["transformers"], rtol=0, atol=0)
    torch.testing.assert_close(outputs["plan"], plain)


def test_the_tower_does_not_look_at_the_grid_beside_a_plan():
    from vitkit import VisionPlan

    one, x = tower.make_tower(GEOMETRY, CPU), torch.randn(384, 1176)
    kwargs = VisionPlan.from_grid(GRID, GEOMETRY).model_kwargs()
    with torch.no_grad():
        outputs = [one(x, grid_thw=grid, **dict(kwargs)).pooler_output for grid in (torch.tensor(GRID), None)]
    assert torch.equal(*outputs)


def test_rows_of_a_forward():
    rows = list(tower.forward_rows([("two", GRID), ("too many", [[1, 200, 200]])], GEOMETRY, CPU))
    assert {row[0] for row in rows} == {"two"}
    values = {row[1:3]: row[3] for row in rows}
    theirs, plan = "forward sdpa: transformers", "forward sdpa: plan"
    assert set(values) == {
        *((version, metric) for version in (theirs, plan) for metric in (traffic.OPERATORS, traffic.BYTES)),
        (plan, "largest difference of the outputs"),
    }
    assert values[plan, "largest difference of the outputs"] == 0
    assert 0 < values[plan, traffic.OPERATORS] < values[theirs, traffic.OPERATORS]


def test_an_attention_that_fails_is_a_row(monkeypatch):
    one = tower.make_tower(GEOMETRY, CPU)

    def missing():
        raise ImportError("no varlen attention in this version")

    monkeypatch.setattr(tower, "_register_varlen", missing)
    rows = list(tower._pair("two", GRID, "varlen", GEOMETRY, CPU, one))
    assert rows == [("two", "forward varlen", "failed: ImportError: no varlen attention in this version", None, "")]


def test_a_tower_that_cannot_be_made_is_a_row(monkeypatch):
    monkeypatch.setitem(tower.NARROW, "depth", "two")
    ((case, version, metric, value, _),) = tower.forward_rows([("two", GRID)], GEOMETRY, CPU)
    assert (case, version, value) == ("two", "forward", None) and metric.startswith("failed: ")


@pytest.mark.gpu
def test_a_forward_with_a_plan_waits_for_nothing():
    device = torch.device("cuda")
    one = tower.make_tower(GEOMETRY, device, **tower.PUBLISHED | {"depth": 2})
    rows = list(tower.forward_rows([("two", GRID)], GEOMETRY, device, tower=one))
    values = {row[1:3]: row[3] for row in rows}
    for metric in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "DtoH copies"):
        assert values["forward varlen: plan", metric] == 0, rows
        assert values["forward varlen: transformers", metric] > 0 or metric == "cudaDeviceSynchronize"
    assert values["forward varlen: plan", "HtoD copies"] == 1
    assert values["forward varlen: plan", "largest difference of the outputs"] == 0
