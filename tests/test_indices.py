"""Every implementation against the stored cases, the reference and the installed transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitkit
from vitkit import Geometry
from vitkit.indices import IMPLEMENTATIONS

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, conftest has Triton's interpreter on
IMPLS = list(IMPLEMENTATIONS["rot_pos_ids"])
FAST = [i for i in IMPLS if i != "reference"]
QWEN = Geometry.qwen2_5_vl()


def same(actual, expected):
    expected = torch.as_tensor(expected, dtype=torch.int32, device=actual.device).reshape(actual.shape)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert actual.is_contiguous()


def equals_reference(grid, geometry, impl, device=DEVICE):
    for order in ("image", "window"):
        ids = vitkit.rot_pos_ids(grid, geometry, impl="reference", order=order)
        same(vitkit.rot_pos_ids(grid, geometry, impl=impl, order=order, device=device), ids)
    ours = vitkit.window_index(grid, geometry, impl=impl, device=device)
    plain = vitkit.window_index(grid, geometry, impl="reference")
    for name in ("index", "reverse", "cu_seqlens"):
        same(getattr(ours, name), getattr(plain, name))
    frames = vitkit.cu_seqlens(grid, geometry, impl=impl, device=device)
    same(frames.cu_seqlens, vitkit.cu_seqlens(grid, geometry, impl="reference").cu_seqlens)
    for segments in (ours, frames):  # the host's closed forms agree with what lies on the device
        assert segments.seqlens == segments.cu_seqlens.diff().tolist()
        assert segments.max_seqlen == max(segments.seqlens, default=0)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("case", [*CASES["cases"], {"name": "empty", **CASES["empty"]}], ids=lambda c: c["name"])
def test_stored_cases(case, impl):
    grid, expected = case["grid_thw"], case["expected"]
    same(vitkit.rot_pos_ids(grid, QWEN, impl=impl, device=DEVICE), expected["rot_pos_ids"])
    windows = vitkit.window_index(grid, QWEN, impl=impl, device=DEVICE)
    same(windows.index, expected["window_index"])
    same(windows.reverse, expected["reverse_index"])
    same(windows.cu_seqlens, expected["cu_window_seqlens"])
    frames = vitkit.cu_seqlens(grid, QWEN, impl=impl, device=DEVICE)
    same(frames.cu_seqlens, expected["cu_seqlens"])
    assert windows.max_seqlen == expected["max_window_seqlen"] and frames.max_seqlen == expected["max_seqlen"]
    equals_reference(grid, Geometry.qwen2_vl(), impl)


@pytest.mark.parametrize("op", [vitkit.rot_pos_ids, vitkit.window_index, vitkit.cu_seqlens])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", CASES["errors"], ids=lambda e: e["why"])
def test_stored_errors(op, impl, bad):
    with pytest.raises(ValueError, match="grid_thw"):
        op(bad["grid_thw"], QWEN, impl=impl, device=DEVICE)


def test_stored_workloads():
    for work in CASES["workloads"]:
        patches = sum(t * h * w for t, h, w in work["grid_thw"])
        for impl in FAST:
            if impl != "triton" or DEVICE == "cuda" or patches < 50_000:  # 200 programs in the interpreter
                equals_reference(work["grid_thw"], QWEN, impl)


@st.composite
def batches(draw):
    m = draw(st.sampled_from([1, 2, 2, 2, 3]))
    window = draw(st.sampled_from([None, 1, 2, 3, 4, 4, 4, 7]))
    geometry = Geometry(spatial_merge_size=m, window_size=window and window * m * 14)
    side = st.integers(1, 13).map(lambda n: n * m)
    return draw(st.lists(st.tuples(st.integers(1, 4), side, side), max_size=6)), geometry


@pytest.mark.parametrize("impl", ["torch", "numba"])
@settings(max_examples=150, deadline=None)
@given(batch=batches())
def test_random_batches_equal_the_reference(impl, batch):
    equals_reference(*batch, impl)


@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_random_batches_equal_the_reference_triton(batch):
    equals_reference(*batch, "triton")


@settings(max_examples=80, deadline=None)
@given(batch=batches())
def test_the_reference_equals_transformers(batch):
    vision = pytest.importorskip("transformers.vision_utils")
    grid, geometry = batch
    if not grid:
        return
    table, m = torch.tensor(grid), geometry.spatial_merge_size
    same(vitkit.rot_pos_ids(grid, geometry, impl="reference"), vision.get_vision_position_ids(table, m))
    same(vitkit.cu_seqlens(grid, geometry, impl="reference").cu_seqlens, vision.get_vision_cu_seqlens(table))
    if geometry.window:
        index, cu = vision.get_vision_window_index(table, m, geometry.window_size, geometry.patch_size)
        ours = vitkit.window_index(grid, geometry, impl="reference")
        same(ours.index, index)
        same(ours.cu_seqlens, cu)
        ids = vision.get_vision_position_ids(table, m).reshape(-1, m * m, 2)[index].reshape(-1, 2)
        same(vitkit.rot_pos_ids(grid, geometry, impl="reference", order="window"), ids)


@pytest.mark.parametrize("impl", FAST)
@settings(max_examples=10, deadline=None)
@given(batch=batches())
def test_properties(impl, batch):
    grid, geometry = batch
    m = geometry.spatial_merge_size
    windows = vitkit.window_index(grid, geometry, impl=impl, device=DEVICE)
    units = sum(t * h * w for t, h, w in grid) // m**2
    assert sorted(windows.index.tolist()) == list(range(units))
    assert (windows.index[windows.reverse.long()].cpu() == torch.arange(units)).all()
    frames = vitkit.cu_seqlens(grid, geometry, impl=impl, device=DEVICE).cu_seqlens
    for cu in (windows.cu_seqlens, frames):
        assert cu[0] == 0 and (cu.diff() > 0).all() and cu[-1] == units * m**2
    assert set(frames.tolist()) <= set(windows.cu_seqlens.tolist())  # no window crosses a frame
    # A batch is the concatenation of its items, and t frames are t copies.
    items = [
        vitkit.window_index([(1, h, w)], geometry, impl=impl, device=DEVICE).index.cpu()
        for t, h, w in grid
        for _ in range(t)
    ]
    shifts = np.cumsum([0] + [len(i) for i in items])
    whole = [i + int(s) for i, s in zip(items, shifts)]
    same(windows.index, torch.cat([torch.empty(0, dtype=torch.int32), *whole]))
    ids = [
        vitkit.rot_pos_ids([(1, h, w)], geometry, impl=impl, device=DEVICE).cpu() for t, h, w in grid for _ in range(t)
    ]
    same(vitkit.rot_pos_ids(grid, geometry, impl=impl, device=DEVICE), torch.cat([torch.empty(0, 2), *ids]).int())


@pytest.mark.parametrize("impl", FAST)
def test_300_images_in_one_batch(impl):
    rng = np.random.default_rng(0)
    grid = np.stack([rng.integers(1, 3, 300), rng.integers(1, 7, 300) * 2, rng.integers(1, 7, 300) * 2], axis=1)
    equals_reference(grid, QWEN, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "grid",
    [((2, 6, 10),), np.array([[2, 6, 10]], dtype=np.int32), torch.tensor([[2, 6, 10]]), [[np.int64(2), 6, 10]]],
    ids=lambda g: type(g).__name__,
)
def test_forms_of_the_grid(impl, grid):
    equals_reference(grid, QWEN, impl)


@pytest.mark.parametrize("impl", FAST)
def test_every_entry_is_written(impl, monkeypatch):
    """Memory fresh from torch.empty is poisoned: an entry that is not written shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        return empty(*args, **kwargs).fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    np_empty = np.empty
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full_like(np_empty(shape, dtype), -7))
    equals_reference([(2, 6, 10), (1, 2, 34), (1, 8, 8)], QWEN, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("geometry", [QWEN, Geometry.qwen2_vl()], ids=["windows", "no windows"])
def test_outputs_are_new_and_may_be_changed(impl, geometry):
    first = vitkit.window_index([[2, 6, 10]], geometry, impl=impl, device=DEVICE)
    first.index.zero_()
    first.cu_seqlens.zero_()
    equals_reference([[2, 6, 10]], geometry, impl)
    same(first.reverse, vitkit.window_index([[2, 6, 10]], geometry, impl="reference").reverse)


@pytest.mark.parametrize("impl", IMPLS)
def test_more_windows_than_lanes_of_whole_blocks(impl):
    equals_reference([[4, 16, 16]], Geometry(window_size=28), impl)  # 256 units, 257 offsets


@pytest.mark.parametrize("impl", FAST)
def test_windows_larger_than_any_frame(impl):
    whole = Geometry(patch_size=1, spatial_merge_size=1, window_size=128)
    expected = vitkit.window_index([[1, 8, 128]], whole, impl="reference")
    for side in (2**15, 2**25, 2**30):
        geometry = Geometry(patch_size=1, spatial_merge_size=1, window_size=side)
        ours = vitkit.window_index([[1, 8, 128]], geometry, impl=impl, device=DEVICE)
        same(ours.index, expected.index)
        same(ours.reverse, expected.reverse)
        same(ours.cu_seqlens, expected.cu_seqlens)


@pytest.mark.parametrize("impl", IMPLS)
def test_another_default_device_changes_nothing(impl):
    with torch.device("meta"):
        windows = vitkit.window_index([[2, 6, 10]], QWEN, impl=impl, device=DEVICE)
        ids = vitkit.rot_pos_ids([[2, 6, 10]], QWEN, impl=impl, device=DEVICE)
    same(windows.index, vitkit.window_index([[2, 6, 10]], QWEN, impl="reference").index)
    same(ids, vitkit.rot_pos_ids([[2, 6, 10]], QWEN, impl="reference"))


def test_auto_takes_numba_on_the_cpu(monkeypatch):
    called = []
    monkeypatch.setitem(IMPLEMENTATIONS["cu_seqlens"], "numba", lambda *args: called.append("numba"))
    vitkit.cu_seqlens([[1, 8, 8]], QWEN)
    assert called == ["numba"]


def test_torch_compile_traces_the_torch_way():
    compiled = torch.compile(lambda x: x + vitkit.rot_pos_ids([[1, 4, 6]], QWEN), backend="eager")
    same(compiled(torch.zeros(24, 2, dtype=torch.int32)), vitkit.rot_pos_ids([[1, 4, 6]], QWEN))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_fork_waits_for_a_thread_that_compiles():
    """Else the child would inherit numba's lock as held and hang at its first compilation."""
    script = """
import os, threading, time, vitkit
from numba.core.compiler_lock import global_compiler_lock
import vitkit.indices.numba_kernels
held = threading.Event()
def compile_():
    with global_compiler_lock: held.set(); time.sleep(0.3)
threading.Thread(target=compile_).start(); held.wait()
child = os.fork()
if child == 0:
    os._exit(len(vitkit.rot_pos_ids([[1, 2, 2]], vitkit.Geometry())) - 4)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid: break
    time.sleep(0.1)
else: os.kill(child, 9); raise SystemExit("the child hangs")
raise SystemExit(status)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"impl": "cuda"}, "impl='cuda'.*'reference', 'torch', 'numba', 'triton', 'auto'"),
        ({"impl": None}, "impl=None"),
        ({"device": "gpu7"}, "device='gpu7'"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
        ({"order": "raster"}, "order='raster'.*'image' or 'window'"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        vitkit.rot_pos_ids([[1, 8, 8]], QWEN, **kwargs)


def test_a_missing_package_is_named_and_auto_does_without(monkeypatch):
    import vitkit.indices

    monkeypatch.setattr(vitkit.indices, "_installed", lambda name: False)
    with pytest.raises(ValueError, match="numba is not installed; 'torch'"):
        vitkit.rot_pos_ids([[1, 8, 8]], QWEN, impl="numba")
    equals_reference([[2, 6, 10]], QWEN, "auto")
