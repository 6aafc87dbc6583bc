"""The cache by image size is a fair opponent only if its batches are right, hit or missed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkit import Geometry, reference, rotary_cos_sin
from vitkit.lab.size_cache import NumpySizeCache, SizeCache

KINDS = (SizeCache, NumpySizeCache)
GEOMETRY = Geometry(num_heads=2, head_dim=8)
SIDES = st.integers(1, 9).map(lambda x: 2 * x)
GRIDS = st.lists(st.tuples(st.integers(1, 3), SIDES, SIDES).map(list), min_size=1, max_size=6)


def check(tensors, grid, device="cpu"):
    m, ws = GEOMETRY.spatial_merge_size, GEOMETRY.window
    index, reverse, cu_windows = reference.window_index(grid, m, ws)
    ids = reference.rot_pos_ids(grid, m).view(-1, m * m, 2)[index].view(-1, 2)
    expected = (index, reverse, reference.cu_seqlens(grid), cu_windows)
    for x, right in zip(tensors, expected):
        torch.testing.assert_close(x.cpu(), right, rtol=0, atol=0)
        assert x.device.type == device
    for x, right in zip(tensors[4:], rotary_cos_sin(ids, GEOMETRY)):
        torch.testing.assert_close(x.cpu(), right, rtol=0, atol=1e-6)
        assert x.device.type == device


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(grids=st.lists(GRIDS, min_size=1, max_size=3))
def test_batches_one_after_another_equal_the_reference(kind, grids):
    cache = kind(GEOMETRY)
    for grid in grids + grids[:1]:
        check(cache(torch.tensor(grid)), grid)
    assert set(cache.entries) == {tuple(row) for grid in grids for row in grid}


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_is_computed_once(kind, monkeypatch):
    cache, seen = kind(GEOMETRY), []
    computed = cache._computed
    monkeypatch.setattr(cache, "_computed", lambda size: seen.append(size) or computed(size))
    for grid in ([[1, 8, 8]] * 3, [[1, 8, 8], [2, 4, 6]], [[2, 4, 6]]):
        cache(torch.tensor(grid))
    assert seen == [(1, 8, 8), (2, 4, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_not_change_what_is_kept(kind):
    cache = kind(GEOMETRY)
    for _ in range(3):
        out = cache(torch.tensor([[1, 8, 10], [2, 4, 6]]))
        for x in out:
            x.zero_()
    check(cache(torch.tensor([[2, 4, 6], [1, 8, 10]])), [[2, 4, 6], [1, 8, 10]])


def test_a_geometry_without_windows_is_refused():
    with pytest.raises(ValueError, match="window_size=None"):
        SizeCache(Geometry.qwen2_vl())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_hits_on_a_gpu_wait_for_nothing(kind):
    cache, grid = kind(GEOMETRY, "cuda"), torch.tensor([[1, 8, 10], [2, 36, 36], [1, 8, 10]])
    cache(grid)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tensors = cache(grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(tensors, grid.tolist(), "cuda")
