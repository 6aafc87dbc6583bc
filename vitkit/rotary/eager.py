"""Rotary embedding of q and k in plain torch: the arithmetic of transformers, on any device, with gradients.

fp32 for every dtype but float64, which stays in float64; one rounding at the end. `torch.float64`, and tables that
require grad, are served here alone.
"""

import torch


def rotary_qk(q, k, cos, sin, inplace, backward=False):
    """q, k (..., S, H, D), cos and sin (S, D/2) or (S, D): checked arguments of `vitkit.apply_rotary_qk`.

    backward: by the negative angle."""
    sin = -sin if backward else sin
    out_q, out_k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return (q.copy_(out_q), k.copy_(out_k)) if inplace else (out_q, out_k)


def _rotate(x, cos, sin):
    half = x.shape[-1] // 2
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[:, :half].to(compute).unsqueeze(-2) for table in (cos, sin))
    x1, x2 = x.to(compute).split(half, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype).contiguous()
