"""The operations between a tower's matrix products, one launch each: residual sum and norm, and activations.

x, residual (N, C) contiguous on a GPU, in bfloat16, float16 or float32; weight, bias (C) of the same dtype. Sums are
taken in float32. One program a row of a norm, which it reads once (2C or 4C bytes) and keeps in registers; activations
are cut into blocks of BLOCK columns of a row.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, n_columns, eps,
    RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < n_columns
    o_x = i_row * n_columns + o_c
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + o_x, mask=m_c, other=0.0).to(tl.float32)
    if RESIDUAL:
        # the sum is rounded where torch rounds it: it is what the next layers add to
        x = (x + tl.load(residual_ptr + o_x, mask=m_c, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + o_x, x, mask=m_c)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    if CENTRED:  # torch.nn.functional.layer_norm(x, (C,), weight, bias, eps)
        x = tl.where(m_c, x - tl.sum(x, 0) / n_columns, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / n_columns + eps) * weight
        y += tl.load(bias_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    else:  # weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(dtype)
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / n_columns + eps)).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + o_x, y.to(dtype), mask=m_c)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, stride, width, BLOCK_C: tl.constexpr):
    i_row, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < width
    gate = tl.load(x_ptr + i_row * stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + i_row * stride + width + o_c, mask=m_c, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up  # torch.nn.functional.silu(gate) * up
    tl.store(out_ptr + i_row * width + o_c, out.to(out_ptr.dtype.element_ty), mask=m_c)


@triton.jit
def _quick_gelu_kernel(x_ptr, n, BLOCK_C: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_x = o_x < n
    x = tl.load(x_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(x_ptr + o_x, (x / (1.0 + tl.exp(-1.702 * x))).to(x_ptr.dtype.element_ty), mask=m_x)


def on_device_of(x):
    """Makes the device of x the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def norm(x, weight, bias, eps, residual=None):
    """The norm of x, or of x + residual: then (sum, norm). With a bias a layer norm, without one an RMS norm."""
    n_rows, n_columns = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else None
    block = triton.next_power_of_2(n_columns)
    with on_device_of(x):
        _norm_kernel[(n_rows,)](
            x, x if residual is None else residual, weight, weight if bias is None else bias,
            out if total is None else total, out, n_columns, eps, RESIDUAL=residual is not None,
            CENTRED=bias is not None, BLOCK_C=block, num_warps=min(8, max(1, block // 512)),
        )  # fmt: skip
    return out if residual is None else (total, out)


def swiglu(x):
    """(N, 2W), gate and up side by side -> (N, W): silu(gate) * up, rounded once."""
    n_rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(n_rows, width)
    with on_device_of(x):
        _swiglu_kernel[(n_rows, triton.cdiv(width, BLOCK))](x, out, x.stride(0), width, BLOCK_C=BLOCK, num_warps=4)
    return out


def quick_gelu_(x):
    """x * sigmoid(1.702 x) in place, rounded once."""
    with on_device_of(x):
        _quick_gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK_C=BLOCK, num_warps=4)
    return x
