"""Attention over segments for a tower of transformers, and the way into its attention layers.

A layer's `forward` stays transformers' own: `exchange` gives it other objects for some of the global names that it
looks up, so that it rotates and attends by ours and is otherwise whatever the installed version has.
"""

import sys
import types
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F

from ..rotary import apply_rotary_qk


def exchange(function, names: dict):
    """`function` with other objects for some of its global names; ValueError where it does not look one up."""
    missing = names.keys() - set(function.__code__.co_names)
    if missing:
        raise ValueError(
            f"tower: {function.__qualname__} of this transformers does not use {', '.join(sorted(missing))}; "
            "a version that does is allowed, or parts without rotary and attention"
        )
    key = function, *names.items()
    if key not in _exchanged:
        # torch.compile keeps its own by code, and finds globals by the name of the module that they belong to
        module = types.ModuleType(f"{__name__}.exchanged_{len(_exchanged)}")
        module.__dict__.update(function.__globals__ | names | {"__name__": module.__name__})
        sys.modules[module.__name__] = module
        code = function.__code__.replace(co_name=f"{function.__name__}_exchanged")
        rest = function.__name__, function.__defaults__, function.__closure__
        new = types.FunctionType(code, module.__dict__, *rest)
        new.__kwdefaults__, new.__qualname__ = function.__kwdefaults__, function.__qualname__
        _exchanged[key] = new
    return _exchanged[key]


_exchanged = {}


def rotate(q, k, cos, sin):
    """`apply_rotary_qk`; q and k as they are where cos is None, since `attend` will rotate them."""
    return (q, k) if cos is None else apply_rotary_qk(q, k, cos, sin)


def attend(
    module, query, key, value, attention_mask=None, scaling=None, cu_seq_lens_q=None, max_length_q=None, runs=None,
    angles=None, **_,
):  # fmt: skip
    """q, k, v (1, H, S, D), and offsets int32 (segments + 1) -> ((1, S, H, D), None); every segment for itself.

    By torch's variable-length attention where it serves, and otherwise by one call a run of neighbours of one length.
    runs: as `runs_of` returns them, where they are known on the host; without them the offsets are read back.
    angles: cos and sin (S, D), where q and k are not rotated yet: then in one launch if `window_kernels` serves them.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, H, D): views, as is every transpose here
    if angles is not None:
        from . import window_kernels

        if window_kernels.serves(q, k, v, max_length_q):
            out = window_kernels.rotate_and_attend(q, k, v, *angles, cu_seq_lens_q, max_length_q, scaling)
            return out.unsqueeze(0), None
        q, k = apply_rotary_qk(q, k, *angles)
    if varlen_serves(q.device, q.dtype, q.shape[-1]):
        if max_length_q is None:
            max_length_q = int(cu_seq_lens_q.diff().max())
        out = _varlen()(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
        return out.unsqueeze(0), None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if not _recorded(q, k, v) else []
    for start, count, length in runs_of(cu_seq_lens_q) if runs is None else runs:
        place = slice(start, start + count * length)
        parts = (x[place].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(*parts, scale=scaling).transpose(1, 2).flatten(0, 1)
        if isinstance(out, list):
            out.append(mixed)
        else:
            out[place] = mixed
    return (torch.cat(out) if isinstance(out, list) else out).unsqueeze(0), None


def runs_of(offsets) -> list[tuple[int, int, int]]:
    """(start, number, length) of every run of neighbouring segments of one length."""
    offsets = offsets.tolist()
    out, start = [], offsets[0]
    for length, group in groupby(b - a for a, b in zip(offsets, offsets[1:])):
        count = len(list(group))
        if length:
            out.append((start, count, length))
        start += count * length
    return out


@cache
def varlen_serves(device, dtype, head_dim) -> bool:
    """Whether torch's variable-length attention takes q of this kind."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen():
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _recorded(*tensors):
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Ours:
    def get_interface(self, *_):
        return attend


# For `exchange`: a layer that thinks flash attention was asked for hands the offsets over whole.
NAMES = {
    "ALL_ATTENTION_FUNCTIONS": _Ours(),
    "is_flash_attention_requested": lambda config: True,
    "get_max_seqlen": lambda cu_seqlens, config, kwargs: kwargs.get("max_seqlen"),
}
