import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitkit import Geometry
from vitkit import geometry as geo

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
QWEN = Geometry.qwen2_5_vl()


@pytest.mark.parametrize("bad", CASES["errors"], ids=lambda e: f"{e['why']}-{e['grid_thw']}")
def test_bad_grids_are_refused_with_the_offending_value(bad):
    with pytest.raises(ValueError, match="grid_thw") as e:
        geo.check_grid_thw(bad["grid_thw"], QWEN)
    assert "allowed" in str(e.value) or "must be" in str(e.value)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        7,
        {1: 2},
        np.array([1, 8, 8]),
        np.array(3),
        torch.tensor([1, 8, 8]),
        torch.tensor([[1.0, 8.0, 8.0]]),
        torch.tensor([[True, True, True]]),
        np.array([[1, 8, 8]], dtype=np.float32),
        [[1, 8, None]],
        [[1, 8, 0]],
        [[1, 0, 8]],
        np.empty((0, 5), dtype=np.int64),
        np.empty((0, 3)),
        torch.empty(0),
        torch.tensor([[1, 8, 8]]).to_sparse(),
        [[1, 8, np.bool_(True)]],
        [[1, 8, float("nan")]],
        [(1, 8, 8), "188"],
        [[[1, 8, 8]]],
        [[2**31 - 1, 2, 2], [2**40, 2, 2]],
    ],
    ids=repr,
)
def test_other_bad_grids_are_refused(bad):
    with pytest.raises(ValueError, match="grid_thw"):
        geo.check_grid_thw(bad, QWEN)


def test_the_error_names_row_value_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"grid_thw\[1\]=\[1, 8, 9\].*multiples of spatial_merge_size=2"):
        geo.check_grid_thw([[1, 8, 8], [1, 8, 9]], QWEN)


def test_patches_are_counted_without_overflow():
    assert geo.check_grid_thw([[1, 2**15, 2**15]], QWEN)
    with pytest.raises(ValueError, match="below 2\\^31"):
        geo.check_grid_thw([[1, 2**15, 2**15], [1, 2**15, 2**15]], QWEN)


def test_a_tensor_on_a_gpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="keep it on the CPU"):
        geo.check_grid_thw(torch.empty(1, 3, dtype=torch.int64, device="meta"), QWEN)


@pytest.mark.parametrize(
    "grid",
    [
        [(3, 4, 6)],
        ((3, 4, 6),),
        np.array([[3, 4, 6]], dtype=np.uint8),
        torch.tensor([[3, 4, 6]], dtype=torch.int32),
        [np.array([3, 4, 6])],
        [torch.tensor([3, 4, 6])],
        [[np.int64(3), np.int32(4), np.uint16(6)]],
    ],
    ids=repr,
)
def test_every_form_of_the_grid_becomes_plain_ints(grid):
    checked = geo.check_grid_thw(grid, QWEN)
    assert checked == [(3, 4, 6)] and all(type(v) is int for v in checked[0])


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 3), dtype=np.int64), torch.empty(0, 3, dtype=torch.int64)])
def test_an_empty_grid_is_legal(empty):
    assert geo.check_grid_thw(empty, QWEN) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"patch_size": 0},
        {"spatial_merge_size": True},
        {"window_size": 27},
        {"window_size": 0},
        {"num_heads": 2.0},
        {"head_dim": 82},
        {"rope_theta": -1.0},
        {"rope_theta": float("nan")},
        {"rope_theta": "1e4"},
        {"rope_theta": 10**400},
        {"window_size": 2**31},
    ],
    ids=str,
)
def test_a_bad_geometry_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Geometry(**bad)


def test_numpy_numbers_in_a_geometry_become_plain_ones():
    small = Geometry(spatial_merge_size=np.uint8(2), window_size=np.uint8(112), rope_theta=np.float32(10000))
    assert small == QWEN and type(small.window_size) is int and type(small.rope_theta) is float


def test_counts():
    grid = [(3, 6, 10), (1, 8, 8), (2, 2, 34)]
    assert (geo.num_patches(grid), geo.num_frames(grid)) == (180 + 64 + 136, 6)
    assert geo.num_windows(grid, QWEN) == 3 * 2 + 1 + 2 * 5 and geo.num_windows(grid, Geometry.qwen2_vl()) == 6
    assert (geo.num_patches([]), geo.num_frames([]), geo.num_windows([], QWEN)) == (0, 0, 0)


def test_the_published_geometries():
    assert (QWEN.window, Geometry.qwen2_vl().window, Geometry.qwen3_vl().head_dim) == (4, 0, 72)
    assert hash(QWEN) == hash(Geometry())


def test_geometry_of_the_installed_transformers_configs():
    pytest.importorskip("transformers")
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    assert Geometry.from_config(Qwen2VLVisionConfig()) == Geometry.qwen2_vl()
    assert Geometry.from_config(Qwen2_5_VLVisionConfig(hidden_size=1280)) == Geometry.qwen2_5_vl()
    assert Geometry.from_config(Qwen3VLVisionConfig()) == Geometry.qwen3_vl()
    other = Qwen2_5_VLVisionConfig(hidden_size=512, num_heads=8, patch_size=16, spatial_merge_size=3, window_size=96)
    assert Geometry.from_config(other) == Geometry(16, 3, 96, 8, 64)
    assert Geometry.from_config(SimpleNamespace(vision_config=other)) == Geometry.from_config(other)
