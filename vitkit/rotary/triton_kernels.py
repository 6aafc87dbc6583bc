"""Rotary embedding of q and k in one launch. Imports torch and triton alone: lift this file into another project.

q (B, S, Hq, D) and k (B, S, Hk, D), or without B; any strides with a contiguous last axis, so packed qkv is read
where it lies. Tables are either cos and sin (S, >= D/2) with a contiguous last axis, or positions (S, 2) and a table
(2, P, D/4) to look them up in: table[0, p] is cos, table[1, p] is sin. fp32 arithmetic, one rounding.

Work is cut into chunks: VEC neighbouring entries of the first half of a head and the VEC entries they are paired with
in the second half, so a lane needs nobody else's data and rotates in place. VEC is the widest that gives accesses of
at most 16 bytes and divides D/2, every stride and every address.

The heads of q and of k of a token are numbered in a row. Each group of 32 lanes takes whole heads (4 or 6 of them at
D = 80, 20 or 30 lanes): in place, a cache line that one group writes while another still reads from it costs more than
the lanes that idle (H200, D = 80, share of a copy's bandwidth: 0.83 with chunks handed out one after another, 0.94 so).

Bytes at D = 80, H = 16, bf16: 2 * 2 * 16 * 80 * 2 = 10240 a token for q and k, 2 * 40 * 4 = 320 for cos and sin in
fp32, or 8 for a position in int32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

WARP = 32  # lanes of a group; on a GPU with wavefronts of 64 two groups share one


class Layout(NamedTuple):
    """How chunks are given to lanes. Every layout computes the same; they differ in speed.

    pair: a lane rotates its chunk in q and in k (as many heads in both); else q's and k's heads are numbered in a row.
    rows, lanes, heads: a group takes `heads` whole heads as `rows` rows of `lanes` (of its 32) chunks.
    warps: groups of a program.
    """

    pair: bool
    rows: int
    lanes: int
    heads: int
    warps: int


# Where the rule below is not the fastest on an H200, by whether in place, bytes of a chunk, chunks a head, bytes of an
# entry of cos (0: from positions). Mostly it is where a program's heads are whole cache lines.
_MEASURED = {
    (False, 16, 5, 4): Layout(True, 1, 20, 4, 1),  # D = 80: 4 heads are 5 lines
    (False, 16, 5, 0): Layout(True, 1, 30, 6, 1),
    (True, 16, 5, 4): Layout(False, 1, 20, 4, 4),
    (True, 16, 5, 2): Layout(False, 1, 20, 4, 4),
    (False, 16, 6, 4): Layout(False, 1, 24, 4, 4),  # D = 96: 4 heads are 6 lines
    (False, 16, 6, 2): Layout(False, 1, 24, 4, 4),
    (True, 16, 6, 4): Layout(False, 1, 24, 4, 4),
    (True, 16, 6, 2): Layout(False, 1, 24, 4, 4),
    (True, 16, 6, 0): Layout(False, 1, 24, 4, 4),
    (False, 8, 9, 4): Layout(True, 1, 18, 2, 4),  # D = 72: 8 heads are 9 lines
    (False, 8, 9, 2): Layout(True, 1, 18, 2, 4),
    (True, 8, 9, 4): Layout(False, 2, 27, 6, 4),
    (True, 8, 9, 2): Layout(True, 1, 18, 2, 4),
    (True, 8, 9, 0): Layout(True, 4, 24, 8, 4),
}
FEW = 4096  # tokens below which the launch is too short to fill the GPU: measured at 1296
_MEASURED_FEW = {
    (False, 16, 5, 0): Layout(True, 1, 20, 4, 2),
    (True, 16, 5, 4): Layout(True, 1, 20, 4, 4),
    (True, 16, 5, 0): Layout(True, 1, 30, 6, 1),
    (False, 8, 9, 4): Layout(True, 1, 27, 3, 8),
    (True, 8, 9, 4): Layout(True, 4, 18, 8, 4),
}


def layout_for(half, vec, itemsize, equal_heads, inplace, table_itemsize, tokens) -> Layout:
    """The layout for heads of 2 * half entries of `itemsize` bytes in chunks of vec; table_itemsize 0: from positions.

    As few rows as keep 4 of 5 lanes busy. Lanes with narrow chunks move too little each to keep the memory busy, so
    they take q and k together where these have as many heads.
    """
    n = half // vec
    key = (inplace, vec * itemsize, n, table_itemsize)
    measured = (_MEASURED_FEW.get(key) if tokens < FEW else None) or _MEASURED.get(key)
    if measured and (equal_heads or not measured.pair):
        return measured
    narrow = vec * itemsize < 16
    rows = 1
    while WARP * rows < n or (rows < 4 and WARP * rows // n * n < 0.8 * WARP * rows):
        rows *= 2
    heads = WARP * rows // n
    return Layout(narrow and equal_heads, rows, min(WARP, heads * n), heads, 4)


@triton.jit
def _first(x_ptr, o_b, o_s, o_h, o_c, s_b, s_s, s_h, VEC: tl.constexpr):
    """Addresses of the chunks' first entries, multiples of a chunk's bytes: the launch has made sure of it."""
    p = x_ptr + (o_b.to(tl.int64) * s_b + o_s.to(tl.int64) * s_s + o_h.to(tl.int64) * s_h + o_c * VEC)
    return tl.multiple_of(p, VEC * (x_ptr.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def _entries(p, VEC: tl.constexpr):
    """(BLOCK,) first addresses -> (BLOCK, VEC), VEC in a row."""
    return p[:, None] + tl.arange(0, VEC)[None, :]


@triton.jit
def _tables(
    cos_ptr, sin_ptr, pos_ptr, o_s, o_c, n_positions, cos_ss, sin_ss, pos_ss, pos_sc, mask,
    HALF: tl.constexpr, VEC: tl.constexpr, TABLE_VEC: tl.constexpr, FROM_POS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """cos and sin of the chunks, fp32 (BLOCK, VEC); of the negative angle for the backward."""
    o_s = o_s.to(tl.int64)
    if FROM_POS:  # 8 bytes a token; the table, 2 * P * D/4 * 4 bytes, stays in the cache
        row = tl.load(pos_ptr + o_s * pos_ss, mask=mask, other=0)
        col = tl.load(pos_ptr + o_s * pos_ss + pos_sc, mask=mask, other=0)
        row = tl.minimum(tl.maximum(row, 0), n_positions - 1).to(tl.int32)  # never beyond the table
        col = tl.minimum(tl.maximum(col, 0), n_positions - 1).to(tl.int32)
        o_f = (o_c * VEC)[:, None] + tl.arange(0, VEC)[None, :]
        by_col = o_f >= HALF // 2  # the second quarter of a head turns by the column
        o_t = tl.where(by_col, col[:, None] * (HALF // 2) + o_f - HALF // 2, row[:, None] * (HALF // 2) + o_f)
        o_t = tl.max_contiguous(o_t, [1, TABLE_VEC])
        cos = tl.load(tl.multiple_of(cos_ptr + o_t, [1, 4 * TABLE_VEC]), mask=mask[:, None])
        sin = tl.load(tl.multiple_of(sin_ptr + o_t, [1, 4 * TABLE_VEC]), mask=mask[:, None])
    else:
        o = o_c * 0
        cos = tl.load(_entries(_first(cos_ptr, o, o_s, o, o_c, 0, cos_ss, 0, VEC), VEC), mask=mask[:, None])
        sin = tl.load(_entries(_first(sin_ptr, o, o_s, o, o_c, 0, sin_ss, 0, VEC), VEC), mask=mask[:, None])
    sin = sin.to(tl.float32)
    return cos.to(tl.float32), -sin if BACKWARD else sin


@triton.jit
def _store(p, x1, x2, cos, sin, mask, HALF: tl.constexpr):
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    tl.store(p, (x1 * cos - x2 * sin).to(p.dtype.element_ty), mask=mask)
    tl.store(p + HALF, (x2 * cos + x1 * sin).to(p.dtype.element_ty), mask=mask)


# Sizes and strides vary with the request or the layout: specialising on them would only recompile.
@triton.jit(
    do_not_specialize=[
        "S", "n_tokens", "n_positions", "q_sb", "q_ss", "q_sh", "k_sb", "k_ss", "k_sh", "cos_ss", "sin_ss", "pos_ss",
        "pos_sc",
    ]
)  # fmt: skip
def _kernel(
    q_ptr, k_ptr, yq_ptr, yk_ptr, cos_ptr, sin_ptr, pos_ptr,
    S, n_tokens, n_positions, q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, cos_ss, sin_ss, pos_ss, pos_sc,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr, TABLE_VEC: tl.constexpr,
    BATCHED: tl.constexpr, FROM_POS: tl.constexpr, INPLACE: tl.constexpr, BACKWARD: tl.constexpr,
    PAIR: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """HK = 0: there is no k. A slot is a chunk of a lane: slot = (row * WARPS + group) * 32 + lane."""
    N: tl.constexpr = HALF // VEC  # chunks a head
    H: tl.constexpr = HQ if PAIR else HQ + HK  # heads a token, numbered in a row
    D: tl.constexpr = 2 * HALF
    slot = tl.arange(0, ROWS * WARPS * 32)
    lane, group, row = slot % 32, slot // 32 % WARPS, slot // (32 * WARPS)
    chunk = row * LANES + lane  # within its group's heads
    first = tl.program_id(0).to(tl.int64) * (WARPS * HEADS)  # head; within a program 32 bits are enough
    o_h = (first % H).to(tl.int32) + group * HEADS + chunk // N
    o_t = first // H + o_h // H  # token
    o_h, o_c = o_h % H, chunk % N
    mask = (o_t < n_tokens) & (lane < LANES) & (chunk < HEADS * N)
    if BATCHED:
        o_s = (first // H % S).to(tl.int32) + (o_t - first // H).to(tl.int32)
        o_b = (first // H // S).to(tl.int32) + o_s // S
        o_s = o_s % S
    else:
        o_s = o_t
        o_b = o_h * 0
    cos, sin = _tables(
        cos_ptr, sin_ptr, pos_ptr, o_s, o_c, n_positions, cos_ss, sin_ss, pos_ss, pos_sc, mask,
        HALF, VEC, TABLE_VEC, FROM_POS, BACKWARD,
    )  # fmt: skip
    p_q = _first(q_ptr, o_b, o_s, o_h, o_c, q_sb, q_ss, q_sh, VEC)
    y_q = p_q if INPLACE else _first(yq_ptr, o_t * 0, o_t, o_h, o_c, 0, HQ * D, D, VEC)  # outputs are contiguous
    o_k = o_h if PAIR else o_h - HQ
    p_k = _first(k_ptr, o_b, o_s, o_k, o_c, k_sb, k_ss, k_sh, VEC)
    y_k = p_k if INPLACE else _first(yk_ptr, o_t * 0, o_t, o_k, o_c, 0, HK * D, D, VEC)
    mask = mask[:, None]
    if PAIR:
        p_q, y_q, p_k, y_k = _entries(p_q, VEC), _entries(y_q, VEC), _entries(p_k, VEC), _entries(y_k, VEC)
        q1, q2 = tl.load(p_q, mask=mask), tl.load(p_q + HALF, mask=mask)
        k1, k2 = tl.load(p_k, mask=mask), tl.load(p_k + HALF, mask=mask)
        _store(y_q, q1, q2, cos, sin, mask, HALF)
        _store(y_k, k1, k2, cos, sin, mask, HALF)
    else:
        if HK > 0:
            p_q = tl.where(o_h < HQ, p_q, p_k)
            y_q = tl.where(o_h < HQ, y_q, y_k)
        p_q, y_q = _entries(p_q, VEC), _entries(y_q, VEC)
        x1, x2 = tl.load(p_q, mask=mask), tl.load(p_q + HALF, mask=mask)
        _store(y_q, x1, x2, cos, sin, mask, HALF)


INTERPRETED = not isinstance(_kernel, triton.JITFunction)


def rotary_qk(q, k, cos, sin, inplace=False, backward=False, layout=None):
    """q and k rotated by one launch, for the backward by the negative angle: new contiguous tensors, or q and k."""
    yq, yk = (q, k) if inplace else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    launch(q, k, yq, yk, cos, sin, inplace=inplace, backward=backward, layout=layout)
    return yq, yk


def rotary_qk_separate(q, k, cos, sin, inplace=False, backward=False):
    """The same by two launches, one for q and one for k."""
    out = []
    for x in (q, k):
        y = x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(x, None, y, None, cos, sin, inplace=inplace, backward=backward)
        out.append(y)
    return tuple(out)


def rotary_qk_from_pos(q, k, pos_ids, table, inplace=False, backward=False, layout=None):
    """As `rotary_qk`, cos and sin looked up: pos_ids (S, 2) int32 or int64, table float32 (2, P, D/4), contiguous."""
    yq, yk = (q, k) if inplace else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    launch(q, k, yq, yk, table[0], table[1], pos_ids, inplace=inplace, backward=backward, layout=layout)
    return yq, yk


def _strides(x):
    """(batch, token, head) strides in entries, 0 for an axis of one."""
    s = [0 if n == 1 else s for n, s in zip(x.shape, x.stride())]
    return s[:-1] if x.dim() == 4 else [0, *s[:-1]]


def _common_power(*numbers) -> int:
    """The largest power of two that divides all of them: the lowest bit of their bitwise or."""
    bits = 0
    for n in numbers:
        bits |= n
    return bits & -bits


def launch(q, k, yq, yk, cos, sin, pos=None, *, inplace, backward, layout=None):
    """One ordinary launch; k and yk None: only q. Returns (compiled kernel, programs, its arguments after the seven
    addresses) for `Prepared`, or None where nothing is to be done."""
    *batch, S, HQ, D = q.shape
    B, HK = (batch[0] if batch else 1), (0 if k is None else k.shape[-2])
    if B * S * (HQ + HK) == 0:
        return None
    if B > 1 and B * S >= 2**31:
        raise ValueError(f"q.shape={tuple(q.shape)}: fewer than 2^31 tokens in all are allowed in a batch")
    if HQ == 0:  # only k has heads: it takes q's place
        launch(k, None, yk, None, cos, sin, pos, inplace=inplace, backward=backward)
        return None
    if HK == 0:
        k, yk = q, yq
    q_s, k_s = _strides(q), _strides(k)
    places = [x.data_ptr() // x.element_size() for x in (q, k, yq, yk)]
    vec = [D // 2, 16 // q.element_size(), *q_s, *k_s, *places]
    table = [x.data_ptr() // x.element_size() for x in (cos, sin)]
    from_pos = pos is not None
    if not from_pos:
        vec = table_vec = _common_power(*vec, *table, cos.stride(0), sin.stride(0))
        n_positions, pos, pos_s = 1, cos, (0, 0)
    else:
        vec = _common_power(*vec)
        table_vec = _common_power(vec, D // 4, *table)
        n_positions, pos_s = len(cos), pos.stride()
    if layout is None:
        table_itemsize = 0 if from_pos else cos.element_size()
        layout = layout_for(D // 2, vec, q.element_size(), HQ == HK, inplace, table_itemsize, B * S)
    if layout.heads * (D // 2 // vec) > layout.rows * layout.lanes or (layout.pair and HQ != HK):
        allowed = f"room for its heads of {D // 2 // vec} chunks and, to pair, as many heads in q as in k"
        raise ValueError(f"layout={layout}: {allowed} is allowed")
    programs = triton.cdiv(B * S * (HQ if layout.pair else HQ + HK), layout.warps * layout.heads)
    sizes = (S, B * S, n_positions, *q_s, *k_s, cos.stride(0), sin.stride(0), *pos_s)
    constants = (HQ, HK, D // 2, vec, table_vec, B > 1, from_pos, inplace, backward, *layout)
    args = (*sizes, *constants)
    run = _kernel[(programs,)]
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            compiled = run(q, k, yq, yk, cos, sin, pos, *args, num_warps=layout.warps)
    else:
        compiled = run(q, k, yq, yk, cos, sin, pos, *args, num_warps=layout.warps)
    return compiled, programs, args
