"""What notebook 4 times: every index tensor of a batch, ready on the device, by a plan and by what is used today.

What has to be ready: window index, its inverse, cu_seqlens, cu_window_seqlens, and the position ids in window order;
a size cache has cos and sin in window order instead of the ids.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from .. import indices
from ..plan import IMPLEMENTATIONS, VisionPlan
from ..rotary import rotary_cos_sin
from . import by_hand, cases, peers, size_cache, workloads
from .limits import CopyLimit, EmptyLaunch
from .timing import Case

OP = "VisionPlan.from_grid"
READY = ("window_index", "reverse_index", "cu_seqlens", "cu_window_seqlens", "window_pos_ids")
PLAIN_IMAGES = 100  # reference and torch are not timed on more images: they take long and say nothing new
COS_SIN_ERROR = 1e-6  # absolute


def plan_grids(size) -> tuple[list[tuple[str, list]], list[tuple[str, list]]]:
    """(name, grid) of the ladder, and of batches of 1x36x36 for a figure over their number, one of which is in both."""
    published = workloads.load_workloads()
    counts = (4,) if size.name == "tiny" else (4, 16, 64, 256)
    batches = [published[1], *((f"1x36x36, {n} times", [[1, 36, 36]] * n) for n in counts)]
    return (published[:2] if size.name == "tiny" else published + batches[-1:]), batches


def plan_case(name, grid, geometry, device, *, threads) -> Case:
    """`VisionPlan.from_grid` on a grid, by every way that is installed and serves the device, and by the peers.

    Plans and caches get the grid as a processor returns it: int64 (G, 3) on the CPU.
    """
    device = torch.device(device)
    triton = bool(find_spec("triton")) and device.type == "cuda"
    few = len(grid) <= PLAIN_IMAGES
    serves = {"numba": bool(find_spec("numba")), "triton": triton, "reference": few, "torch": few}
    ways = [*(way for way in IMPLEMENTATIONS if serves.get(way, True)), "auto"]
    calls = {way: partial(_plan, geometry, str(device), way) for way in ways}
    calls |= plan_peers(geometry, device)
    windows = indices.window_index(grid, geometry, impl="reference")
    ids = indices.rot_pos_ids(grid, geometry, impl="reference", order="window")
    offsets = indices.cu_seqlens(grid, geometry, impl="reference").cu_seqlens
    expected = dict(zip(READY, (windows.index, windows.reverse, offsets, windows.cu_seqlens, ids)))
    n_bytes = sum(4 * x.numel() for x in expected.values())  # each entry written once
    calls["copy"] = CopyLimit(n_bytes, 1, device)
    if triton:
        calls["empty_launch"] = EmptyLaunch(device)
    table = torch.tensor(grid)
    return Case(
        op=OP,
        case=name,
        calls=calls,
        inputs=[(table, table.to(device))],
        check=lambda impl, outputs, inputs: _same(impl, outputs, expected, geometry, device),
        grid_thw=grid,
        params={"m": geometry.spatial_merge_size, "ws": geometry.window, "threads": threads},
        dtype="int32",
        n_images=len(grid),
        n_tokens=cases.tokens(grid),
        bytes=n_bytes,
    )


def one_workload(grid_thw, geometry, device):
    """`by_hand.table` of a plan of a grid by every way, with torch's present threads; ours is `auto`."""
    grid = by_hand.check_grid(grid_thw, geometry)
    case = plan_case("by hand", grid, geometry, device, threads=torch.get_num_threads())
    return by_hand.timed(case, device, ours="auto")


def _plan(geometry, device, way, grid, _):
    plan = VisionPlan.from_grid(grid, geometry, device=device, impl=way)
    ready(plan)  # views of the plan's buffer, made when they are first asked for
    return plan


def plan_peers(geometry, device) -> dict:
    """{name: callable(grid on the CPU, grid on the device)}; transformers where it is installed.

    transformers: its functions, with the grid where its towers have it, on the device. transformers_cpu_grid: on the
    CPU, and the results copied up (on a CPU there is no difference). size_cache, size_cache_numpy: every size seen
    before, for which the first, checked call is enough; size_cache_cold: a new cache in every call.
    """
    out = {}
    try:
        theirs = import_module("transformers.vision_utils") if find_spec("transformers") else None
    except (ImportError, RuntimeError):
        theirs = None
    if theirs:
        out["transformers"] = lambda _, table: _transformers(theirs, table, geometry, device)
        if device.type != "cpu":
            out["transformers_cpu_grid"] = lambda grid, _: _transformers(theirs, grid, geometry, device)
    seen, fast = size_cache.SizeCache(geometry, device), size_cache.NumpySizeCache(geometry, device)
    out["size_cache"] = lambda grid, _: seen(grid)
    out["size_cache_numpy"] = lambda grid, _: fast(grid)
    out["size_cache_cold"] = lambda grid, _: size_cache.SizeCache(geometry, device)(grid)
    return out


def _transformers(theirs, grid, geometry, device) -> dict:
    """What its Qwen2.5-VL tower does of this in a forward pass; its window index is on the CPU wherever the grid is."""
    m = geometry.spatial_merge_size
    index, cu_window_seqlens = theirs.get_vision_window_index(grid, m, geometry.window_size, geometry.patch_size)
    cu_seqlens = theirs.get_vision_cu_seqlens(grid)
    ids = theirs.get_vision_position_ids(grid, m).reshape(-1, m * m, 2)
    reverse = torch.argsort(index)
    moved = index.to(device)
    ids = ids[moved if ids.device == moved.device else index].reshape(-1, 2)
    tensors = (moved, reverse, cu_seqlens, cu_window_seqlens, ids)
    return {name: x.to(device) for name, x in zip(READY, tensors)}


def ready(outputs) -> dict:
    """{name: tensor} of all that a call has made ready: of a plan, of transformers, or of a size cache."""
    if isinstance(outputs, VisionPlan):
        return {name: getattr(outputs, name) for name in READY}
    return outputs if isinstance(outputs, dict) else outputs._asdict()


def _same(impl, outputs, expected, geometry, device):
    """Equal in value, shape and place, ours in dtype too; cos and sin of a cache within COS_SIN_ERROR."""
    tensors, note = ready(outputs), f"took {outputs.impl}" if impl == "auto" else ""
    expected = dict(expected)
    if "cos" in tensors:
        expected |= zip(("cos", "sin"), rotary_cos_sin(expected.pop("window_pos_ids"), geometry))
    if tensors.keys() != expected.keys():
        return False, f"has {', '.join(tensors)} instead of {', '.join(expected)}"
    for name, right in expected.items():
        x = tensors[name]
        if x.device.type != device.type or (impl not in peers.PEERS and x.dtype != right.dtype):
            return False, f"{name}: {x.dtype} on {x.device} instead of {right.dtype} on {device}"
        if x.shape != right.shape:
            return False, f"{name}: shape {tuple(x.shape)} instead of {tuple(right.shape)}"
        x = x.cpu()
        if right.is_floating_point():
            if not (x - right).abs().max() <= COS_SIN_ERROR:  # NaN is no better
                return False, f"{name}: differs from the reference by more than {COS_SIN_ERROR}"
        elif not torch.equal(x.long(), right.long()):
            return False, f"{name}: differs from the reference"
    return True, note
