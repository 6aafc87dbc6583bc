"""The index tensors by closed form, one launch each. Imports torch and triton alone: lift this file elsewhere.

`grid` is a list of (t, h, w) in patches with h and w multiples of m, the spatial merge size; ws is the side of a
window in merged units (0: no windows). Up goes one table of 20 bytes an image, from pinned memory, in a copy that
the host does not wait for; every entry finds its image in it by bisection and then computes itself. Nothing is read
back. Bytes written: 8 a patch for the ids; 8 a merged unit and 4 a window for the window index.
"""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _image(starts_ptr, o, n_images, n_steps):
    """The last image whose start is at most o: n_steps = ceil(log2(n_images)) halvings."""
    low, high = o * 0, o * 0 + n_images
    for _ in range(n_steps):
        middle = (low + high) // 2
        right = tl.load(starts_ptr + middle) <= o
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    return low


@triton.jit
def _source(p, H, W, WS: tl.constexpr):
    """Row and column of place p in the window order of a frame of H x W merged units."""
    a = p // (tl.minimum(WS, H) * W)  # WS * W itself may exceed 32 bits; what is left is at most H * W
    hh = tl.minimum(WS, H - a * WS)
    r = p - a * WS * W
    b = r // (tl.minimum(WS, W) * hh)
    ww = tl.minimum(WS, W - b * WS)
    s = r - b * WS * hh
    return a * WS + s // ww, b * WS + s % ww


@triton.jit
def _window_start(a, b, H, W, WS: tl.constexpr):
    """Units of a frame that stand before window (a, b)."""
    return a * WS * W + b * WS * tl.minimum(WS, H - a * WS)


_RUNTIME = ["n", "n_images", "n_steps", "n_units", "n_windows", "n_patches", "n_frames"]


