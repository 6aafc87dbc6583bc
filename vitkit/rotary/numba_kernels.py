"""q and k rotated in one parallel pass over the tokens, on the CPU.

Layout: q and k are (S, H, D) or (B, S, H, D) with a unit stride on the last axis and any others; cos and sin are
(S, D/2), or (S, D) of which the first half is read. Element d of a head is paired with element d + D/2:

    out[d]       = q[d] * cos[d]       + (-q[d + D/2]) * sin[d]
    out[d + D/2] = q[d + D/2] * cos[d] +   q[d]        * sin[d]

in float32, each product and each sum rounded by itself (no FMA), and once more to the dtype of q: to the bit what the
eager form computes. bf16 and fp16 travel as 16-bit integers, since numba has no fp16 on the CPU.

The threads are a plain pool and not numba's: its layers are not safe with concurrent callers or after a fork.
"""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numba import njit

from .._numba import global_compiler_lock
from .numba_heads import BFLOAT16, FLOAT32, KINDS, prefetch, rotate_head, widen

# A thread for each of these many bytes read and written; with less, handing them over costs more than it saves.
_THREAD_BYTES = 1 << 20
# Chunks a thread: more than one, so that a thread whose core is busy elsewhere is not waited for.
_CHUNKS_PER_THREAD = 4
# Tokens that are prefetched ahead: of 1 to 16, two and more are alike (bf16, a packed qkv in place: 12.8 ms to 8.2).
_AHEAD = 2
# Outputs from two huge pages on ask for huge pages.
_HUGE_BYTES = 4 << 20


# ---- the pass over the tokens -----------------------------------------------------------------------------------


def _compile(kind, fp16):
    """The pass for one kind of q and k and one way to read fp16 tables: rows [start, stop) of the B * S."""

    @njit("void(int64[::1], int64, int64)", nogil=True)
    def rotate_rows(arguments, start, stop):
        tokens, half, table = arguments[0], arguments[1], arguments[2]
        cos, cos_stride, sin, sin_stride = arguments[3], arguments[4], arguments[5], arguments[6]
        head = 2 * half * (4 if kind == FLOAT32 else 2)  # bytes
        scratch = np.empty(2 * half, np.float32)
        wide = np.int64(scratch.ctypes.data)
        for row in range(start, stop):
            i_batch = row // tokens
            i_token = row - i_batch * tokens
            c, s = cos + i_token * cos_stride, sin + i_token * sin_stride
            if table != FLOAT32:
                # 2 * D/2 values converted once, and read again from the L1 cache for every head of q and of k.
                if table == BFLOAT16:
                    widen(BFLOAT16, half, c, wide)
                    widen(BFLOAT16, half, s, wide + 4 * half)
                else:
                    widen(fp16, half, c, wide)
                    widen(fp16, half, s, wide + 4 * half)
                c, s = wide, wide + 4 * half
            for i_tensor in range(2):
                a = arguments[7 + 9 * i_tensor :]
                x = a[1] + i_batch * a[2] + i_token * a[3]
                out = a[5] + i_batch * a[6] + i_token * a[7]
                # Where tokens leave a gap, as v does in a packed qkv, the CPU's own prefetcher stops at each of them.
                ahead = _AHEAD * a[3] if a[3] != a[0] * head else 0
                for _ in range(a[0]):
                    if ahead:
                        for line in range(0, head, 64):
                            prefetch(x + ahead + line)
                    rotate_head(kind, half, x, out, c, s)
                    x += a[4]
                    out += a[8]

    return rotate_rows


def _addresses(x, out):
    """H; then address and (B, S, H) strides in bytes, of x and of its output: what `rotate_rows` reads as `a`."""
    fields = [x.shape[-2]]
    for tensor in (x, out):
        strides = [tensor.element_size() * stride for stride in tensor.stride()[:-1]]
        fields += [tensor.data_ptr(), *([0] if tensor.dim() == 3 else []), *strides]
    return fields


# ---- threads ----------------------------------------------------------------------------------------------------

_kernels = {}
_pool = None


def _after_fork():
    """The child has none of its parent's threads: it makes its own when it needs them."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _kernel(kind, fp16):
    key = kind, fp16
    if key not in _kernels:
        with global_compiler_lock:  # numba's, which a fork waits for: see _numba
            if key not in _kernels:
                _kernels[key] = _compile(kind, fp16)
    return _kernels[key]


def _get_pool():
    global _pool
    if _pool is None:
        with global_compiler_lock:
            if _pool is None:
                _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="vitkit-rotary")
    return _pool


def _work(kernel, arguments, chunks, tensors):
    """Take chunks until none is left. `tensors` keeps the memory behind the addresses alive while this runs."""
    for start, stop in chunks:
        kernel(arguments, start, stop)


def _run(kernel, arguments, rows, n_bytes, tensors):
    """Share out the rows. The caller takes chunks too, so it never waits for a thread that has not begun."""
    threads = max(1, min(torch.get_num_threads(), n_bytes // _THREAD_BYTES, rows))
    n = 1 if threads == 1 else min(threads * _CHUNKS_PER_THREAD, rows)
    chunks = iter([(rows * i // n, rows * (i + 1) // n) for i in range(n)])  # a list's iterator: atomic under the GIL
    helpers = []
    try:
        for _ in range(threads - 1):
            helpers.append(_get_pool().submit(_work, kernel, arguments, chunks, tensors))
    except RuntimeError:  # the interpreter is shutting down and starts no thread: the caller does it all
        pass
    _work(kernel, arguments, chunks, tensors)
    for helper in helpers:
        if not helper.cancel():
            helper.result()


# ---- public -----------------------------------------------------------------------------------------------------


@lru_cache(None)
def _madvise():
    """libc's madvise where there are huge pages to ask for, else None."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def empty_like(x):
    """A new contiguous tensor, on huge pages if it is large: a fault every 4 KiB costs more than the whole rotation."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_bytes = out.numel() * out.element_size()
    if n_bytes >= _HUGE_BYTES and _madvise() is not None:
        start = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (out.data_ptr() + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(start, stop - start, mmap.MADV_HUGEPAGE)  # advice only: a refusal changes nothing
    return out


def rotary_qk(q, k, cos, sin, inplace, backward=False):
    """Rotate q and k; the inputs are as `vitkit.rotary` has checked them, and no gradient is recorded.

    q (S, Hq, D) or (B, S, Hq, D), k likewise with its own H, both float32, bfloat16 or float16; cos, sin (S, D/2) or
    (S, D), of any of the three. Returns q and k themselves in place, else new contiguous tensors.
    """
    sin = -sin if backward else sin
    q_out, k_out = (q, k) if inplace else (empty_like(q), empty_like(k))
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    tokens, half, size = q.shape[-3], q.shape[-1] // 2, cos.element_size()
    table = [cos.data_ptr(), size * cos.stride(0), sin.data_ptr(), size * sin.stride(0)]
    arguments = [tokens, half, KINDS[cos.dtype], *table, *_addresses(q, q_out), *_addresses(k, k_out)]
    rows = q.shape[0] * tokens if q.dim() == 4 else tokens
    n_bytes = 2 * (q.numel() + k.numel()) * q.element_size()
    kernel = _kernel(KINDS[q.dtype], KINDS[torch.float16])
    _run(kernel, np.array(arguments, np.int64), rows, n_bytes, (q, k, cos, sin, q_out, k_out))
    return q_out, k_out
