"""VisionPlan against the single functions, by every way; what it refuses; copies of it; and its place in a tower."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_indices import CASES, DEVICE, QWEN, same

import vitkit
from vitkit import Geometry, VisionPlan, tuned
from vitkit import plan as plan_module
from vitkit.plan import IMPLEMENTATIONS

GEOMETRIES = [
    QWEN,
    Geometry.qwen2_vl(),
    Geometry(spatial_merge_size=3, window_size=14 * 3 * 5),
    Geometry(window_size=28),
]
LADDER = [[[1, 8, 8]], [[1, 36, 36]], [[10, 36, 36]], [[10, 36, 36]] * 10, [[1, 36, 36]] * 256]


def random_grid(rng, m=2, images=6, frames=3, side=16):
    n = int(rng.integers(1, images))
    t, h, w = rng.integers(1, frames + 1, n), rng.integers(1, side, n) * m, rng.integers(1, side, n) * m
    grid = np.stack([t, h, w], 1)
    return np.repeat(grid, rng.integers(1, 3, n), 0)  # an image of the size of the one before is filled in otherwise


def check(plan, grid, geometry, device=DEVICE, by="reference"):
    """Equal to the single functions, by default the reference's, in value, dtype, shape and place."""
    windows = vitkit.window_index(grid, geometry, impl=by)
    frames = vitkit.cu_seqlens(grid, geometry, impl=by)
    ids = {order: vitkit.rot_pos_ids(grid, geometry, impl=by, order=order) for order in ("image", "window")}
    expected = {
        "rot_pos_ids": ids["image"],
        "window_pos_ids": ids["window"],
        "window_index": windows.index,
        "reverse_index": windows.reverse,
        "cu_seqlens": frames.cu_seqlens,
        "cu_window_seqlens": windows.cu_seqlens,
    }
    for name, right in expected.items():
        ours = getattr(plan, name)
        assert ours.device.type == torch.device(device).type and ours.shape == right.shape, name
        same(ours, right)
    numbers = plan.num_tokens, plan.max_seqlen, plan.max_window_seqlen, plan.max_position, plan.num_images
    assert all(type(number) is int for number in numbers)
    position = int(ids["image"].max()) if len(ids["image"]) else 0
    assert numbers == (len(ids["image"]), frames.max_seqlen, windows.max_seqlen, position, len(grid))


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "auto"])
def test_stored_cases(impl):
    for case in [*CASES["cases"], CASES["empty"]]:
        plan = VisionPlan.from_grid(case["grid_thw"], QWEN, impl=impl, device=DEVICE)
        for name, right in case["expected"].items():
            ours = getattr(plan, name)
            same(ours, right) if isinstance(ours, torch.Tensor) else None
            assert isinstance(ours, torch.Tensor) or ours == right


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "auto"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_equals_the_single_functions(impl, geometry):
    rng = np.random.default_rng(0)
    for _ in range(12):
        grid = random_grid(rng, geometry.spatial_merge_size)
        check(VisionPlan.from_grid(grid, geometry, impl=impl, device=DEVICE), grid, geometry)
    check(VisionPlan.from_grid([], geometry, impl=impl, device=DEVICE), [], geometry)
    if impl != "reference":  # which pads to the window
        huge = replace(geometry, window_size=2**31 - 1)  # one window a frame
        check(VisionPlan.from_grid(grid, huge, impl=impl, device=DEVICE), grid, huge, by="torch")


@given(st.integers(0, 2**32), st.sampled_from(GEOMETRIES))
@settings(max_examples=60)
def test_numba_equals_torch(seed, geometry):
    grid = random_grid(np.random.default_rng(seed), geometry.spatial_merge_size, side=30)
    check(VisionPlan.from_grid(grid, geometry, impl="numba"), grid, geometry, "cpu")


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_every_form_of_a_grid(impl):
    rows = [[1, 8, 12], [2, 4, 4]]
    right = VisionPlan.from_grid(rows, QWEN, impl="reference")
    wide = np.array(rows * 2)[::2][:, ::-1][:, ::-1]
    forms = [
        rows, [tuple(r) for r in rows], tuple(rows), np.array(rows), np.array(rows, np.int16), torch.tensor(rows),
        torch.tensor(rows).int(), [np.array(r) for r in rows], [torch.tensor(r) for r in rows], np.asfortranarray(rows),
        [[np.int64(v) for v in r] for r in rows], wide[[0, 0]] * 0 + rows,
    ]  # fmt: skip
    for grid in forms:
        plan = VisionPlan.from_grid(grid, QWEN, impl=impl)
        assert plan == right
        check(plan, rows, QWEN, "cpu")


def test_the_grid_may_change_afterwards():
    grid = torch.tensor([[1, 8, 8]])
    plan = VisionPlan.from_grid(grid, QWEN)
    grid[0, 1] = 16
    assert plan == VisionPlan.from_grid([[1, 8, 8]], QWEN) != VisionPlan.from_grid(grid, QWEN)


