"""Rotary embedding of q and k in one launch. Imports torch and triton alone: lift this file into another project.

q (B, S, Hq, D) and k (B, S, Hk, D), or without B; any strides with a contiguous last axis, so packed qkv is read
where it lies. cos, sin (S, >= D/2) with a contiguous last axis. fp32 arithmetic, one rounding.

Work is cut into chunks: VEC neighbouring entries of the first half of a head and the VEC entries they are paired
with in the second half. Chunks are numbered (token, head, chunk) and handed out in a row, so no lane idles when D/2
is no power of two. VEC is the widest that gives accesses of at most 16 bytes and divides D/2, every stride and every
address. A program reads q and k of its chunks, so cos and sin are read once for both.

Bytes at D = 80, H = 16, bf16, fp32 tables: 2 * 2 * 16 * 80 * 2 = 10240 a token for q and k, 2 * 40 * 4 = 320 for
cos and sin.
"""

import torch
import triton
import triton.language as tl

# Chunks of a program, and warps: one chunk a lane. Of 64 to 1024 chunks on 2 to 8 warps the fastest on an H200.
BLOCK, NUM_WARPS = 128, 4


@triton.jit
def _offsets(o_b, o_s, o_h, o_c, s_b, s_s, s_h, VEC: tl.constexpr):
    base = o_b.to(tl.int64) * s_b + o_s.to(tl.int64) * s_s + o_h.to(tl.int64) * s_h + o_c * VEC
    return tl.multiple_of(base, VEC)[:, None] + tl.arange(0, VEC)[None, :]  # (BLOCK, VEC), VEC in a row


