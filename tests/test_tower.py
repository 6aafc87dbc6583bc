"""The towers of the notebooks; a forward with a plan's index tensors gives the same result as with its own."""

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


TINY_TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}  # fmt: skip


@pytest.mark.parametrize("name", tower.TOWERS)
def test_a_tower_for_each_model(name):
    geometry = getattr(Geometry, name)()
    one = tower.make_tower(geometry, CPU, depth=3)
    assert tower.tower_name(one) == name and len(one.blocks) == 3 and not one.training
    assert one.rotary_pos_emb.inv_freq.dtype == torch.float32
    outputs = [call() for call in tower.forwards(one, GRID, geometry, CPU).values()]
    assert outputs[0].shape == (96, 64) and outputs[0].std() > 0
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_rows_of_a_forward_without_windows():
    rows = list(tower.forward_rows([("two", GRID)], Geometry.qwen2_vl(), CPU))
    values = {row[1:3]: row[3] for row in rows}
    assert values["forward sdpa: plan", "largest difference of the outputs"] == 0
    assert values["forward sdpa: transformers", traffic.BYTES] == 2 * 8 * 384 + 4 * 4  # int64 ids, int32 offsets
    assert values["forward sdpa: plan", traffic.BYTES] == 2 * 4 * 384 + 4 * 4


@pytest.mark.parametrize("name", tower.TOWERS)
def test_the_published_dimensions(name):
    geometry = getattr(Geometry, name)()
    one = tower.make_tower(geometry, "meta", **(tower.PUBLISHED if geometry.window else tower.PUBLISHED_QWEN2))
    assert Geometry.from_config(one.config) == geometry
    assert len(one.blocks) == 32 and one.merger.mlp[2].out_features == 3584
    assert sum(p.numel() for p in one.parameters()) == pytest.approx(0.67e9, rel=0.02)


def test_towers_by_name():
    both = tower.make_towers("both", "", CPU)
    assert list(both) == ["qwen2_5_vl", "qwen2_vl"] and all(len(one.blocks) == 4 for one in both.values())
    assert list(tower.make_towers("qwen2_vl", "", CPU)) == ["qwen2_vl"]
    with pytest.raises(ValueError, match="tower='qwen3_vl': one of qwen2_5_vl, qwen2_vl and both is allowed"):
        tower.make_towers("qwen3_vl", "", CPU)
    with pytest.raises(ValueError, match="tower is a Linear: a Qwen2_5_VisionTransformerPretrainedModel or"):
        tower.tower_name(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", tower.TOWERS)
def test_the_tower_of_a_checkpoint(name, tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = dict(tower.NARROW if name == "qwen2_5_vl" else tower.NARROW_QWEN2)
    width = "out_hidden_size" if name == "qwen2_5_vl" else "hidden_size"
    ids = {f"{what}_token_id": i for i, what in enumerate(("image", "video", "vision_start", "vision_end"))}
    config = AutoConfig.for_model(name, text_config=TINY_TEXT, vision_config=vision | {width: 32}, **ids)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    both = tower.make_towers("both", str(tmp_path), CPU)
    assert list(both) == [name] and not both[name].training
    theirs = dict(whole.model.visual.named_parameters())
    assert all(torch.equal(p, theirs.pop(key)) and p.dtype == torch.float32 for key, p in both[name].named_parameters())
    assert not theirs and both[name].config._attn_implementation == "sdpa"


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a bert: a checkpoint of qwen2_5_vl or qwen2_vl is allowed"):
        tower.load_tower(str(tmp_path), CPU)


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
