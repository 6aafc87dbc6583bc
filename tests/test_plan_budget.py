"""Plans of fixed buffers: what they hold beyond a batch, and what they refuse."""

import numpy as np
import pytest
import torch
from test_indices import DEVICE, QWEN, same
from test_plan import random_grid

from vitkit import Geometry, VisionPlan

BUDGET = {"tokens": 20_000, "images": 12, "frames": 40, "windows": 900}


def check(plan, grid):
    """The batch's own plan at the beginning of each part, and nothing beyond it."""
    right = VisionPlan.from_grid(grid, plan.geometry, impl="reference")
    n, units = right.num_tokens, len(right.window_index)
    assert plan.num_tokens == n and plan.num_images == len(grid)
    for name in ("window_pos_ids", "rot_pos_ids"):
        ids = getattr(plan, name)
        same(ids[:n].contiguous(), getattr(right, name))
        assert len(ids) == plan.budget["tokens"] and not ids[n:].any()
    for name in ("window_index", "reverse_index"):
        index = getattr(plan, name).cpu()
        same(index[:units].contiguous(), getattr(right, name))
        assert torch.equal(index[units:], torch.arange(units, len(index), dtype=torch.int32))
    for name, segments in (("cu_seqlens", "frames"), ("cu_window_seqlens", "windows")):
        cu = getattr(plan, name).cpu()
        filled = len(getattr(right, name))
        same(cu[:filled].contiguous(), getattr(right, name))
        assert len(cu) == plan.budget[segments] + 1 and bool((cu[filled:] == n).all())
    assert right.max_seqlen <= plan.max_seqlen and right.max_window_seqlen <= plan.max_window_seqlen
    assert right.max_position <= plan.max_position


@pytest.mark.parametrize("geometry", [QWEN, Geometry.qwen2_vl()], ids=["windows", "no windows"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_one_after_another(geometry, device):
    budget = BUDGET if geometry.window else {**BUDGET, "windows": None}
    plan = VisionPlan.for_budget(geometry, **budget, device=device)
    check(plan, [])
    addresses = [value.data_ptr() for value in plan.model_kwargs().values() if isinstance(value, torch.Tensor)]
    rng = np.random.default_rng(3)
    for _ in range(100 if device == "cuda" else 20):
        grid = random_grid(rng, images=5, frames=4, side=20)
        check(plan.update(grid).replay(), grid)
    check(plan.update([]).replay(), [])
    again = [value.data_ptr() for value in plan.model_kwargs().values() if isinstance(value, torch.Tensor)]
    assert again == addresses and "BudgetPlan(0 images" in repr(plan)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_same_tokens_other_boundaries(device):
    plan = VisionPlan.for_budget(QWEN, **BUDGET, device=device)
    first = plan.update([[2, 8, 8], [1, 8, 16]]).replay().cu_seqlens.tolist()
    second = plan.update([[1, 8, 16], [2, 8, 8]]).replay().cu_seqlens.tolist()
    assert first[:5] == [0, 64, 128, 256, 256] and second[:5] == [0, 128, 192, 256, 256]


def test_a_batch_beyond_the_budget_is_refused_and_changes_nothing():
    plan = VisionPlan.for_budget(QWEN, **BUDGET, device=DEVICE).update([[1, 8, 8]]).replay()
    for grid, said in (
        ([[1, 200, 200]], "40000 tokens.*tokens=20000"),
        ([[1, 2, 2]] * 13, "13 images.*images=12"),
        ([[41, 2, 2]], "41 frames.*frames=40"),
        ([[10, 2, 190]], "240 windows.*windows=200"),
    ):
        small = VisionPlan.for_budget(QWEN, **{**BUDGET, "windows": 200}, device=DEVICE) if "windows" in said else plan
        with pytest.raises(ValueError, match=said):
            small.update(grid)
    check(plan.replay(), [[1, 8, 8]])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tokens": 6}, "tokens=6.*spatial_merge_size"),
        ({"images": 0}, "images=0"),
        ({"frames": 2.0}, "frames=2.0"),
        ({"windows": None}, "windows=None"),
        ({"windows": True}, "windows=True"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"geometry": "qwen"}, "geometry='qwen'"),
    ],
)
def test_bad_budgets(change, said):
    with pytest.raises(ValueError, match=said):
        VisionPlan.for_budget(**{"geometry": QWEN, **BUDGET, "device": "cpu", **change})


def test_it_stays_where_it_is():
    plan = VisionPlan.for_budget(QWEN, **BUDGET, device="cpu")
    assert plan.to("cpu") is plan and plan != VisionPlan.from_grid([], QWEN)
    assert plan == VisionPlan.for_budget(QWEN, **BUDGET, device="cpu")
    with pytest.raises(ValueError, match="cannot be pickled"):
        plan.__reduce__()


def test_the_kernel_beyond_the_batch_under_the_interpreter():
    """The launch that a graph captures, on the CPU: capacities larger than the batch."""
    from vitkit.plan import _triton, host, upload_table

    if DEVICE == "cuda":
        pytest.skip("the graph's own tests run here")
    plan = VisionPlan.for_budget(QWEN, tokens=1200, images=5, frames=9, windows=80, device="cpu")
    table = torch.zeros(_triton().HEADER + 5 * 5, dtype=torch.int32)
    for grid in ([[2, 8, 8], [1, 6, 10]], [[1, 4, 4]] * 5, []):
        plan.update(grid)
        upload_table(host.read_grid(grid, QWEN)[0], QWEN, torch.device("cpu"), table)
        plan._buffer.fill_(-7)
        _triton().launch(table, plan._buffer, 1200, 9, 80, 2, QWEN.window, True)
        check(plan, grid)


def test_bounds_hold_for_the_widest_batch():
    plan = VisionPlan.for_budget(QWEN, tokens=np.int64(64), images=1, frames=1, windows=9, device="cpu")
    plan.update([[1, 2, 32]]).replay()
    batch = VisionPlan.from_grid([[1, 2, 32]], QWEN)
    for name in ("max_seqlen", "max_window_seqlen", "max_position"):
        assert type(getattr(plan, name)) is int and getattr(plan, name) >= getattr(batch, name)
    assert plan.max_seqlen == 64 and plan.max_position == 31


def test_built_in_inference_mode_and_used_outside():
    with torch.inference_mode():
        plan = VisionPlan.for_budget(QWEN, **BUDGET, device=DEVICE)
    plan.update([[1, 8, 12]]).replay()
    check(plan, [[1, 8, 12]])
