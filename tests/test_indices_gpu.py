"""What only a GPU can show of the index tensors: nothing waits, and a pinned buffer is not overwritten in flight."""

import numpy as np
import pytest
import torch
from test_indices import FAST, QWEN, equals_reference, same

import vitkit


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["torch", "numba", "triton", "auto"])
def test_on_a_gpu_nothing_waits(impl):
    grid = [[10, 36, 36], [1, 6, 10]] * 5
    for call in (vitkit.rot_pos_ids, vitkit.window_index, vitkit.cu_seqlens):
        call(grid, QWEN, impl=impl, device="cuda")  # compile first
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(grid, QWEN, impl=impl, device="cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", FAST)
def test_on_a_gpu_many_images_and_pinned_buffers_are_not_overwritten(impl):
    rng = np.random.default_rng(1)
    grids = [
        np.stack([rng.integers(1, 4, n), rng.integers(1, 20, n) * 2, rng.integers(1, 20, n) * 2], axis=1)
        for n in rng.integers(1, 60, 100)
    ]
    wait = torch.cuda._sleep if hasattr(torch.cuda, "_sleep") else lambda n: None
    wait(200_000_000)  # the copies queue up behind this
    ours = [vitkit.window_index(g, QWEN, impl=impl, device="cuda") for g in grids]
    for g, o in zip(grids, ours):
        same(o.index, vitkit.window_index(g, QWEN, impl="reference").index)
    equals_reference(np.tile([[1, 8, 6]], (10_000, 1)), QWEN, impl)
