"""Building a plan's buffer on the host: counts of a grid, how the buffer is cut, and the ways that fill it there."""

from array import array
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from .. import geometry as geo
from .. import indices

has_numba = cache(lambda: find_spec("numba") is not None)


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


def read_grid(grid_thw, geometry) -> tuple[np.ndarray, Counts]:
    """`grid_thw` checked, as int64 (G, 3) of its own, and its counts. Microseconds with numba, if it is plain."""
    grid = _plain(grid_thw) if has_numba() and type(geometry) is geo.Geometry else None
    if grid is not None:
        counts = kernels().counts(grid, geometry.spatial_merge_size, min(geometry.window, 2**29))
        if counts[0] >= 0:
            return grid, Counts(*counts)
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
    """A copy as int64 (G, 3), or None where the types alone do not show that it is a table of integers."""
    if type(grid_thw) is torch.Tensor:
        try:
            grid_thw = grid_thw.numpy()
        except (RuntimeError, TypeError):  # not on the CPU, sparse, nested
            return None
    if type(grid_thw) is np.ndarray:
        if grid_thw.ndim != 2 or grid_thw.shape[1] != 3 or grid_thw.dtype not in (np.int64, np.int32):
            return None
        return grid_thw.astype(np.int64, order="C")
    if type(grid_thw) is not list or not set(map(type, grid_thw)) <= {list, tuple}:
        return None
    if set(map(len, grid_thw)) != {3}:
        return None
    flat = list(chain.from_iterable(grid_thw))
    if set(map(type, flat)) != {int}:  # no bool among them
        return None
    try:
        return np.frombuffer(array("q", flat), np.int64).reshape(-1, 3)
    except OverflowError:
        return None


class Parts(NamedTuple):
    """Entries of the buffer's parts, int32. `pad` makes the number before the image ids even; they may be 0."""

    ids: int
    index: int
    reverse: int
    cu: int
    cu_window: int
    pad: int
    image_ids: int

    @classmethod
    def of(cls, patches, frames, windows, m, image_ids=False):
        units = patches // (m * m)
        pad = (frames + windows) % 2
        return cls(2 * patches, units, units, frames + 1, windows + 1, pad, 2 * patches if image_ids else 0)


def fill(impl, grid, geometry, counts, buffer):
    """Fills `buffer`, int32 on the CPU, cut as Parts.of(patches, frames, windows, m), by numba, torch or reference."""
    m, ws = geometry.spatial_merge_size, min(geometry.window, 2**29)
    if impl == "numba":
        kernels().fill(grid, m, ws, buffer.numpy(), counts.patches, counts.frames, counts.windows)
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
