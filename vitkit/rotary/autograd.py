"""The backward: q and k depend linearly on their rotation, so their gradients are rotated by the negative angle."""

import torch


class Rotate(torch.autograd.Function):
    """(q, k) rotated by `way`, an entry of one of the dicts of implementations; its backward is one call of it too.

    a, b: cos and sin, or pos_ids and table: they get no gradient.
    """

    @staticmethod
    def forward(ctx, q, k, a, b, way, backward):
        ctx.save_for_backward(a, b)
        ctx.way, ctx.backward_ = way, backward
        return way(q, k, a, b, False, backward)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        grads = Rotate.apply(*map(_rows, (grad_q, grad_k)), *ctx.saved_tensors, ctx.way, not ctx.backward_)
        return *grads, None, None, None, None


class RotatePacked(torch.autograd.Function):
    """q and k of a packed qkv (S, 3, H, D) rotated in place; v and its gradient pass."""

    @staticmethod
    def forward(ctx, qkv, a, b, way, backward):
        ctx.save_for_backward(a, b)
        ctx.way, ctx.backward_ = way, backward
        ctx.mark_dirty(qkv)
        way(qkv[:, 0], qkv[:, 1], a, b, True, backward)
        return qkv

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may use it elsewhere
        return RotatePacked.apply(grad, *ctx.saved_tensors, ctx.way, not ctx.backward_), None, None, None, None


def _rows(grad):
    """A gradient may come expanded, as from a sum, or transposed: the kernels want a contiguous last axis."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()
