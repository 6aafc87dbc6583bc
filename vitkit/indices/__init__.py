"""The index tensors of a batch of images: `rot_pos_ids`, `window_index`, `cu_seqlens`.

Four ways behind one signature. `reference` is the way in use today; `torch`, `numba` and `triton` compute every
entry by closed form from its own position, with no padding, mask, nonzero, unique or argsort. With H and W the
merged height and width of an image, ws the side of a window in merged units, and p a position within one frame of
the window order:

    a  = p // (ws*W)           row of windows         hh = min(ws, H - a*ws)    its height
    r  = p - a*ws*W            place within that row
    b  = r // (ws*hh)          column of windows      ww = min(ws, W - b*ws)    its width
    s  = r - b*ws*hh           place within the window
    source row a*ws + s//ww, source column b*ws + s%ww

and row y, column x of a frame sits at a*ws*W + b*ws*hh + (y - a*ws)*ww + (x - b*ws), with a = y//ws, b = x//ws.
No call reads anything back from a GPU: every size is known on the host before the first launch.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec

import torch

from .. import geometry as geo
from .. import reference, tuned


@dataclass(eq=False)
class CuSeqlens:
    """cu_seqlens: int32 (segments + 1), offsets in patches.

    `max_seqlen`, the longest segment in patches, and `seqlens`, all of them as a list, are computed on the host from
    the grid when they are first asked for.
    """

    cu_seqlens: torch.Tensor
    _grid: list
    _side: int  # side of a window in patches; 0: every frame is one segment

    @cached_property
    def max_seqlen(self) -> int:
        side = self._side  # the first window of a frame is never smaller than another
        return max([min(side or h, h) * min(side or w, w) for _, h, w in self._grid], default=0)

    @cached_property
    def seqlens(self) -> list[int]:
        side, out = self._side, []
        for t, h, w in self._grid:
            rows = [min(side, h - y) for y in range(0, h, side)] if side else [h]
            cols = [min(side, w - x) for x in range(0, w, side)] if side else [w]
            out += [a * b for a in rows for b in cols] * t
        return out


@dataclass(eq=False)
class WindowIndex(CuSeqlens):
    """index: int32 (N/m^2), the merged unit that stands at each place of the window order; reverse: its inverse.

    cu_seqlens are the windows' offsets in patches, none of them empty; max_seqlen the largest window's patches.
    """

    index: torch.Tensor
    reverse: torch.Tensor


# The host's time counts here, microseconds of it: what can be looked up once is looked up once.
_CPU = torch.device("cpu")
_module = cache(lambda name: import_module(f"{__name__}.{name}"))
_installed = cache(lambda name: find_spec(name) is not None)


def _way(module, function):
    """An implementation that imports its module, and so numba or triton, when it is first called."""

    resolve = cache(lambda: getattr(_module(module), function))

    def call(grid, geometry, device, *order):
        return resolve()(grid, geometry.spatial_merge_size, geometry.window, device, *order)

    return call


def _reference_rot_pos_ids(grid, geometry, device, order):
    m, ids = geometry.spatial_merge_size, reference.rot_pos_ids(grid, geometry.spatial_merge_size)
    if order == "window":
        index = reference.window_index(grid, m, geometry.window)[0]
        ids = ids.reshape(-1, m * m, 2)[index].reshape(-1, 2)
    return ids.to(device)


def _reference_window_index(grid, geometry, device):
    return tuple(x.to(device) for x in reference.window_index(grid, geometry.spatial_merge_size, geometry.window))


def _reference_cu_seqlens(grid, geometry, device):
    return reference.cu_seqlens(grid).to(device)


# Every entry takes (grid, geometry, device, ...), a checked grid and a torch.device, and returns int32 tensors there.
IMPLEMENTATIONS = {
    op: {
        "reference": plain,
        "torch": _way("torch_ops", op),
        "numba": _way("numba_kernels", op),
        "triton": _way("triton_kernels", op),
    }
    for op, plain in (
        ("rot_pos_ids", _reference_rot_pos_ids),
        ("window_index", _reference_window_index),
        ("cu_seqlens", _reference_cu_seqlens),
    )
}


_known_devices = {"cpu": _CPU}


def _device(device) -> torch.device:
    known = _known_devices.get(device) if type(device) is str or type(device) is torch.device else None
    if known is not None:
        return known
    try:
        out = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device={device!r}: a torch device such as 'cpu' or 'cuda:0' is allowed ({e})") from None
    if out.type == "cpu":
        return _CPU
    if out.type != "cuda":
        return out
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise ValueError(f"device={device!r}: torch sees no GPU here; 'cpu' is allowed")
    if out.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if out.index >= gpus:
        raise ValueError(f"device={device!r}: torch sees {gpus} GPUs, counted from 0")
    _known_devices[device] = _known_devices[out] = out
    return out


def _choose(op: str, impl: str, grid, device: torch.device):
    ways = IMPLEMENTATIONS[op]
    if type(impl) is str and impl == "auto":
        impl = "numba" if _installed("numba") and device.type in ("cpu", "cuda") else "torch"
        big = {"cuda": "triton", "cpu": "torch"}.get(device.type)
        if torch.compiler.is_compiling():
            impl = "torch"  # which torch.compile traces
        elif (big == "torch" or (big and _installed(big))) and (
            impl == "torch" or geo.num_patches(grid) >= tuned.crossover(op, device)[0]
        ):
            impl = big
    if type(impl) is not str or impl not in ways:
        raise ValueError(f"impl={impl!r}: {', '.join(map(repr, [*ways, 'auto']))} are allowed for {op}")
    if impl in ("numba", "triton") and not _installed(impl):
        raise ValueError(f"impl={impl!r}: {impl} is not installed; 'torch', 'reference' or 'auto' would serve {op}")
    if impl == "triton" and device.type != "cuda" and not (device is _CPU and _module("triton_kernels").INTERPRETED):
        raise ValueError(
            f"impl='triton' with device='{device}': it serves GPUs; 'numba', 'torch' or 'auto' would serve {op}"
        )
    return ways[impl]


def rot_pos_ids(grid_thw, geometry, *, device="cpu", impl="auto", order="image") -> torch.Tensor:
    """(row, column) of every patch: int32 (N, 2), the m x m patches of a merged unit one after another.

    grid_thw: (G, 3) in patches, on the CPU. order: "image", or "window", where the merged units stand in the order
    of `window_index`. ValueError names an argument that is not allowed, before anything is computed.
    """
    grid, device = geo.check_grid_thw(grid_thw, geometry), _device(device)
    if type(order) is not str or order not in ("image", "window"):
        raise ValueError(f"order={order!r}: 'image' or 'window' is allowed")
    return _choose("rot_pos_ids", impl, grid, device)(grid, geometry, device, order)


def window_index(grid_thw, geometry, *, device="cpu", impl="auto") -> WindowIndex:
    """The order in which merged units stand when the patches of every attention window are neighbours.

    grid_thw: (G, 3) in patches, on the CPU. Without windows (`window_size=None`): the identity, one segment a frame.
    ValueError names an argument that is not allowed, before anything is computed.
    """
    grid, device = geo.check_grid_thw(grid_thw, geometry), _device(device)
    index, reverse, cu = _choose("window_index", impl, grid, device)(grid, geometry, device)
    side = geometry.window * geometry.spatial_merge_size
    return WindowIndex(cu, grid, side, index, reverse)


def cu_seqlens(grid_thw, geometry, *, device="cpu", impl="auto") -> CuSeqlens:
    """Offsets of the frames, in patches: each frame is one segment of full attention.

    grid_thw: (G, 3) in patches, on the CPU. ValueError names an argument that is not allowed.
    """
    grid, device = geo.check_grid_thw(grid_thw, geometry), _device(device)
    cu = _choose("cu_seqlens", impl, grid, device)(grid, geometry, device)
    return CuSeqlens(cu, grid, 0)
