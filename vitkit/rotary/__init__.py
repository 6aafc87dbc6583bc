"""Rotating q and k by their patch's position, from rows of cos and sin or from the positions themselves.

Rotate-half pairing: entry i of a head is paired with entry i + D/2. With x1, x2 the two halves,

    out1 = x1 * cos - x2 * sin
    out2 = x2 * cos + x1 * sin

What cannot be avoided is to read and to write q and k once: 4 * S * H * D entries. Ways: `eager` (plain torch),
`triton_separate` (a launch for q, one for k), `triton` (one launch for both), `numba` (one parallel pass on the CPU).
Gradients of q and k are the same rotation by the negative angle, by the same way.
"""

from importlib import import_module

import torch

from . import checks, eager, ops, prepared
from .angles import rotary_cos_sin, rotary_table, table_rows
from .autograd import Rotate, RotatePacked
from .checks import DTYPES

__all__ = [
    "DTYPES",
    "FROM_POS",
    "IMPLEMENTATIONS",
    "apply_rotary_qk",
    "apply_rotary_qk_from_pos",
    "apply_rotary_qkv_",
    "apply_rotary_qkv_from_pos_",
    "rotary_cos_sin",
    "rotary_table",
]


def _way(module, function="rotary_qk"):
    """An implementation that imports its module, and so numba or triton, when it is first called."""

    def call(*args):
        return getattr(import_module(f"{__name__}.{module}"), function)(*args)

    return call


def _by_rows(way):
    """The implementation from positions that first gathers their rows of the table: 4 * D more bytes a token."""
    return lambda q, k, pos_ids, table, *rest: way(q, k, *table_rows(pos_ids, table), *rest)


# Every entry takes (q, k, cos, sin, inplace, backward), already checked, and returns (q, k).
IMPLEMENTATIONS = {
    "eager": eager.rotary_qk,
    "triton_separate": _way("triton_kernels", "rotary_qk_separate"),
    "triton": _way("triton_kernels"),
    "numba": _way("numba_kernels"),
}
# The same with (pos_ids, table) instead of (cos, sin).
FROM_POS = {
    "eager": _by_rows(eager.rotary_qk),
    "triton": _way("triton_kernels", "rotary_qk_from_pos"),
    "numba": _by_rows(_way("numba_kernels")),
}


def apply_rotary_qk(q, k, cos, sin, *, inplace=False, impl="auto") -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated: (S, H, D) or (B, S, H, D) each, with cos and sin shared over B.

    q, k: float32, bfloat16 or float16 with fp32 arithmetic and one rounding (float64: `eager` alone); any strides
    with a contiguous last axis; the number of heads may differ. cos, sin: (S, D/2), or (S, D), of which the first
    half is read; any floating dtype. Returns new contiguous tensors, or q and k themselves with inplace=True.
    impl: a key of IMPLEMENTATIONS, or "auto": numba on the CPU, triton on a GPU, eager where neither serves the call
    (float64, cos or sin that require grad). ValueError names an argument that is not allowed, before anything is
    computed. Under torch.compile and torch.export the call is one operator, vitkit::rotary_qk; in place
    two copies follow it (`apply_rotary_qkv_` has an operator of its own, which writes where q and k lie).
    """
    return _call(q, k, cos, sin, inplace, False, impl)


def apply_rotary_qk_from_pos(
    q, k, pos_ids, table, *, inplace=False, max_position=None, impl="auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `apply_rotary_qk`, without a row of cos and sin for every token. D is a multiple of 4.

    pos_ids: integers (S, 2), row and column of each token, shared over B. table: float32 (2, P, D/4) from
    `rotary_table`. A position outside 0 to P - 1 is taken as the nearest that is inside: looking at pos_ids would
    stall a GPU. max_position: the largest in pos_ids where the caller knows it (`VisionPlan.max_position`); one beyond
    the table is a ValueError. impl: a key of FROM_POS, or "auto".
    """
    return _call(q, k, pos_ids, table, inplace, True, impl, max_position)


def apply_rotary_qkv_(qkv, cos, sin, *, impl="auto") -> torch.Tensor:
    """q and k rotated in place in a packed (S, 3, H, D); v is not touched. Returns qkv. Else as `apply_rotary_qk`."""
    return _call_packed(qkv, cos, sin, False, impl)


def apply_rotary_qkv_from_pos_(qkv, pos_ids, table, *, max_position=None, impl="auto") -> torch.Tensor:
    """As `apply_rotary_qkv_`, from positions as in `apply_rotary_qk_from_pos`."""
    return _call_packed(qkv, pos_ids, table, True, impl, max_position)


