"""Rotation and attention of short segments in one launch: each window is read once and its result written once.

qkv are three views (S, H, D) of one packed tensor in bfloat16 or float16; cos, sin float32 (S, D) or (S, D/2), of
which the first half is read; offsets int32 (segments + 1); out (S, H, D). A program takes one segment and some heads:
q, k and v of a head are read (6D bytes a patch), rotated in float32 and rounded as `apply_rotary_qk` does, and the
scores of the whole segment lie in registers, so there is no second pass. Bytes: 8HD a patch and the angles.
"""

import torch
import triton
import triton.language as tl

from .triton_kernels import on_device_of

LONGEST = 64  # patches: the scores of a longer segment do not fit into registers
FEW = 4096  # patches; so many fill a GPU with 4 heads a program, fewer take 2


@triton.jit
def _window_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, offsets_ptr, out_ptr, stride, stride_cos, scale,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_segment, i_group = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(offsets_ptr + i_segment), tl.load(offsets_ptr + i_segment + 1)
    if start == end:  # beyond the batch of a budget
        return
    o_s, o_d = (start + tl.arange(0, BLOCK_S)).to(tl.int64), tl.arange(0, BLOCK_D)
    m_s = o_s < end
    m = m_s[:, None] & (o_d < HALF)[None, :]
    o_angle = o_s[:, None] * stride_cos + o_d[None, :]
    cos = tl.load(cos_ptr + o_angle, mask=m, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + o_angle, mask=m, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    for i in range(HEADS):
        head = (i_group * HEADS + i) * 2 * HALF
        o_x = head + o_s[:, None] * stride + o_d[None, :]
        # halves of a head, as rotate-half pairs them
        q1 = tl.load(q_ptr + o_x, mask=m, other=0.0).to(tl.float32)
        q2 = tl.load(q_ptr + o_x + HALF, mask=m, other=0.0).to(tl.float32)
        k1 = tl.load(k_ptr + o_x, mask=m, other=0.0).to(tl.float32)
        k2 = tl.load(k_ptr + o_x + HALF, mask=m, other=0.0).to(tl.float32)
        scores = tl.dot((q1 * cos - q2 * sin).to(dtype), tl.trans((k1 * cos - k2 * sin).to(dtype)))
        scores += tl.dot((q2 * cos + q1 * sin).to(dtype), tl.trans((k2 * cos + k1 * sin).to(dtype)))
        scores = tl.where(m_s[None, :], scores * (scale * 1.4426950408889634), float("-inf"))  # 2^x below, so log2(e)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        total = tl.sum(weights, 1)[:, None]
        weights = weights.to(dtype)
        v1 = tl.load(v_ptr + o_x, mask=m, other=0.0)
        v2 = tl.load(v_ptr + o_x + HALF, mask=m, other=0.0)
        o_out = head + o_s[:, None] * (2 * H * HALF) + o_d[None, :]
        tl.store(out_ptr + o_out, (tl.dot(weights, v1) / total).to(dtype), mask=m)
        tl.store(out_ptr + o_out + HALF, (tl.dot(weights, v2) / total).to(dtype), mask=m)


def serves(q, k, v, longest) -> bool:
    """Whether q, k, v (S, H, D) are views of one packed tensor as the kernel takes them, in segments short enough."""
    same = q.stride() == k.stride() == v.stride() and q.stride()[1:] == (q.shape[2], 1)
    return same and q.shape == k.shape == v.shape and longest <= LONGEST and not q.shape[2] % 2 and q.shape[2] <= 128


def rotate_and_attend(q, k, v, cos, sin, offsets, longest, scale):
    """(S, H, D), of every segment for itself. Rows that belong to no segment are not written."""
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    group = next(n for n in ((4, 2, 1) if rows >= FEW else (2, 1)) if heads % n == 0)
    block_s, block_d = (max(16, triton.next_power_of_2(n)) for n in (longest, dim // 2))
    with on_device_of(q):
        _window_kernel[(len(offsets) - 1, heads // group)](
            q, k, v, cos, sin, offsets, out, q.stride(0), cos.stride(0), scale,
            H=heads, HALF=dim // 2, HEADS=group, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
