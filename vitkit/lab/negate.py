"""The limit of rotating in place: every entry of q and k read, negated and written where it lies.

qkv (S, 3, H, D). Bytes in bf16: 2 * 2 * H * D * 2 a token, as the rotation's without its tables; but a lane needs no
second half, so accesses are 16 bytes wide at every D.
"""

import torch
import triton
import triton.language as tl

from .limits import Limit

BLOCK = 128  # lanes of a block, each 16 bytes


@triton.jit
def _negate_kernel(x_ptr, n_rows, ROW: tl.constexpr, STRIDE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """x (n_rows, >= ROW) with rows STRIDE apart; chunks of VEC are numbered row by row."""
    N: tl.constexpr = ROW // VEC
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = chunk // N, chunk % N * VEC
    p = tl.multiple_of(x_ptr + (row.to(tl.int64) * STRIDE + column), 16)[:, None] + tl.arange(0, VEC)[None, :]
    mask = (row < n_rows)[:, None]
    tl.store(p, -tl.load(p, mask=mask), mask=mask)


class InPlaceNegate(Limit):
    """Negates q and k in the next of `n_sets` tensors (S, 3, H, D) of its own, rows of whole 16 bytes; v stays."""

    def __init__(self, shape, dtype, n_sets: int, device):
        S, _, H, D = shape
        self.vec = 16 // dtype.itemsize
        if H * D % self.vec:
            raise ValueError(f"shape={tuple(shape)}, {dtype}: H * D that is a multiple of {self.vec} is allowed")
        self.rows, self.row, self.stride, self.next = S, 2 * H * D, 3 * H * D, 0
        self.bytes = 2 * S * self.row * dtype.itemsize
        self.sets = [torch.randn(shape, device=device).to(dtype) for _ in range(n_sets)]
        self.before = self.sets[0].clone()

    def __call__(self, *_):
        x = self.sets[self.next]
        self.next = (self.next + 1) % len(self.sets)
        grid = (triton.cdiv(self.rows * (self.row // self.vec), BLOCK),)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _negate_kernel[grid](x, self.rows, self.row, self.stride, self.vec, BLOCK, num_warps=BLOCK // 32)
        return x

    def check(self, x) -> bool:
        """Of the first call: q and k negated, v as it was."""
        return torch.equal(x[:, :2], -self.before[:, :2]) and torch.equal(x[:, 2], self.before[:, 2])