# The table's rows, n_images int32 each: h, w, patches before the image, frames before it, windows before it.
@triton.jit(do_not_specialize=_RUNTIME)
def _rot_pos_ids_kernel(
    table_ptr, out_ptr, n, n_images, n_steps, M: tl.constexpr, WS: tl.constexpr, BLOCK: tl.constexpr
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o < n
    o = tl.minimum(o, n - 1)
    g = _image(table_ptr + 2 * n_images, o, n_images, n_steps)
    h, w = tl.load(table_ptr + g), tl.load(table_ptr + n_images + g)
    p = (o - tl.load(table_ptr + 2 * n_images + g)) % (h * w)
    unit, r, W = p // (M * M), p % (M * M), w // M
    if WS > 0:
        y, x = _source(unit, h // M, W, WS)
    else:
        y, x = unit // W, unit % W
    o_out = o.to(tl.int64) * 2  # torch: stack([y * M + r // M, x * M + r % M], -1)
    both = tl.join(y * M + r // M, x * M + r % M)
    tl.store(out_ptr + o_out[:, None] + tl.arange(0, 2)[None, :], both, mask=mask[:, None])


@triton.jit(do_not_specialize=_RUNTIME)
def _window_index_kernel(
    table_ptr, index_ptr, reverse_ptr, cu_ptr, n_units, n_windows, n_images, n_steps,
    M: tl.constexpr, WS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit, m_window = o < n_units, o < n_windows

    u = tl.minimum(o, n_units - 1)
    g = _image(table_ptr + 2 * n_images, u * (M * M), n_images, n_steps)
    H, W = tl.load(table_ptr + g) // M, tl.load(table_ptr + n_images + g) // M
    p = u - tl.load(table_ptr + 2 * n_images + g) // (M * M)
    p = p % (H * W)
    frame = u - p  # units before this frame
    y, x = _source(p, H, W, WS)
    tl.store(index_ptr + o, frame + y * W + x, mask=m_unit)
    y, x = p // W, p % W  # and the inverse: where the unit of row y, column x stands
    a, b = y // WS, x // WS
    place = _window_start(a, b, H, W, WS) + (y - a * WS) * tl.minimum(WS, W - b * WS) + (x - b * WS)
    tl.store(reverse_ptr + o, frame + place, mask=m_unit)

    c = tl.minimum(o, n_windows - 1)
    g = _image(table_ptr + 4 * n_images, c, n_images, n_steps)
    h, w = tl.load(table_ptr + g), tl.load(table_ptr + n_images + g)
    H, W = h // M, w // M
    across = (W + WS - 1) // WS
    a_frame = (H + WS - 1) // WS * across
    c = c - tl.load(table_ptr + 4 * n_images + g)
    start = c // a_frame * (h * w) + tl.load(table_ptr + 2 * n_images + g)
    c = c % a_frame
    start += _window_start(c // across, c % across, H, W, WS) * (M * M)
    tl.store(cu_ptr + o, tl.where(m_window, start, n_units * (M * M)), mask=o <= n_windows)


@triton.jit(do_not_specialize=_RUNTIME)
def _cu_seqlens_kernel(table_ptr, cu_ptr, n_frames, n_patches, n_images, n_steps, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.minimum(o, n_frames - 1)
    g = _image(table_ptr + 3 * n_images, f, n_images, n_steps)
    frame = tl.load(table_ptr + g) * tl.load(table_ptr + n_images + g)
    start = tl.load(table_ptr + 2 * n_images + g) + (f - tl.load(table_ptr + 3 * n_images + g)) * frame
    tl.store(cu_ptr + o, tl.where(o < n_frames, start, n_patches), mask=o <= n_frames)


INTERPRETED = not isinstance(_cu_seqlens_kernel, triton.JITFunction)


def rot_pos_ids(grid, m, ws, device, order):
    """(row, column) of every patch in merge-block order: int32 (N, 2); order "image" or "window"."""
    ws = min(ws, 2**29)  # no frame is longer; a window side in 32 bits
    table, patches, _, _ = _table(grid, m, ws)
    out = torch.empty(patches, 2, dtype=torch.int32, device=device)
    _launch(_rot_pos_ids_kernel, patches, table, (out, patches), M=m, WS=ws if order == "window" else 0)
    return out


def window_index(grid, m, ws, device):
    """index and its inverse, int32 (N/m^2), and the windows' offsets in patches, int32 (windows + 1)."""
    ws = min(ws, 2**29)  # no frame is longer; a window side in 32 bits
    table, patches, _, windows = _table(grid, m, ws)
    units = patches // (m * m)
    if not ws or not grid:
        index = torch.arange(units, dtype=torch.int32, device=device)
        return index, index.clone(), cu_seqlens(grid, m, ws, device)
    index = torch.empty(units, dtype=torch.int32, device=device)
    reverse = torch.empty(units, dtype=torch.int32, device=device)
    cu = torch.empty(windows + 1, dtype=torch.int32, device=device)
    args = (index, reverse, cu, units, windows)
    _launch(_window_index_kernel, max(units, windows + 1), table, args, M=m, WS=ws)
    return index, reverse, cu


def cu_seqlens(grid, m, ws, device):
    """The frames' offsets in patches: int32 (frames + 1)."""
    table, patches, frames, _ = _table(grid, m, ws)
    cu = torch.empty(frames + 1, dtype=torch.int32, device=device)
    if not grid:
        return cu.zero_()
    _launch(_cu_seqlens_kernel, frames + 1, table, (cu, frames, patches))
    return cu


def _table(grid, m, ws):
    """The rows of the table as one list of ints, and the sums: patches, frames, windows."""
    starts, frames_before, windows_before = [], [], []
    patches = frames = windows = 0
    side = ws * m
    for t, h, w in grid:
        starts.append(patches)
        frames_before.append(frames)
        windows_before.append(windows)
        patches += t * h * w
        frames += t
        windows += t * -(-h // side) * -(-w // side) if ws else t
    table = [h for _, h, _ in grid] + [w for _, _, w in grid] + starts + frames_before + windows_before
    return table, patches, frames, windows


def _launch(kernel, n, table, args, **options):
    """n lanes of `kernel` on the device of its outputs, which need not be the current one."""
    if n == 0:
        return
    device, n_images = args[0].device, len(table) // 5
    pinned = torch.tensor(table, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    table = pinned.to(device, non_blocking=True)
    args = (table, *args, n_images, (n_images - 1).bit_length())
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(triton.cdiv(n, BLOCK),)](*args, **options, BLOCK=BLOCK)
    else:
        kernel[(triton.cdiv(n, BLOCK),)](*args, **options, BLOCK=BLOCK)
