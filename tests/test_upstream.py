"""Every block of docs/upstream.md runs, and returns what the function of that name and signature returns."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import upstream_standins as standins

import vitkit
from vitkit.lab.results import repo_root

PAGE = (repo_root() / "docs" / "upstream.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
GRIDS = [
    [[1, 8, 8]],  # one window, which divides the frame
    [[2, 6, 10]],  # a clip, no window whole
    [[1, 16, 16], [3, 10, 22], [1, 2, 2]],
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def page():
    """The names that the page's blocks define, in the order of the page."""
    names = {}
    for block in BLOCKS:
        exec(compile(block, "docs/upstream.md", "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def tower(request):
    geometry = vitkit.Geometry.qwen2_5_vl()
    known = {"spatial_merge_size": 2, "spatial_merge_unit": 4, "head_dim": 80, "side": 4}
    return SimpleNamespace(geometry=geometry, device=torch.device("cpu"), dtype=request.param, **known)


def functions(module):
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in found if not name.startswith("_")}


def same(ours, theirs, dtypes=True):
    """Index tensors: equal in values and shape, and in dtype where `dtypes`."""
    assert ours.shape == theirs.shape and torch.equal(ours.long(), theirs.long())
    assert ours.dtype == theirs.dtype or not dtypes


def close(ours, theirs):
    """cos, sin and what they rotate: float32 up to the angles' rounding, bfloat16 up to one rounding more."""
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_signatures_are_those_of_the_stand_ins(page):
    mine = {name: f for name, f in vars(page).items() if inspect.isfunction(f)}
    extra = {"forward_of_tower", "rotate_qkv_by_position"}  # ways that exist in vitkit alone
    assert set(mine) - extra == set(functions(standins))
    for name, standin in functions(standins).items():
        assert inspect.signature(mine[name]) == inspect.signature(standin), name
        assert f"`{name}" in PAGE or f".{name}" in PAGE or f"def {name}" in PAGE


@pytest.mark.parametrize("grid", GRIDS)
def test_transformers_index_tensors(page, grid):
    grid_thw = torch.tensor(grid)
    same(page.get_vision_position_ids(grid_thw, 2), standins.get_vision_position_ids(grid_thw, 2), dtypes=False)
    ours, theirs = (f.get_vision_window_index(grid_thw, 2, 112, 14) for f in (page, standins))
    same(ours[0], theirs[0], dtypes=False)
    same(ours[1], theirs[1])
    for merged in (False, True):
        same(page.get_vision_cu_seqlens(grid_thw, merged), standins.get_vision_cu_seqlens(grid_thw, merged))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_stand_ins_are_transformers_own(grid):
    utils = pytest.importorskip("transformers.vision_utils", reason="transformers is not installed")
    grid_thw = torch.tensor(grid)
    for name, more in (("position_ids", (2,)), ("window_index", (2, 112, 14)), ("cu_seqlens", (True,))):
        real, standin = getattr(utils, f"get_vision_{name}"), getattr(standins, f"get_vision_{name}")
        assert list(inspect.signature(real).parameters) == list(inspect.signature(standin).parameters)
        pairs = zip(
            *(out if isinstance(out, tuple) else (out,) for out in (f(grid_thw, *more) for f in (real, standin)))
        )
        for theirs, mine in pairs:
            same(mine, theirs)


def test_a_tower_takes_the_plan(page):
    seen = {}

    def tower(hidden_states, grid_thw, **kwargs):
        seen.update(kwargs)
        return hidden_states

    grid = GRIDS[-1]
    pixels, table = torch.zeros(1, 1), torch.tensor(grid)
    assert page.forward_of_tower(tower, pixels, grid) is pixels
    index, ends = standins.get_vision_window_index(table, 2, 112, 14)
    expected = {"position_ids": standins.get_vision_position_ids(table, 2), "window_index": index}
    expected |= {"cu_window_seqlens": ends, "cu_seqlens": standins.get_vision_cu_seqlens(table)}
    for name, value in expected.items():
        same(seen.pop(name), value, dtypes=False)
    assert seen == {"max_seqlen": 256, "max_window_seqlen": 64}


@pytest.mark.parametrize("grid", GRIDS)
def test_vllm(page, tower, grid):
    for t, h, w in grid:
        for ours, theirs in zip(page.rotary_pos_emb_thw(tower, t, h, w), standins.rotary_pos_emb_thw(tower, t, h, w)):
            close(ours, theirs)
        for ours, theirs in zip(
            page.get_window_index_thw(tower, t, h, w), standins.get_window_index_thw(tower, t, h, w)
        ):
            same(ours, theirs)
        ours, theirs = page.get_rope_by_thw(tower, t, h, w), standins.get_rope_by_thw(tower, t, h, w)
        assert len(ours) == len(theirs) == 5
        for mine, other in zip(ours, theirs):
            close(mine, other) if mine.is_floating_point() else same(mine, other)
    ours, theirs = page.prepare_encoder_metadata(tower, grid), standins.prepare_encoder_metadata(tower, grid)
    assert ours.keys() == theirs.keys() and all(f'"{key}"' in PAGE for key in ours)
    for key, mine in ours.items():
        close(mine, theirs[key]) if mine.is_floating_point() else same(mine, theirs[key], dtypes=False)


@pytest.mark.parametrize("grid", GRIDS)
def test_vllm_rotation(page, tower, grid):
    about = standins.prepare_encoder_metadata(tower, grid)
    cos, sin = about["rotary_pos_emb_cos"], about["rotary_pos_emb_sin"]
    qkv = torch.randn(1, len(cos), 3, 2, 80, generator=torch.Generator().manual_seed(0)).to(tower.dtype)
    theirs = standins.rotate_qkv(qkv, cos, sin)
    for mine, other in zip(page.rotate_qkv(qkv.clone(), cos, sin), theirs):
        close(mine, other)
    assert not torch.equal(theirs[0], qkv[:, :, 0])
    plan, table = vitkit.VisionPlan.from_grid(grid, tower.geometry), vitkit.rotary_table(tower.geometry, 255)
    exact = standins.prepare_encoder_metadata(SimpleNamespace(**{**vars(tower), "dtype": torch.float32}), grid)
    theirs = standins.rotate_qkv(qkv, exact["rotary_pos_emb_cos"], exact["rotary_pos_emb_sin"])
    for mine, other in zip(page.rotate_qkv_by_position(qkv.clone(), plan, table), theirs):
        close(mine, other)


@pytest.mark.parametrize("grid", GRIDS)
def test_sglang(page, tower, grid):
    grid_thw = torch.tensor(grid)
    for _, h, w in grid:
        same(page.rot_pos_ids(h, w, 2), standins.rot_pos_ids(h, w, 2))
    (index, ends), (their_index, their_ends) = (f.get_window_index(tower, grid_thw) for f in (page, standins))
    same(index, their_index)
    same(ends, torch.unique_consecutive(torch.tensor(their_ends, dtype=torch.int32)))
    same(page.permute_inv_of(tower, grid_thw), standins.permute_inv_of(tower, grid_thw), dtypes=False)
    theirs = standins.full_cu_seqlens(tower, grid_thw)
    assert theirs[0] == theirs[1] == 0
    same(page.full_cu_seqlens(tower, grid_thw), theirs[1:])


def test_sglang_position_embeddings(page, tower):
    grid_thw, exact = torch.tensor(GRIDS[-1]), SimpleNamespace(**{**vars(tower), "dtype": torch.float32})
    ours, theirs = page.position_embeddings(tower, grid_thw), standins.position_embeddings(tower, grid_thw)
    for mine, other, right in zip(ours, theirs, standins.position_embeddings(exact, grid_thw)):
        close(mine, right.to(tower.dtype))
        assert mine.dtype == other.dtype and mine.shape == other.shape
        if tower.dtype != torch.float32:  # as the page says of 16-bit angles
            assert (mine.float() - right).abs().max() * 3 < (other.float() - right).abs().max()


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb_vision", "apply_rotary_pos_emb"])
def test_rotation_of_q_and_k(page, tower, name):
    cos, sin = standins.position_embeddings(
        SimpleNamespace(**{**vars(tower), "dtype": torch.float32}), torch.tensor(GRIDS[0])
    )
    qkv = torch.randn(len(cos), 3, 2, 80, generator=torch.Generator().manual_seed(1)).to(tower.dtype)
    ours, theirs = (getattr(f, name)(qkv[:, 0], qkv[:, 1], cos, sin) for f in (page, standins))
    for mine, other in zip(ours, theirs):
        close(mine, other)
    assert not torch.equal(ours[0], ours[1])