def _call(q, k, a, b, inplace, from_pos, impl, max_position=None):
    """Checks and rotates; a, b are cos and sin, or pos_ids and table."""
    tracing = torch.compiler.is_compiling()
    fast = type(impl) is str and impl in ("auto", "triton") and (inplace is True or inplace is False)
    if fast and not tracing:
        out = prepared.rotate(q, k, a, b, inplace, from_pos, max_position)
        if out is not None:
            return out
    _check(q, k, a, b, inplace, from_pos, max_position)
    if tracing and _is_operator(q, a, b, impl, from_pos):
        return ops.call(q, k, a, b, inplace, from_pos, impl)
    return _rotate(q, k, a, b, inplace, from_pos, impl)


def _call_packed(qkv, a, b, from_pos, impl, max_position=None):
    """As `_call`, in place on the q and k of a packed qkv; autograd sees one function that writes qkv."""
    tracing = torch.compiler.is_compiling()
    fast = type(impl) is str and impl in ("auto", "triton")
    if fast and not tracing and prepared.rotate_packed(qkv, a, b, from_pos, max_position):
        return qkv
    checks.check_packed(qkv)
    if not tracing and not (torch.is_grad_enabled() and qkv.requires_grad):
        _call(qkv[:, 0], qkv[:, 1], a, b, True, from_pos, impl, max_position)
        if fast:
            prepared.prepare_packed(qkv, a, b, from_pos)
        return qkv
    q, k = qkv.detach()[:, 0], qkv.detach()[:, 1]
    _check(q, k, a, b, True, from_pos, max_position)
    if tracing and _is_operator(q, a, b, impl, from_pos):
        ops.call_packed(qkv, a, b, from_pos, impl)
        return qkv
    impl, a, b = _settle(q, k, a, b, from_pos, impl)
    if impl == "eager":
        _rotate(qkv[:, 0], qkv[:, 1], a, b, True, from_pos, impl)
        return qkv
    return RotatePacked.apply(qkv, a, b, _ways(from_pos), impl, False)


def _check(q, k, a, b, inplace, from_pos, max_position):
    if from_pos:
        checks.check_call_from_pos(q, k, a, b, inplace, max_position)
    else:
        checks.check_call(q, k, a, b, inplace)


def _is_operator(q, a, b, impl, from_pos) -> bool:
    """Whether a traced call becomes an operator. torch.compile sees through eager, which it fuses."""
    checks.check_impl(impl, _ways(from_pos))
    if impl == "eager" or q.dtype == torch.float64 or q.device.type not in ("cpu", "cuda"):
        return False
    if checks.transformed():  # an operator has no rule for forward mode, for one
        return False
    return not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))


def _ways(from_pos):
    return FROM_POS if from_pos else IMPLEMENTATIONS


def _settle(q, k, a, b, from_pos, impl):
    """(implementation, a, b): which serves the call, and tables of one dtype with a contiguous last axis."""
    impl = checks.choose(impl, _ways(from_pos), q, k, (a, b))
    if from_pos:
        if a.dtype not in (torch.int32, torch.int64):
            a = a.int()
        return impl, a, b.contiguous()
    if a.dtype != b.dtype or (a.dtype == torch.float64 and q.dtype != torch.float64):
        wide = torch.promote_types(q.dtype, torch.float32)  # the dtype of the arithmetic
        a, b = a.to(wide), b.to(wide)
    if a.stride(-1) != 1 or b.stride(-1) != 1:
        a, b = a.contiguous(), b.contiguous()
    return impl, a, b


def _rotate(q, k, a, b, inplace, from_pos, impl, backward=False):
    """Rotates what has been checked."""
    tables = a, b
    impl, a, b = _settle(q, k, a, b, from_pos, impl)
    way = _ways(from_pos)[impl]
    if impl != "eager" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        y_q, y_k = Rotate.apply(q, k, a, b, _ways(from_pos), impl, backward)
        return (q.copy_(y_q), k.copy_(y_k)) if inplace else (y_q, y_k)
    if impl == "triton" and not backward and tables[0] is a and tables[1] is b:
        out = _launch(q, k, a, b, inplace, from_pos)
    else:
        out = way(q, k, a, b, inplace, backward)
    if inplace and impl != "eager":  # autograd then notices a write to what it had saved
        for x in (q, k):
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
    return out


def _launch(q, k, a, b, inplace, from_pos):
    """The way `triton`, and the launch kept for the next call that looks like it."""
    from . import triton_kernels

    y_q, y_k = (q, k) if inplace else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    tables = (b[0], b[1], a) if from_pos else (a, b)
    launched = triton_kernels.launch(q, k, y_q, y_k, *tables, inplace=inplace, backward=False)
    prepared.prepare(q, k, y_q, y_k, a, b, inplace, from_pos, launched)
    return y_q, y_k