@pytest.mark.parametrize("case", CASES["errors"], ids=str)
def test_what_must_be_refused(case):
    with pytest.raises(ValueError, match="grid_thw"):
        VisionPlan.from_grid(case["grid_thw"], QWEN)


@pytest.mark.parametrize(
    "grid, said",
    [
        ([[1, 8, True]], "True"),
        ([[1, 8, 8.0]], "8.0"),
        ([[1, 8, 8], [0, 8, 8]], r"grid_thw\[1\]"),
        (torch.tensor([[1, 7, 8]]), "multiples of spatial_merge_size=2"),
        (np.array([[1, 8, 8], [2, 2**15, 2**15]]), "2147483712"),
        ([[2**62, 2, 2]], "below 2.31"),
        ([[1, 2**40, 2**40]], "below 2.31"),
        ([[2**70, 2, 2]], "below 2.31"),
        (torch.ones(1, 3), "integers are allowed|one of integers"),
        ([[1, 8]], "three integers"),
        (torch.ones(3, dtype=torch.int64), r"grid_thw\[0\]"),
        ("1x8x8", "grid_thw='1x8x8'"),
    ],
)  # fmt: skip
def test_a_bad_grid_is_named(grid, said):
    with pytest.raises(ValueError, match=said):
        VisionPlan.from_grid(grid, QWEN)


def test_other_bad_arguments():
    for arguments, said in (
        ({"impl": "cuda"}, "impl='cuda'.*'auto'"),
        ({"impl": 3}, "impl=3"),
        ({"device": "cpus"}, "device='cpus'"),
        ({"geometry": None}, "geometry=None"),
    ):
        with pytest.raises(ValueError, match=said):
            VisionPlan.from_grid([[1, 8, 8]], **{"geometry": QWEN, **arguments})


def test_a_device_of_another_kind_gets_a_copy():
    assert VisionPlan.from_grid([[1, 8, 8]], QWEN).to("meta").window_index.is_meta
    plan = VisionPlan.from_grid([[1, 8, 8]], QWEN, device="meta")
    assert plan.window_index.device.type == "meta" and plan.rot_pos_ids.shape == (64, 2)


@pytest.mark.parametrize("impl", ["numba", "torch", "reference", "auto"])
def test_torchs_default_device_does_not_matter(impl):
    right = VisionPlan.from_grid([[1, 8, 12]], QWEN)
    fixed = {"tokens": 200, "images": 2, "frames": 2, "windows": 20, "device": "cpu"}
    with torch.device("meta"):  # stands for a GPU
        plan = VisionPlan.from_grid([[1, 8, 12]], QWEN, impl=impl)
        budget = VisionPlan.for_budget(QWEN, **fixed).update([[1, 8, 12]]).replay()
    same(plan.window_pos_ids, right.window_pos_ids)
    same(budget.cu_window_seqlens[: len(right.cu_window_seqlens)].contiguous(), right.cu_window_seqlens)