@triton.jit
def _chunks(i_block, S, n_tokens, H: tl.constexpr, N: tl.constexpr, BATCHED: tl.constexpr, BLOCK: tl.constexpr):
    """Batch, position, head and chunk of BLOCK chunks in a row, and which of them exist. N: chunks a head."""
    first = i_block.to(tl.int64) * BLOCK  # within a block 32 bits are enough
    token, rest = first // (H * N), (first % (H * N)).to(tl.int32) + tl.arange(0, BLOCK)
    o_t = rest // (H * N)
    mask = token + o_t < n_tokens
    o_h, o_c = rest % (H * N) // N, rest % N
    if BATCHED:
        o_s = (token % S).to(tl.int32) + o_t
        o_b = (token // S).to(tl.int32) + o_s // S
        o_s = o_s % S
    else:
        o_s = token.to(tl.int32) + o_t
        o_b = o_t * 0
    return o_b, o_s, o_h, o_c, mask[:, None]


@triton.jit
def _tables(cos_ptr, sin_ptr, o_s, o_c, cos_ss, sin_ss, mask, VEC: tl.constexpr):
    o = o_s * 0
    cos = tl.load(cos_ptr + _offsets(o, o_s, o, o_c, 0, cos_ss, 0, VEC), mask=mask).to(tl.float32)
    sin = tl.load(sin_ptr + _offsets(o, o_s, o, o_c, 0, sin_ss, 0, VEC), mask=mask).to(tl.float32)
    return cos, sin


@triton.jit
def _rotate(
    x_ptr, y_ptr, o_b, o_s, o_h, o_c, s_b, s_s, s_h, S, cos, sin, mask,
    H: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    o_x = _offsets(o_b, o_s, o_h, o_c, s_b, s_s, s_h, VEC)
    if INPLACE:
        o_y = o_x
    else:  # contiguous
        o_y = _offsets(o_b, o_s, o_h, o_c, S.to(tl.int64) * (H * HALF * 2), H * HALF * 2, HALF * 2, VEC)
    x1 = tl.load(x_ptr + o_x, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + o_x + HALF, mask=mask).to(tl.float32)
    tl.store(y_ptr + o_y, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + o_y + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)


# Sizes and strides vary with the request or the layout: specialising on them would only recompile.
@triton.jit(
    do_not_specialize=[
        "S", "n_tokens", "n_blocks_q", "q_sb", "q_ss", "q_sh", "k_sb", "k_ss", "k_sh", "cos_ss", "sin_ss",
    ]
)  # fmt: skip
def _kernel(
    q_ptr, k_ptr, yq_ptr, yk_ptr, cos_ptr, sin_ptr,
    S, n_tokens, n_blocks_q, q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, cos_ss, sin_ss,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr,
    BATCHED: tl.constexpr, INPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HK = HQ: a program rotates the same chunks of q and k. Else k's blocks follow q's; HK = 0: there is no k."""
    N: tl.constexpr = HALF // VEC
    i_block = tl.program_id(0)
    if HK == 0 or HK == HQ or i_block < n_blocks_q:
        o_b, o_s, o_h, o_c, mask = _chunks(i_block, S, n_tokens, HQ, N, BATCHED, BLOCK)
        cos, sin = _tables(cos_ptr, sin_ptr, o_s, o_c, cos_ss, sin_ss, mask, VEC)
        _rotate(q_ptr, yq_ptr, o_b, o_s, o_h, o_c, q_sb, q_ss, q_sh, S, cos, sin, mask, HQ, HALF, VEC, INPLACE)
        if HK == HQ:
            _rotate(k_ptr, yk_ptr, o_b, o_s, o_h, o_c, k_sb, k_ss, k_sh, S, cos, sin, mask, HK, HALF, VEC, INPLACE)
    elif HK > 0:
        o_b, o_s, o_h, o_c, mask = _chunks(i_block - n_blocks_q, S, n_tokens, HK, N, BATCHED, BLOCK)
        cos, sin = _tables(cos_ptr, sin_ptr, o_s, o_c, cos_ss, sin_ss, mask, VEC)
        _rotate(k_ptr, yk_ptr, o_b, o_s, o_h, o_c, k_sb, k_ss, k_sh, S, cos, sin, mask, HK, HALF, VEC, INPLACE)


INTERPRETED = not isinstance(_kernel, triton.JITFunction)


def rotary_qk(q, k, cos, sin, inplace=False):
    """q and k rotated by one launch: new contiguous tensors, or q and k themselves if inplace."""
    yq, yk = (q, k) if inplace else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _launch(q, k, yq, yk, cos, sin, inplace)
    return yq, yk


def rotary_qk_separate(q, k, cos, sin, inplace=False):
    """The same by two launches, one for q and one for k."""
    out = []
    for x in (q, k):
        y = x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, None, y, None, cos, sin, inplace)
        out.append(y)
    return tuple(out)


def _strides(x):
    """(batch, token, head) strides in entries, 0 for an axis of one."""
    s = [0 if n == 1 else s for n, s in zip(x.shape, x.stride())]
    return s[:-1] if x.dim() == 4 else [0, *s[:-1]]


def _launch(q, k, yq, yk, cos, sin, inplace):
    *batch, S, HQ, D = q.shape
    B, HK = (batch[0] if batch else 1), (0 if k is None else k.shape[-2])
    if B * S * (HQ + HK) == 0:
        return
    if HQ == 0:  # only k has heads: it takes q's place
        return _launch(k, None, yk, None, cos, sin, inplace)
    q_s, k_s = _strides(q), _strides(k) if HK else (0, 0, 0)
    # A power of two divides all of these together exactly if it divides their bitwise or.
    tensors = [q, yq, cos, sin] + ([k, yk] if HK else [])
    bits = D // 2 | cos.stride(0) | sin.stride(0) | 16 // q.element_size()
    for s in (*q_s, *k_s):
        bits |= s
    for x in tensors:
        bits |= x.data_ptr() // x.element_size()
    vec = bits & -bits
    n_chunks = D // 2 // vec
    blocks_q = triton.cdiv(B * S * HQ * n_chunks, BLOCK)
    blocks_k = 0 if HK in (0, HQ) else triton.cdiv(B * S * HK * n_chunks, BLOCK)
    args = (q, k, yq, yk, cos, sin, S, B * S, blocks_q, *q_s, *k_s, cos.stride(0), sin.stride(0))
    if not HK:
        args = (q, q, yq, yq, *args[4:])
    options = dict(HQ=HQ, HK=HK, HALF=D // 2, VEC=vec, BATCHED=B > 1, INPLACE=inplace, BLOCK=BLOCK, num_warps=NUM_WARPS)
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            _kernel[(blocks_q + blocks_k,)](*args, **options)
    else:
        _kernel[(blocks_q + blocks_k,)](*args, **options)
