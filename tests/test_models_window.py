"""Rotation and attention of windows in one launch, against the two of them."""

import pytest
import torch

import vitkit

pytest.importorskip("triton")

from vitkit.models import window_kernels as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter is wrong for dots in bfloat16
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def exact(qkv, cos, sin, offsets, scale):
    q, k, v = qkv.double().unbind(1)
    q, k = vitkit.apply_rotary_qk(q, k, cos.double(), sin.double(), impl="eager")
    out = torch.full_like(v, float("nan"))
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:]):
        parts = (x[start:end].transpose(0, 1) for x in (q, k, v))
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(*parts, scale=scale).transpose(0, 1)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(2, 80), (3, 24), (4, 64), (1, 128), (6, 72)])
def test_against_both_in_float64(heads, dim, dtype):
    torch.manual_seed(0)
    lengths = torch.tensor([0, 16, 4, 0, 64, 20, 7, 1, 0])
    offsets = lengths.cumsum(0).int().to(DEVICE)
    rows = int(offsets[-1])
    qkv = torch.randn(rows + 3, 3, heads, dim, device=DEVICE).to(dtype)
    angle = torch.rand(rows + 3, dim // 2, device=DEVICE) * 50
    cos, sin = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
    q, k, v = qkv.unbind(1)
    assert kernels.serves(q, k, v, 64)
    right = exact(qkv[:rows], cos[:rows], sin[:rows], offsets, dim**-0.5)
    for angles in ((cos, sin), (cos[:, : dim // 2].contiguous(), sin[:, : dim // 2].contiguous())):
        out = kernels.rotate_and_attend(q, k, v, *angles, offsets, 64, dim**-0.5)
        assert out.shape == v.shape and out.dtype == dtype
        error = (out[:rows].double() - right).norm() / right.norm()
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def test_what_it_does_not_serve():
    qkv = torch.randn(8, 3, 2, 80)
    q, k, v = qkv.unbind(1)
    assert not kernels.serves(q, k, v, 65)
    assert not kernels.serves(q, k.contiguous(), v, 64)
    assert not kernels.serves(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), 64)
    assert not kernels.serves(*torch.randn(8, 3, 2, 160).unbind(1), 64)
