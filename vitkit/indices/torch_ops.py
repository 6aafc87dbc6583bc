"""The index tensors by closed form in plain torch: about twenty vectorised operations, on any device torch knows.

`grid` is a checked list of (t, h, w), m the spatial merge size, ws the side of a window in merged units (0: none).
The sizes of all tensors come from the host, so that nothing is read back. The formulas stand in `vitkit.indices`.
"""

import torch


def _upload(values, device) -> torch.Tensor:
    """int64 tensor of a list of ints (or of lists) on `device`, by one copy that does not wait for the GPU."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


def _spread(grid, counts, device):
    """For each of sum(counts) entries: h and w of its image, its place in it, and the entries before that image."""
    starts, total = [], 0
    for n in counts:
        starts.append(total)
        total += n
    table = _upload([[h, w, s, n] for (_, h, w), s, n in zip(grid, starts, counts)], device).T
    h, w, start = torch.repeat_interleave(table[:3], table[3], dim=1, output_size=total)
    return h, w, torch.arange(total, device=device) - start, start


def _source(p, H, W, ws):
    """Row and column, in merged units, of place p in the window order of one frame of H x W units."""
    a = p // (ws * W)
    hh = torch.clamp(H - a * ws, max=ws)
    r = p - a * ws * W
    b = r // (ws * hh)
    ww = torch.clamp(W - b * ws, max=ws)
    s = r - b * ws * hh
    return a * ws + s // ww, b * ws + s % ww


def _place(y, x, H, W, ws):
    """The place in the window order of one frame at which row y, column x stands: the inverse of `_source`."""
    a, b = y // ws, x // ws
    hh, ww = torch.clamp(H - a * ws, max=ws), torch.clamp(W - b * ws, max=ws)
    return a * ws * W + b * ws * hh + (y - a * ws) * ww + (x - b * ws)


def rot_pos_ids(grid, m, ws, device, order) -> torch.Tensor:
    if not grid:
        return torch.empty(0, 2, dtype=torch.int32, device=device)
    h, w, p, _ = _spread(grid, [t * h * w for t, h, w in grid], device)
    p = p % (h * w)  # within the frame
    unit, r, W = p // (m * m), p % (m * m), w // m
    y, x = _source(unit, h // m, W, ws) if order == "window" and ws else (unit // W, unit % W)
    return torch.stack([y * m + r // m, x * m + r % m], dim=-1).int()


def window_index(grid, m, ws, device):
    grid = [(t, h // m, w // m) for t, h, w in grid]  # in merged units
    if not ws:
        index = torch.arange(sum(t * h * w for t, h, w in grid), dtype=torch.int32, device=device)
        return index, index.clone(), cu_seqlens(grid, m, ws, device, m * m)
    if not grid:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    H, W, p, start = _spread(grid, [t * h * w for t, h, w in grid], device)
    p, frame = p % (H * W), start + p // (H * W) * (H * W)  # place within the frame; units before the frame
    y, x = _source(p, H, W, ws)
    index, reverse = frame + y * W + x, frame + _place(p // W, p % W, H, W, ws)

    across = [-(-w // ws) for _, _, w in grid]
    H, W, n, _ = _spread(grid, [t * -(-h // ws) * nw for (t, h, _), nw in zip(grid, across)], device)
    nw = (W + ws - 1) // ws
    n = n % ((H + ws - 1) // ws * nw)  # window within the frame
    hh, ww = torch.clamp(H - n // nw * ws, max=ws), torch.clamp(W - n % nw * ws, max=ws)
    return index.int(), reverse.int(), _offsets(hh * ww * (m * m))


def cu_seqlens(grid, m, ws, device, patches=1) -> torch.Tensor:
    """`patches` of each entry of the grid: 1, or m*m where the grid is given in merged units."""
    if not grid:
        return torch.zeros(1, dtype=torch.int32, device=device)
    h, w, _, _ = _spread(grid, [t for t, _, _ in grid], device)
    return _offsets(h * w * patches)


def _offsets(lengths) -> torch.Tensor:
    out = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=out[1:])
    return out
