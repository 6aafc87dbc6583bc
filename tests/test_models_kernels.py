"""The launches between a tower's matrix products against torch, in float64."""

import pytest
import torch

pytest.importorskip("triton")

from vitkit.models import triton_kernels as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Triton's interpreter truncates to bfloat16 where a GPU rounds: one step of the dtype there, half a one on a GPU.
STEP = 0.51 if DEVICE == "cuda" else 1.01


def random(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def close(mine, exact, dtype, steps=1.0):
    assert mine.dtype == dtype and mine.shape == exact.shape
    allowed = steps * STEP * torch.finfo(dtype).eps * exact.abs() + 4e-6 * exact.abs().max()
    assert ((mine.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("columns", [64, 1280, 80])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype, centred, columns):
    torch.manual_seed(0)
    x, residual = random(7, columns, dtype=dtype), random(7, columns, dtype=dtype, scale=3)
    weight, bias = random(columns, dtype=dtype), random(columns, dtype=dtype)

    def exact(x):
        x = x.double()
        if centred:
            return torch.nn.functional.layer_norm(x, (columns,), weight.double(), bias.double(), 1e-6)
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
        return weight.double() * normed.double()

    out = kernels.norm(x, weight, bias if centred else None, 1e-6)
    close(out, exact(x), dtype, 1 if centred else 3)  # an RMS norm is rounded twice, as in the models
    total, out = kernels.norm(x, weight, bias if centred else None, 1e-6, residual)
    close(total, x.double() + residual.double(), dtype)
    close(out, exact(total), dtype, 1 if centred else 3)


@pytest.mark.parametrize("width", [8, 104, 1027])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype, width):
    torch.manual_seed(0)
    x = random(5, 2 * width, dtype=dtype, scale=4)
    gate, up = x.double().chunk(2, dim=1)
    close(kernels.swiglu(x), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quick_gelu(dtype):
    torch.manual_seed(0)
    x = random(5, 1027, dtype=dtype, scale=4)
    exact = x.double() * torch.sigmoid(1.702 * x.double())
    out = kernels.quick_gelu_(x)
    assert out is x
    close(x, exact, dtype)


@pytest.mark.gpu
def test_offsets_beyond_int32():
    n = 2**31 // 1280 + 5
    x = torch.zeros(n, 1280, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    out = kernels.norm(x, torch.ones(1280, dtype=torch.bfloat16, device="cuda"), None, 1e-6)
    assert bool((out[-1] == 1).all()) and not bool(out[-2].any())
    n = 2**31 // 2048 + 5
    x = torch.zeros(n, 2048, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    assert abs(float(kernels.swiglu(x)[-1, -1]) - 0.7311) < 3e-3
    assert abs(float(kernels.quick_gelu_(x)[-1, -1]) - 0.8455) < 4e-3
