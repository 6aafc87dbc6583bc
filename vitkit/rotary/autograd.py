"""The backward: q and k depend linearly on their rotation, so their gradients are rotated by the negative angle."""

import torch

from . import checks


class Rotate(torch.autograd.Function):
    """(q, k) rotated by ways[impl]; the backward is one call of it too, by the negative angle.

    ways: a dict of implementations. a, b: cos and sin, or pos_ids and table: they get no gradient.
    """

    @staticmethod
    def forward(ctx, q, k, a, b, ways, impl, backward):
        ctx.save_for_backward(a, b)
        ctx.ways, ctx.impl, ctx.backward_ = ways, impl, backward
        outputs = ways[impl](q, k, a, b, False, backward)
        ctx.mark_non_differentiable(*(y for y, x in zip(outputs, (q, k)) if not x.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        rotate = Rotate.apply if _serves(ctx.impl, grad_q, grad_k) else _eager
        grads = rotate(_rows(grad_q), _rows(grad_k), *ctx.saved_tensors, ctx.ways, ctx.impl, not ctx.backward_)
        grads = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))
        return *grads, None, None, None, None, None


class RotatePacked(torch.autograd.Function):
    """q and k of a packed qkv (S, 3, H, D) rotated in place; v and its gradient pass."""

    @staticmethod
    def forward(ctx, qkv, a, b, ways, impl, backward):
        ctx.save_for_backward(a, b)
        ctx.ways, ctx.impl, ctx.backward_ = ways, impl, backward
        ctx.mark_dirty(qkv)
        ways[impl](qkv[:, 0], qkv[:, 1], a, b, True, backward)
        return qkv

    @staticmethod
    def backward(ctx, grad):
        arguments = *ctx.saved_tensors, ctx.ways, ctx.impl, not ctx.backward_
        if _serves(ctx.impl, grad):
            grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may use it elsewhere
            return RotatePacked.apply(grad, *arguments), None, None, None, None, None
        q, k = _eager(grad[:, 0], grad[:, 1], *arguments)
        return torch.stack([q, k, grad[:, 2]], dim=1), None, None, None, None, None


def _serves(impl, *grads) -> bool:
    """Whether the way can read these gradients by address: not batched ones, nor lazily negated, nor implied zeros."""
    if impl == "eager" or checks.traced() or not all(map(checks.is_plain, grads)):
        return impl == "eager"
    try:
        return all(grad.data_ptr() or not grad.numel() for grad in grads)
    except RuntimeError:  # batched by torch.autograd.grad(is_grads_batched=True)
        return False


def _eager(q, k, a, b, ways, impl, backward):
    return ways["eager"](q, k, a, b, False, backward)


def _rows(grad):
    """A gradient may come expanded, as from a sum, or transposed: the kernels want a contiguous last axis."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()
