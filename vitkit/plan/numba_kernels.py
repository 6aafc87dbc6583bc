"""The host's part of a plan, compiled by numba: counts, the table that goes up to a GPU, and the buffer itself.

grid: int64 (G, 3), rows (t, h, w) in patches. m: spatial merge size. ws: a window's side in merged units, or 0.
"""

import numpy as np

from .._numba import jit


@jit
def counts(grid, m, ws):
    """(patches, frames, windows, longest frame in patches, largest window in patches, largest position), see `Counts`.

    patches is -1 where a row is not allowed: t, h, w >= 1, h and w multiples of m, fewer than 2^31 patches in all.
    """
    limit = 1 << 31
    patches = frames = windows = max_seqlen = max_window_seqlen = max_position = 0
    side = ws * m
    for g in range(grid.shape[0]):
        t, h, w = grid[g, 0], grid[g, 1], grid[g, 2]
        if t < 1 or h < 1 or w < 1 or t >= limit or h >= limit or w >= limit or h % m or w % m or h * w >= limit:
            return -1, 0, 0, 0, 0, 0
        patches += t * h * w  # below 2^62: no overflow before the test
        if patches >= limit:
            return -1, 0, 0, 0, 0, 0
        frames += t
        max_seqlen = max(max_seqlen, h * w)
        max_position = max(max_position, h - 1, w - 1)
        if ws:
            windows += t * ((h + side - 1) // side) * ((w + side - 1) // side)
            max_window_seqlen = max(max_window_seqlen, min(side, h) * min(side, w))
    if ws == 0:
        windows, max_window_seqlen = frames, max_seqlen
    return patches, frames, windows, max_seqlen, max_window_seqlen, max_position


@jit
def fill_table(grid, m, ws, header, table):
    """int32 table: `header` zeros but for (G, halvings of a bisection, patches, frames, windows); then rows of G each:
    h, w, and patches, frames and windows before the image. An empty batch has one row that no entry belongs to."""
    images = grid.shape[0]
    patches = frames = windows = steps = 0
    side = ws * m
    for g in range(images):
        t, h, w = grid[g, 0], grid[g, 1], grid[g, 2]
        row = header + g
        table[row] = h
        table[row + images] = w
        table[row + 2 * images] = patches
        table[row + 3 * images] = frames
        table[row + 4 * images] = windows
        patches += t * h * w
        frames += t
        windows += t * ((h + side - 1) // side) * ((w + side - 1) // side) if ws else t
    while 1 << steps < images:
        steps += 1
    for i in range(header):
        table[i] = 0
    if images == 0:
        table[header], table[header + 1] = m, m
        for i in range(header + 2, header + 5):
            table[i] = 0
    table[0], table[1], table[2], table[3], table[4] = images, steps, patches, frames, windows


@jit
def fill(grid, m, ws, buffer, patches, frames, windows):
    """Writes the buffer (int32, an even number of entries) as `host.cut` cuts it, for exactly these counts.

    Walks the windows of each image's first frame; its other frames, and an image of the size of the one before, are
    copies. Bytes written: 8 a patch, 8 a merged unit, 4 a window and a frame.
    """
    units = patches // (m * m)
    pairs = buffer.view(np.int64)  # of the ids: row | column << 32
    index = buffer[2 * patches : 2 * patches + units]
    reverse = buffer[2 * patches + units : 2 * patches + 2 * units]
    cu = buffer[2 * patches + 2 * units :]
    cu_window = cu[frames + 1 :]
    n = c = f = p = 0
    cu[0] = 0
    cu_window[0] = 0
    for g in range(grid.shape[0]):
        t, h, w = grid[g, 0], grid[g, 1], grid[g, 2]
        H, W = h // m, w // m
        wh, ww = (min(ws, H), min(ws, W)) if ws else (H, W)
        frame_units, frame_patches = H * W, h * w
        if g > 0 and grid[g - 1, 1] == h and grid[g - 1, 2] == w:
            first = 0  # the frame before is as large: copy it
        else:
            first = 1
            start = n
            for y0 in range(0, H, wh):
                for x0 in range(0, W, ww):
                    y1, x1 = min(y0 + wh, H), min(x0 + ww, W)
                    for y in range(y0, y1):
                        for x in range(x0, x1):
                            index[n] = start + y * W + x
                            reverse[start + y * W + x] = n
                            n += 1
                            for i in range(m):
                                for j in range(m):
                                    pairs[p] = (y * m + i) | (x * m + j) << 32
                                    p += 1
                    c += 1
                    cu_window[c] = n * m * m
            f += 1
            cu[f] = cu[f - 1] + frame_patches
        frame_windows = ((H + wh - 1) // wh) * ((W + ww - 1) // ww)
        for _ in range(first, t):
            for i in range(n, n + frame_units):
                index[i] = index[i - frame_units] + frame_units
                reverse[i] = reverse[i - frame_units] + frame_units
            for i in range(c + 1, c + 1 + frame_windows):
                cu_window[i] = cu_window[i - frame_windows] + frame_patches
            for i in range(p, p + frame_patches):
                pairs[i] = pairs[i - frame_patches]
            n, c, p, f = n + frame_units, c + frame_windows, p + frame_patches, f + 1
            cu[f] = cu[f - 1] + frame_patches
