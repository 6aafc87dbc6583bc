"""The index tensors by nested loops, compiled by numba: one pass, every entry written once and in order.

`grid` is a checked list of (t, h, w), m the spatial merge size, ws the side of a window in merged units (0: none).
The kernels fill one buffer on the host; for a GPU that buffer is pinned and goes up in one copy that the host does
not wait for. (torch reuses a pinned block only after the copies recorded on it.) Only the first frame of an image is
computed; its other frames, and equal images that follow, are copies of it: consecutive 8-byte entries, at the speed
of memory.
"""

import numpy as np
import torch
from numba import njit


def _buffer(n, device):
    return torch.empty(n, dtype=torch.int32, pin_memory=device.type == "cuda")


def _rows(grid):
    return np.array(grid, dtype=np.int64).reshape(-1, 3)


def rot_pos_ids(grid, m, ws, device, order) -> torch.Tensor:
    out = _buffer(2 * sum(t * h * w for t, h, w in grid), device)
    # One entry, (row, column) as two int32, is written as one int64: the row in the half that lies first in memory.
    _rot_pos_ids(_rows(grid), m, ws if order == "window" else 0, out.numpy().view(np.int64))
    return out.view(-1, 2).to(device, non_blocking=True)


def window_index(grid, m, ws, device):
    units = sum(t * h * w for t, h, w in grid) // (m * m)
    side = ws * m
    windows = sum(t * -(-h // side) * -(-w // side) if ws else t for t, h, w in grid)
    out = _buffer(2 * units + windows + 1, device)
    host = out.numpy()
    _window_index(_rows(grid), m, ws, host[:units], host[units : 2 * units], host[2 * units :])
    out = out.to(device, non_blocking=True)
    return out[:units], out[units : 2 * units], out[2 * units :]


def cu_seqlens(grid, m, ws, device) -> torch.Tensor:
    out = _buffer(sum(t for t, _, _ in grid) + 1, device)
    _cu_seqlens(_rows(grid), out.numpy())
    return out.to(device, non_blocking=True)


@njit(nogil=True, cache=True)
def _rot_pos_ids(grid, m, ws, out):
    n = 0
    for g in range(grid.shape[0]):
        t, h, w = grid[g]
        frame = h * w
        first, done = n, 0  # where the first frame of this size stands, and how many frames are written
        if g and grid[g - 1, 1] == h and grid[g - 1, 2] == w:
            first = n - frame
        else:
            wh, ww = (ws * m, ws * m) if ws else (h, w)  # a window, in patches
            for y0 in range(0, h, wh):
                for x0 in range(0, w, ww):
                    for y in range(y0, min(y0 + wh, h), m):
                        for x in range(x0, min(x0 + ww, w), m):
                            for i in range(m):
                                for j in range(m):
                                    out[n] = (y + i) | (x + j) << 32
                                    n += 1
            done = 1
        for _ in range(done, t):
            out[n : n + frame] = out[first : first + frame]
            n += frame


@njit(nogil=True, cache=True)
def _window_index(grid, m, ws, index, reverse, cu):
    n, c, base = 0, 0, 0  # units written, windows written, units before this image
    cu[0] = 0
    for g in range(grid.shape[0]):
        t, H, W = grid[g, 0], grid[g, 1] // m, grid[g, 2] // m
        wh, ww = (ws, ws) if ws else (H, W)
        first_unit, first_window = n, c
        for y0 in range(0, H, wh):
            for x0 in range(0, W, ww):
                for y in range(y0, min(y0 + wh, H)):
                    for x in range(x0, min(x0 + ww, W)):
                        index[n] = base + y * W + x
                        reverse[base + y * W + x] = n
                        n += 1
                c += 1
                cu[c] = n * m * m
        frame, windows = n - first_unit, c - first_window
        for f in range(1, t):
            shift = f * frame
            for i in range(first_unit, first_unit + frame):  # the first frame, shifted
                index[i + shift] = index[i] + shift
                reverse[i + shift] = reverse[i] + shift
            for i in range(first_window + 1, first_window + 1 + windows):
                cu[i + f * windows] = cu[i] + shift * m * m
        n = first_unit + t * frame
        c = first_window + t * windows
        base += t * frame


@njit(nogil=True, cache=True)
def _cu_seqlens(grid, cu):
    n, end = 1, 0
    cu[0] = 0
    for g in range(grid.shape[0]):
        for _ in range(grid[g, 0]):
            end += grid[g, 1] * grid[g, 2]
            cu[n] = end
            n += 1