def test_first_called_in_a_compiled_function():
    code = (
        "import torch; from vitkit import Geometry, VisionPlan; g = Geometry()\n"
        "f = torch.compile(lambda x, grid: x + VisionPlan.from_grid(grid, g).cu_seqlens.sum(), backend='eager')\n"
        "assert float(f(torch.ones(1), [[1, 8, 8]])) == 65 and float(f(torch.ones(1), [[2, 8, 8]])) == 193\n"
        "b = VisionPlan.for_budget(g, tokens=64, images=1, frames=1, windows=9, device='cpu')\n"
        "h = torch.compile(lambda x, grid: x + b.update(grid).num_tokens, backend='eager')\n"
        "assert float(h(torch.ones(1), [[1, 4, 8]])) == 33"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_plans_are_equal_by_grid_and_geometry():
    plan = VisionPlan.from_grid([[1, 8, 16]], QWEN)
    assert plan == VisionPlan.from_grid([[1, 8, 16]], QWEN, impl="torch")
    assert plan != VisionPlan.from_grid([[1, 16, 8]], QWEN)  # the same counts
    small = VisionPlan.from_grid([[1, 8, 8]], QWEN)
    assert small != VisionPlan.from_grid([[1, 8, 8]], replace(QWEN, window_size=224))  # one window in both


@pytest.mark.parametrize("grid", [[[2**30, 2**30, 2**30]], [[1, 2**30, 2**30]], [[2**30, 2, 2]], [[1, 2**31, 2]]])
def test_more_patches_than_offsets_can_count(grid):
    with pytest.raises(ValueError, match="grid_thw"):
        VisionPlan.from_grid(grid, QWEN)


def test_auto_takes_the_second_way_from_its_threshold_on(monkeypatch):
    ways = ("first", "x"), ("second", "x"), 64
    monkeypatch.setattr(plan_module, "_auto", lambda device, threads: ways)
    taken = [plan_module._choose("auto", n, torch.device("cpu"))[0] for n in (63, 64, 65)]
    assert taken == ["first", "second", "second"]


def test_numba_that_does_not_import_is_as_none(monkeypatch):
    def refuse(name):
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(plan_module.host, "import_module", refuse)
    plan_module.host.has_numba.cache_clear()
    tuned.forget()
    try:
        plan = VisionPlan.from_grid([[1, 8, 8]], QWEN)
        assert plan.impl == "torch" and "numba not installed" in plan.chosen_by
        with pytest.raises(ValueError, match="numba is not installed"):
            VisionPlan.from_grid([[1, 8, 8]], QWEN, impl="numba")
    finally:
        plan_module.host.has_numba.cache_clear()
        tuned.forget()


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setattr("vitkit.plan._installed", lambda name: False)
    with pytest.raises(ValueError, match="numba is not installed"):
        VisionPlan.from_grid([[1, 8, 8]], QWEN, impl="numba")
    monkeypatch.setattr("vitkit.plan.host.has_numba", lambda: False)
    tuned.forget()
    plan = VisionPlan.from_grid([[1, 8, 8], [3, 4, 12]], QWEN)
    tuned.forget()
    assert plan.impl == "torch" and plan.chosen_by == "auto: numba not installed"
    check(plan, [[1, 8, 8], [3, 4, 12]], QWEN, "cpu")
    monkeypatch.setattr("vitkit.plan._installed", lambda name: name == "triton")
    for grid in ([[1, 8, 8], [3, 4, 12]], [[1, 4, 4]], []):  # triton's table without numba
        check(VisionPlan.from_grid(grid, QWEN, impl="triton", device=DEVICE), grid, QWEN)


def test_one_buffer():
    plan = VisionPlan.from_grid([[3, 8, 12]], QWEN)
    names = ("window_pos_ids", "window_index", "reverse_index", "cu_seqlens", "cu_window_seqlens")
    assert len({getattr(plan, name).untyped_storage().data_ptr() for name in names}) == 1
    assert plan.rot_pos_ids is plan.rot_pos_ids  # gathered once


def test_copies():
    plan = VisionPlan.from_grid([[3, 8, 12]], QWEN, impl="torch")
    assert plan.to("cpu") is plan
    for other in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        assert other == plan and other.impl == "torch" and other.chosen_by == plan.chosen_by
        check(other, [[3, 8, 12]], QWEN, "cpu")
    assert plan != VisionPlan.from_grid([[3, 8, 12]], Geometry.qwen2_vl()) and plan != 3
    assert "1 images or clips, 288 patches, 3 frames" in repr(plan) and "by torch, asked for" in repr(plan)


def _collate(rows):
    return VisionPlan.from_grid([list(row) for row in rows], QWEN)


def test_a_worker_of_a_data_loader_builds_it():
    rows = [(1, 8, 8), (2, 4, 6), (1, 12, 16), (1, 4, 4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1, collate_fn=_collate)
    for i, plan in enumerate(loader):
        check(plan, [list(row) for row in rows[2 * i : 2 * i + 2]], QWEN, "cpu")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_tower_takes_its_arguments(name):
    transformers = pytest.importorskip("transformers")
    small = dict(depth=2, num_heads=2, patch_size=14, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    if name == "qwen2_vl":
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as Tower

        config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
            embed_dim=64, hidden_size=64, mlp_ratio=2, **small
        )
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

        config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
            hidden_size=64,
            out_hidden_size=64,
            intermediate_size=128,
            window_size=112,
            fullatt_block_indexes=[1],
            **small,
        )
    torch.manual_seed(0)
    tower, grid = Tower(config).eval(), torch.tensor([[2, 12, 20], [1, 8, 8]])
    plan = VisionPlan.from_grid(grid, Geometry.from_config(config))
    pixels = torch.randn(plan.num_tokens, 3 * 2 * 14 * 14)
    with torch.no_grad():
        theirs, ours = tower(pixels, grid), tower(pixels, grid, **plan.model_kwargs())
    for key in ("last_hidden_state", "pooler_output"):
        assert torch.equal(getattr(theirs, key), getattr(ours, key))


@pytest.mark.parametrize("impl", ["numba", "triton"])
def test_ten_thousand_images(impl):
    rng = np.random.default_rng(2)
    n = 10_000 if DEVICE == "cuda" or impl == "numba" else 50
    grid = np.stack([rng.integers(1, 3, n), rng.integers(1, 5, n) * 2, rng.integers(1, 5, n) * 2], 1)
    check(VisionPlan.from_grid(grid, QWEN, impl=impl, device=DEVICE), grid, QWEN)
