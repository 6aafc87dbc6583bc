"""The index tensors by nested loops, compiled by numba: one pass, every entry written once and in order.

`grid` is a checked list of (t, h, w), m the spatial merge size, ws the side of a window in merged units (0: none).
A kernel is called once an image, with plain numbers, and fills the image's part of a buffer on the host; for a GPU
that buffer is pinned and goes up in one copy that the host does not wait for. (torch reuses a pinned block only after
the copies recorded on it.) Only the first frame of an image is computed; its other frames, and equal images that
follow, are copies of it: consecutive entries, at the speed of memory.
"""

import numpy as np
import torch

from .._numba import jit


def rot_pos_ids(grid, m, ws, device, order) -> torch.Tensor:
    patches = sum([t * h * w for t, h, w in grid])
    out, pinned = _int32((patches, 2), device)
    if order == "image":
        ws = 0
    n, before = 0, None
    for t, h, w in grid:
        n = _rot_pos_ids(t, h, w, m, ws, (h, w) == before, out, n)
        before = h, w
    return torch.from_numpy(out) if pinned is None else pinned.to(device, non_blocking=True)


def window_index(grid, m, ws, device):
    units, windows, side = 0, 0, ws * m
    for t, h, w in grid:
        units += t * h * w // (m * m)
        windows += t * -(-h // side) * -(-w // side) if ws else t
    out, pinned = _int32(2 * units + windows + 1, device)
    n = c = 0
    for t, h, w in grid:
        n, c = _window_index(t, h // m, w // m, m, ws, out, units, n, c)
    if not grid:
        out[0] = 0
    if pinned is None:
        return [torch.from_numpy(x) for x in (out[:units], out[units : 2 * units], out[2 * units :])]
    return pinned.to(device, non_blocking=True).split_with_sizes([units, units, windows + 1])


def cu_seqlens(grid, m, ws, device) -> torch.Tensor:
    out, pinned = _int32(sum([t for t, _, _ in grid]) + 1, device)
    n = end = 0
    for t, h, w in grid:
        n, end = _cu_seqlens(t, h * w, out, n, end)
    if not grid:
        out[0] = 0
    return torch.from_numpy(out) if pinned is None else pinned.to(device, non_blocking=True)


def _int32(shape, device):
    """int32 on the host as a numpy array; for a GPU also the pinned tensor whose memory it is."""
    if device.type == "cpu":
        return np.empty(shape, np.int32), None  # numpy and from_numpy take a third of the time of torch and .numpy()
    pinned = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return pinned.numpy(), pinned


@jit
def _rot_pos_ids(t, h, w, m, ws, as_before, out, start):
    """Writes an image from entry `start` on and returns where it ends; as_before: its frames are those before it."""
    # One entry, (row, column) as two int32, is written as one int64: the row in the half that lies first in memory.
    out, n = out.reshape(out.size).view(np.int64), start
    frame = h * w
    first = start - frame if as_before else start
    if not as_before:
        wh, ww = (ws * m, ws * m) if ws else (h, w)  # a window, in patches
        for y0 in range(0, h, wh):
            for x0 in range(0, w, ww):
                for y in range(y0, min(y0 + wh, h), m):
                    for x in range(x0, min(x0 + ww, w), m):
                        for i in range(m):
                            for j in range(m):
                                out[n] = (y + i) | (x + j) << 32
                                n += 1
    end = start + t * frame
    while n < end:
        out[n : n + frame] = out[first : first + frame]
        n += frame
    return end


@jit
def _window_index(t, H, W, m, ws, out, units, start, first_window):
    """Writes an image of t frames of H x W units whose first unit is `start`; out: index, inverse, cu_seqlens."""
    index, reverse, cu = out[:units], out[units : 2 * units], out[2 * units :]
    wh, ww = (ws, ws) if ws else (H, W)
    n, c = start, first_window
    cu[c] = n * m * m
    for y0 in range(0, H, wh):
        for x0 in range(0, W, ww):
            for y in range(y0, min(y0 + wh, H)):
                for x in range(x0, min(x0 + ww, W)):
                    index[n] = start + y * W + x
                    reverse[start + y * W + x] = n
                    n += 1
            c += 1
            cu[c] = n * m * m
    frame, windows = n - start, c - first_window
    for f in range(1, t):
        shift = f * frame
        for i in range(start, n):  # the first frame, shifted
            index[i + shift] = index[i] + shift
            reverse[i + shift] = reverse[i] + shift
        for i in range(first_window + 1, c + 1):
            cu[i + f * windows] = cu[i] + shift * m * m
    return start + t * frame, first_window + t * windows


@jit
def _cu_seqlens(t, frame, cu, n, start):
    for i in range(t + 1):
        cu[n + i] = start + i * frame
    return n + t, start + t * frame
