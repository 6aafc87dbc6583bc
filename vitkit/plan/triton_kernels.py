"""Every index tensor of a batch by one launch, from one small table. To lift: this file and indices/triton_kernels.py.

Table, int32: HEADER entries (images G, halvings of a bisection, patches, frames, windows), then five rows of G: h, w,
and patches, frames and windows before the image. At most 20 bytes an image and 32 more go up.

Buffer, int32, as the capacities cut it (for a batch that is not replayed they are its own counts): positions in window
order (patches, 2), window index (units), its inverse (units), frames' offsets (frames + 1), windows' offsets
(windows + 1), and with IMAGE_IDS positions in image order (patches, 2) after an even number of entries. Each entry
computes itself by the closed forms of `vitkit.indices`. Beyond the batch's counts an offset repeats the last one (an
empty segment), a position is (0, 0) and the window index is the identity. Bytes written: 8 a patch, 8 a unit, 4 an
offset; the table stays in the cache.
"""

import torch
import triton
import triton.language as tl

from ..indices.triton_kernels import _image, _source, _window_start

HEADER = 8
BLOCK = 256
TRITON = ("3.6.", "3.7.")  # whose compiled kernels `launch` calls directly; another version is launched the long way


@triton.jit
def _ids(out_ptr, o, cap_patches, n_patches, table_ptr, rows_ptr, n_images, n_steps, M: tl.constexpr, WS: tl.constexpr):
    """Row and column of the patches at places o of the window order, or with WS = 0 of the image order."""
    inside = o < n_patches
    o_in = tl.maximum(tl.minimum(o, n_patches - 1), 0)
    g = _image(rows_ptr + 2 * n_images, o_in, n_images, n_steps)
    h, w = tl.load(rows_ptr + g), tl.load(rows_ptr + n_images + g)
    p = (o_in - tl.load(rows_ptr + 2 * n_images + g)) % (h * w)
    unit, r, W = p // (M * M), p % (M * M), w // M
    if WS > 0:
        y, x = _source(unit, h // M, W, WS)
    else:
        y, x = unit // W, unit % W
    both = tl.join(tl.where(inside, y * M + r // M, 0), tl.where(inside, x * M + r % M, 0))
    o_out = o.to(tl.int64) * 2
    tl.store(out_ptr + o_out[:, None] + tl.arange(0, 2)[None, :], both, mask=(o < cap_patches)[:, None])


# Programs: BLOCK patches each, then BLOCK units each, then offsets of frames, offsets of windows, and image ids.
@triton.jit(do_not_specialize=["cap_patches", "cap_frames", "cap_windows"])
def _plan_kernel(
    table_ptr, out_ptr, cap_patches, cap_frames, cap_windows,
    M: tl.constexpr, WS: tl.constexpr, IMAGE_IDS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_images, n_steps = tl.load(table_ptr), tl.load(table_ptr + 1)
    n_patches, n_frames, n_windows = tl.load(table_ptr + 2), tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    rows_ptr = table_ptr + HEADER
    n_units, cap_units = n_patches // (M * M), cap_patches // (M * M)
    index_ptr = out_ptr + cap_patches.to(tl.int64) * 2
    reverse_ptr = index_ptr + cap_units
    cu_ptr = reverse_ptr + cap_units
    cu_window_ptr = cu_ptr + cap_frames + 1
    b_units = (cap_patches + BLOCK - 1) // BLOCK  # first programs of the parts
    b_frames = b_units + (cap_units + BLOCK - 1) // BLOCK
    b_windows = b_frames + cap_frames // BLOCK + 1
    b_image = b_windows + cap_windows // BLOCK + 1
    i = tl.program_id(0)
    if i < b_units:
        o = i * BLOCK + tl.arange(0, BLOCK)
        _ids(out_ptr, o, cap_patches, n_patches, table_ptr, rows_ptr, n_images, n_steps, M, WS)
    elif i < b_frames:
        o = (i - b_units) * BLOCK + tl.arange(0, BLOCK)
        u = tl.maximum(tl.minimum(o, n_units - 1), 0)
        if WS > 0:
            g = _image(rows_ptr + 2 * n_images, u * (M * M), n_images, n_steps)
            H, W = tl.load(rows_ptr + g) // M, tl.load(rows_ptr + n_images + g) // M
            p = (u - tl.load(rows_ptr + 2 * n_images + g) // (M * M)) % (H * W)
            frame = u - p  # units before this frame
            y, x = _source(p, H, W, WS)
            source = frame + y * W + x
            y, x = p // W, p % W  # and the inverse: where the unit of row y, column x stands
            a, b = y // WS, x // WS
            place = frame + _window_start(a, b, H, W, WS) + (y - a * WS) * tl.minimum(WS, W - b * WS) + (x - b * WS)
        else:
            source, place = u, u
        tl.store(index_ptr + o, tl.where(o < n_units, source, o), mask=o < cap_units)
        tl.store(reverse_ptr + o, tl.where(o < n_units, place, o), mask=o < cap_units)
    elif i < b_windows:
        o = (i - b_frames) * BLOCK + tl.arange(0, BLOCK)
        f = tl.maximum(tl.minimum(o, n_frames - 1), 0)
        g = _image(rows_ptr + 3 * n_images, f, n_images, n_steps)
        frame = tl.load(rows_ptr + g) * tl.load(rows_ptr + n_images + g)
        start = tl.load(rows_ptr + 2 * n_images + g) + (f - tl.load(rows_ptr + 3 * n_images + g)) * frame
        tl.store(cu_ptr + o, tl.where(o < n_frames, start, n_patches), mask=o <= cap_frames)
    elif i < b_image:
        o = (i - b_windows) * BLOCK + tl.arange(0, BLOCK)
        c = tl.maximum(tl.minimum(o, n_windows - 1), 0)
        g = _image(rows_ptr + 4 * n_images, c, n_images, n_steps)
        h, w = tl.load(rows_ptr + g), tl.load(rows_ptr + n_images + g)
        start = tl.load(rows_ptr + 2 * n_images + g)
        c = c - tl.load(rows_ptr + 4 * n_images + g)
        if WS > 0:
            H, W = h // M, w // M
            across = (W + WS - 1) // WS
            a_frame = (H + WS - 1) // WS * across
            start += c // a_frame * (h * w)
            c = c % a_frame
            start += _window_start(c // across, c % across, H, W, WS) * (M * M)
        else:
            start += c * (h * w)
        tl.store(cu_window_ptr + o, tl.where(o < n_windows, start, n_patches), mask=o <= cap_windows)
    elif IMAGE_IDS:
        o = (i - b_image) * BLOCK + tl.arange(0, BLOCK)
        n_before = cap_units.to(tl.int64) * 2 + cap_frames + cap_windows + 2  # after the ids of the window order
        image_ptr = index_ptr + (n_before + n_before % 2)
        _ids(image_ptr, o, cap_patches, n_patches, table_ptr, rows_ptr, n_images, n_steps, M, 0)


INTERPRETED = not isinstance(_plan_kernel, triton.JITFunction)
_compiled = {}


def launch(table, buffer, patches, frames, windows, m, ws, image_ids=False):
    """Fills `buffer` for the capacities `patches`, `frames`, `windows` from `table`; both int32 on one device.

    ws: side of a window in merged units, 0 without windows. Nothing is allocated and nothing waits, so that a CUDA
    graph can capture it after a first launch with the same m, ws and image_ids.
    """
    device = buffer.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(table, buffer, patches, frames, windows, m, ws, image_ids)
    programs = -(-patches // BLOCK) * (2 if image_ids else 1) + -(-(patches // (m * m)) // BLOCK)
    programs += frames // BLOCK + windows // BLOCK + 2
    ws = min(ws, 2**29)  # no frame is longer; a window's side in 32 bits
    args = (patches, frames, windows, m, ws, image_ids, HEADER, BLOCK)
    known = _compiled.get((device.index, m, ws, image_ids))
    p_table, p_buffer = table.data_ptr(), buffer.data_ptr()
    if known is None or (p_table | p_buffer) & 15:
        compiled = _plan_kernel[(programs,)](table, buffer, *args)
        if compiled is not None and triton.__version__.startswith(TRITON) and not (p_table | p_buffer) & 15:
            _compiled[device.index, m, ws, image_ids] = compiled
        return None
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    known.run(
        programs, 1, 1, stream, known.function, known.packed_metadata, None, None, None, p_table, p_buffer, *args
    )  # fmt: skip
    return None
