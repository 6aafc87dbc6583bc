"""The rotation as operators of torch.library, so that torch.compile and torch.export keep it as one node.

Their code runs when the compiled program does and takes the same way as an eager call. Shapes are as in
`vitkit.rotary`; a, b are cos and sin, or pos_ids and table if from_pos.
"""

import torch
from torch import Tensor


@torch.library.custom_op("vitkit::rotary_qk", mutates_args=())
def rotary_qk(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, from_pos: bool, impl: str, backward: bool
) -> tuple[Tensor, Tensor]:
    from . import _rotate

    return _rotate(q, k, a, b, False, from_pos, impl, backward)


@rotary_qk.register_fake
def _(q, k, a, b, from_pos, impl, backward):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx, inputs, output):
    _, _, a, b, ctx.from_pos, ctx.impl, ctx.backward_ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad_q, grad_k):
    grads = [grad.contiguous() for grad in (grad_q, grad_k)]
    grads = rotary_qk(*grads, *ctx.saved_tensors, ctx.from_pos, ctx.impl, not ctx.backward_)
    return *grads, None, None, None, None, None


rotary_qk.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("vitkit::rotary_qkv_", mutates_args=("qkv",))
def rotary_qkv_(qkv: Tensor, a: Tensor, b: Tensor, from_pos: bool, impl: str) -> None:
    from . import _rotate, checks

    q, k = qkv[:, 0], qkv[:, 1]
    checks.check_inplace(q, k, **({"pos_ids": a, "table": b} if from_pos else {"cos": a, "sin": b}))
    _rotate(q, k, a, b, True, from_pos, impl)


def call(q, k, a, b, inplace, from_pos, impl):
    """What a traced call becomes: (q, k).

    In place it is the rotation and two copies: an operator that writes several views of one tensor gets the wrong
    views from torch.compile (seen with torch 2.13, dynamic shapes and inductor: both at q's offset).
    """
    y_q, y_k = rotary_qk(q, k, a, b, from_pos, impl, False)
    y_q, y_k = (y if x.requires_grad else y.detach() for x, y in ((q, y_q), (k, y_k)))  # as without torch.compile
    return (q.copy_(y_q), k.copy_(y_k)) if inplace else (y_q, y_k)


def call_packed(qkv, a, b, from_pos, impl):
    """What a traced call on a packed qkv becomes."""
    if torch.is_grad_enabled() and qkv.requires_grad:  # an operator that writes has no backward
        call(qkv[:, 0], qkv[:, 1], a, b, True, from_pos, impl)
    else:
        rotary_qkv_(qkv, a, b, from_pos, impl)
