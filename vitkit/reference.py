"""What every op must compute, in plain torch on the CPU: the padded, masked, image-by-image way in use today.

Published as the "before" of each comparison, and the specification of the implementations beside it: they are equal
to these functions value for value. Written to be read; nothing here is tuned. `grid` is a checked grid (see
`vitkit.geometry.check_grid_thw`), m the spatial merge size, ws the side of a window in merged units.
"""

import torch
import torch.nn.functional as F

PAD = -1


def rot_pos_ids(grid, m: int) -> torch.Tensor:
    """(row, column) of every patch, int32 (N, 2), m x m patches of a merged unit one after another."""
    out = [torch.empty(0, 2, dtype=torch.int32, device="cpu")]
    for t, h, w in grid:
        row = torch.arange(h, device="cpu").unsqueeze(1).expand(h, w)
        col = torch.arange(w, device="cpu").unsqueeze(0).expand(h, w)
        blocks = (h // m, m, w // m, m)
        row, col = (x.reshape(blocks).permute(0, 2, 1, 3).flatten() for x in (row, col))
        out.append(torch.stack([row, col], dim=-1).repeat(t, 1).int())
    return torch.cat(out)


def window_index(grid, m: int, ws: int):
    """Merged units in window order: index and its inverse, int32 (N/m^2), and cu_seqlens in patches, int32.

    Every frame is padded up to whole windows and the padding masked away; windows that hold only padding repeat an
    offset, which `unique_consecutive` removes. ws = 0: no windows, so the identity and one segment a frame.
    """
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    index, lengths, first = [none], [none.new_zeros(1)], 0
    for t, h, w in grid:
        H, W = h // m, w // m
        wh, ww = (ws, ws) if ws else (H, W)
        units = torch.arange(t * H * W, device="cpu").reshape(t, H, W)
        pad_h, pad_w = -H % wh, -W % ww
        units = F.pad(units, (0, pad_w, 0, pad_h), value=PAD)
        units = units.reshape(t, (H + pad_h) // wh, wh, (W + pad_w) // ww, ww).permute(0, 1, 3, 2, 4)
        real = units != PAD
        lengths.append(real.sum((3, 4)).flatten() * m * m)
        index.append(units[real] + first)
        first += t * H * W
    index = torch.cat(index)
    cu_seqlens = torch.unique_consecutive(torch.cat(lengths).cumsum(0))
    return index.int(), torch.argsort(index).int(), cu_seqlens.int()


def cu_seqlens(grid) -> torch.Tensor:
    """Offsets of the frames in patches, int32 (frames + 1), the first one 0."""
    lengths = [0] + [h * w for t, h, w in grid for _ in range(t)]
    return torch.tensor(lengths, device="cpu").cumsum(0).int()


def apply_rotary(x, cos, sin) -> torch.Tensor:
    """x (..., S, H, D) rotated in float64; cos and sin (S, D/2) or (S, D), whose first half is read."""
    half = x.shape[-1] // 2
    cos, sin = (table[..., :half].double().unsqueeze(-2) for table in (cos, sin))
    x1, x2 = x.double().split(half, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
