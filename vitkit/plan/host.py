"""Building a plan's buffer on the host: counts of a grid, how the buffer is cut, and the ways that fill it there."""

from array import array
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from .. import geometry as geo
from .. import indices


@cache
def has_numba() -> bool:
    """Whether numba is installed, and imports: it refuses a NumPy that is too new for it."""
    try:
        return find_spec("numba") is not None and bool(import_module("numba"))
    except ImportError:
        return False


@cache
def kernels():
    """The numba module; it is imported, and compiled or read from its cache, when a plan is first built."""
    from . import numba_kernels

    return numba_kernels


class Counts(NamedTuple):
    """Of a batch: patches, frames and windows; the longest frame and window in patches; the largest position."""

    patches: int
    frames: int
    windows: int
    max_seqlen: int
    max_window_seqlen: int
    max_position: int


def read_grid(grid_thw, geometry) -> tuple[np.ndarray, tuple]:
    """`grid_thw` checked, as int64 (G, 3) of its own, and its `Counts` (as a plain tuple). Microseconds with numba,
    if the grid is a tensor or an array of int64 or a list of plain ints."""
    grid = _plain(grid_thw) if has_numba() and type(geometry) is geo.Geometry else None
    if grid is not None:
        counts = kernels().counts(grid, geometry.spatial_merge_size, min(geometry.window, 2**29))
        if counts[0] >= 0:
            return grid, counts
    rows = geo.check_grid_thw(grid_thw, geometry)  # says what is wrong, or reads what `_plain` does not
    side = geometry.window * geometry.spatial_merge_size
    longest = max((h * w for _, h, w in rows), default=0)
    window = max((min(side, h) * min(side, w) for _, h, w in rows), default=0) if side else longest
    position = max((max(h, w) - 1 for _, h, w in rows), default=0)
    counts = Counts(
        geo.num_patches(rows), geo.num_frames(rows), geo.num_windows(rows, geometry), longest, window, position
    )
    return np.array(rows, np.int64).reshape(-1, 3), counts


def _plain(grid_thw) -> np.ndarray | None:
    """A copy as int64 (G, 3), or None where the types alone do not show that it is a table of integers.

    This runs once a batch, with none of it in the CPU's caches: each call that it does not make is a microsecond.
    """
    kind = type(grid_thw)
    if kind is torch.Tensor:
        if grid_thw.dtype is not torch.int64 or grid_thw.is_cuda:
            return None
        try:
            grid_thw = grid_thw.numpy()
        except (RuntimeError, TypeError):  # sparse, nested, on another device
            return None
    elif kind is np.ndarray:
        if grid_thw.dtype != np.int64:
            return None
    elif kind is list:
        return _plain_list(grid_thw)
    else:
        return None
    shape = grid_thw.shape
    return grid_thw.copy() if len(shape) == 2 and shape[1] == 3 else None


def _plain_list(rows) -> np.ndarray | None:
    if not set(map(type, rows)) <= {list, tuple} or set(map(len, rows)) != {3}:
        return None
    flat = list(chain.from_iterable(rows))
    if set(map(type, flat)) != {int}:  # no bool among them
        return None
    try:
        return np.frombuffer(array("q", flat), np.int64).reshape(-1, 3)
    except OverflowError:
        return None


def cut(patches, frames, windows, m, image_ids=False) -> tuple[int, ...]:
    """Entries of the buffer's parts, int32: ids, index, reverse, cu, cu_window, padding to an even number, image ids.

    Positions are written as pairs of 8 bytes: image ids begin at an even entry, and the whole is even.
    """
    units, padding = patches // (m * m), (frames + windows) % 2
    parts = 2 * patches, units, units, frames + 1, windows + 1, padding
    return (*parts, 2 * patches) if image_ids else parts


def fill(impl, grid, geometry, counts, buffer):
    """Fills `buffer`, int32 on the CPU and cut for these counts, by numba, torch or reference."""
    m, ws = geometry.spatial_merge_size, min(geometry.window, 2**29)
    if impl == "numba":
        kernels().fill(grid, m, ws, buffer.numpy(), *counts[:3])
        return
    rows = [tuple(row) for row in grid.tolist()]
    windows = indices.window_index(rows, geometry, impl=impl)
    parts = (
        indices.rot_pos_ids(rows, geometry, impl=impl, order="window").flatten(),
        windows.index,
        windows.reverse,
        indices.cu_seqlens(rows, geometry, impl=impl).cu_seqlens,
        windows.cu_seqlens,
    )
    torch.cat(parts, out=buffer[: sum(map(len, parts))])
