"""What only a GPU can show of a plan: nothing waits, one upload, memory stays flat, and launches inside of graphs."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_indices import QWEN, same
from test_plan import check, random_grid
from test_plan_budget import BUDGET
from test_plan_budget import check as check_budget

from vitkit import VisionPlan

pytestmark = pytest.mark.gpu
WAYS = ["numba", "triton"]


def use(plan):
    """Everything that a forward pass asks of a plan."""
    return *plan.model_kwargs().values(), plan.window_pos_ids, plan.reverse_index, repr(plan)


@pytest.mark.parametrize("impl", [*WAYS, "torch", "auto"])
def test_nothing_waits(impl):
    grid = torch.tensor([[10, 36, 36], [1, 6, 10]] * 5)
    use(VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda"))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda")
        use(plan)
        moved = VisionPlan.from_grid(grid, QWEN).pin_memory().to("cuda")
        budget_free = VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda:0")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(plan, grid, QWEN, "cuda")
    check(moved, grid, QWEN, "cuda")
    check(budget_free, grid, QWEN, "cuda")


def copies(call, tmp_path):
    """Bytes of each copy between host and device during a call, by kind, from the profiler's trace."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as p:
        call()
        torch.cuda.synchronize()
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") == "gpu_memcpy"]
    return {kind: [e["args"]["bytes"] for e in found if kind in e["name"]] for kind in ("HtoD", "DtoH")}


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("images", [1, 256])
def test_one_upload_and_nothing_read_back(impl, images, tmp_path):
    grid = torch.tensor([[1, 36, 36]] * images)
    use(VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda"))
    seen = copies(lambda: use(VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda")), tmp_path)
    assert not seen["DtoH"] and len(seen["HtoD"]) == 1
    if impl == "triton":
        assert seen["HtoD"][0] <= 24 * images + 64


@pytest.mark.parametrize("impl", WAYS)
def test_pinned_memory_is_not_overwritten_while_a_copy_from_it_waits(impl):
    rng = np.random.default_rng(1)
    grids = [random_grid(rng, images=60, side=20) for _ in range(100)]
    VisionPlan.from_grid(grids[0], QWEN, impl=impl, device="cuda")
    torch.cuda._sleep(200_000_000)  # the copies queue up behind this
    plans = [VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda") for grid in grids]
    for grid, plan in zip(grids, plans):
        same(plan.window_index, VisionPlan.from_grid(grid, QWEN, impl="torch").window_index)
        same(plan.window_pos_ids, VisionPlan.from_grid(grid, QWEN, impl="torch").window_pos_ids)


@pytest.mark.parametrize("impl", [*WAYS, "auto"])
def test_a_thousand_batches_against_transformers(impl):
    vision_utils = pytest.importorskip("transformers.vision_utils")
    rng = np.random.default_rng(4)
    for _ in range(1000):
        grid = torch.from_numpy(random_grid(rng, images=4, side=12))
        plan = VisionPlan.from_grid(grid, QWEN, impl=impl, device="cuda")
        index, cu_window = vision_utils.get_vision_window_index(grid, 2, 112, 14)
        same(plan.window_index, index.int())
        same(plan.cu_window_seqlens, cu_window)
        same(plan.reverse_index, torch.argsort(index).int())
        same(plan.cu_seqlens, vision_utils.get_vision_cu_seqlens(grid))
        same(plan.rot_pos_ids, vision_utils.get_vision_position_ids(grid, 2).int())


@pytest.mark.parametrize("impl", WAYS)
def test_memory_stays_flat(impl):
    rng = np.random.default_rng(5)
    grids = [torch.from_numpy(random_grid(rng, images=12, side=20)) for _ in range(200)]

    def batches(n):
        for i in range(n):
            use(VisionPlan.from_grid(grids[i % len(grids)], QWEN, impl=impl, device="cuda"))
        torch.cuda.synchronize()
        gc.collect()
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            4096 * int(Path("/proc/self/statm").read_text().split()[1]),
        )

    before = batches(2000)
    after = batches(18_000)
    assert after[0] <= before[0] and after[1] <= before[1] + 2**21, (before, after)
    assert after[2] <= before[2] + 2**24, (before, after)  # bytes


def test_a_launch_within_the_callers_graph():
    plan = VisionPlan.for_budget(QWEN, **BUDGET, device="cuda")
    plan.update([[1, 8, 8]]).replay()
    total = torch.zeros(2, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.replay()  # becomes a part of this capture
        total[0] = plan.cu_window_seqlens.sum()
        total[1] = plan.window_pos_ids.sum()
    rng = np.random.default_rng(6)
    for _ in range(20):
        grid = random_grid(rng, images=5, frames=4, side=20)
        plan.update(grid)
        graph.replay()
        check_budget(plan, grid)
        assert total.tolist() == [int(plan.cu_window_seqlens.sum()), int(plan.window_pos_ids.sum())]


def test_updates_and_replays_wait_for_nothing():
    plan = VisionPlan.for_budget(QWEN, **BUDGET, device="cuda")
    grids = [[[1, 8, 8]], [[2, 36, 36], [1, 6, 10]], [[1, 36, 36]] * 8]
    kept = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)  # every table is written before the first is read
        for grid in grids:
            plan.update(grid).replay()
            kept.append([plan.cu_seqlens.clone(), plan.window_pos_ids.clone()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for grid, (cu, ids) in zip(grids, kept):
        right = VisionPlan.from_grid(grid, QWEN, impl="torch")
        same(cu[: len(right.cu_seqlens)].contiguous(), right.cu_seqlens)
        same(ids[: right.num_tokens].contiguous(), right.window_pos_ids)


def test_it_goes_to_a_gpu_and_back():
    grid = [[3, 8, 12], [1, 6, 10]]
    plan = VisionPlan.from_grid(grid, QWEN)
    up = plan.to("cuda")
    check(up, grid, QWEN, "cuda")
    assert up == plan and up.impl == plan.impl and up.to("cuda") is up and "cuda:0" in repr(up)
    check(up.to("cpu"), grid, QWEN, "cpu")
    with pytest.raises(ValueError, match="cannot be pickled"):
        up.__reduce__()
    with pytest.raises(ValueError, match="grid_thw is a tensor on cuda:0"):
        VisionPlan.from_grid(torch.tensor(grid, device="cuda"), QWEN)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
@pytest.mark.parametrize("impl", WAYS)
def test_a_gpu_that_is_not_current(impl):
    for _ in range(2):
        plan = VisionPlan.from_grid([[3, 8, 12]], QWEN, impl=impl, device="cuda:1")
        check(plan, [[3, 8, 12]], QWEN, "cuda:1")


def test_two_billion_patches_hold_in_32_bits():
    """ids of 2^31 - 4 patches are 16 GiB: entries beyond 2^32 have 64-bit offsets."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("too little free memory on this GPU")
    side = 46_340
    plan = VisionPlan.from_grid([[1, side, side]], QWEN, impl="triton", device="cuda")
    assert plan.window_pos_ids[-1].tolist() == [side - 1, side - 1]
    assert int(plan.window_index[-1]) == (side // 2) ** 2 - 1 == int(plan.reverse_index[-1])
    assert int(plan.cu_window_seqlens[-1]) == side * side
    places = torch.randint(0, side * side // 4, (1000,), device="cuda")
    assert torch.equal(plan.reverse_index[plan.window_index[places]].long(), places)
