"""Rotating q and k by their patch's position: `rotary_cos_sin`, `apply_rotary_qk`, `apply_rotary_qkv_`.

Rotate-half pairing: entry i of a head is paired with entry i + D/2. With x1, x2 the two halves,

    out1 = x1 * cos - x2 * sin
    out2 = x2 * cos + x1 * sin

What cannot be avoided is to read and to write q and k once: 4 * S * H * D entries. Ways: `eager` (plain torch),
`triton_separate` (a launch for q, one for k), `triton` (one launch for both), `numba` (one parallel pass on the CPU).
"""

from importlib import import_module
from importlib.util import find_spec

import torch

from ..geometry import Geometry

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _way(module, function="rotary_qk"):
    """An implementation that imports its module, and so numba or triton, when it is first called."""

    def call(q, k, cos, sin, inplace):
        return getattr(import_module(f"{__name__}.{module}"), function)(q, k, cos, sin, inplace)

    return call


# Every entry takes (q, k, cos, sin, inplace), already checked, and returns (q, k).
IMPLEMENTATIONS = {
    "eager": _way("eager"),
    "triton_separate": _way("triton_kernels", "rotary_qk_separate"),
    "triton": _way("triton_kernels"),
    "numba": _way("numba_kernels"),
}


def rotary_cos_sin(pos_ids: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every patch's angles: two float32 (N, head_dim/2) on the device of pos_ids.

    pos_ids: integers (N, 2), row and column. The first quarter of a head turns by row * f, the second by column * f,
    with f_i = rope_theta^(-2i / (head_dim/2)) (Su et al., RoFormer, applied once an axis). Angles in float64,
    rounded once at the end. ValueError if pos_ids has another shape or dtype.
    """
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    if not isinstance(pos_ids, torch.Tensor) or pos_ids.dtype not in integers:
        raise ValueError(f"pos_ids={_about(pos_ids)}: an integer tensor (N, 2) is allowed")
    if pos_ids.dim() != 2 or pos_ids.shape[1] != 2:
        raise ValueError(f"pos_ids.shape={tuple(pos_ids.shape)}: (N, 2) is allowed")
    n = geometry.head_dim // 4
    exponent = torch.arange(n, dtype=torch.float64, device=pos_ids.device) / n
    angles = (pos_ids.unsqueeze(-1) * geometry.rope_theta**-exponent).flatten(1)
    return angles.cos().float(), angles.sin().float()


def apply_rotary_qk(q, k, cos, sin, *, inplace=False, impl="auto") -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated: (S, H, D) or (B, S, H, D) each, with cos and sin shared over B.

    q, k: float32, bfloat16 or float16 with fp32 arithmetic and one rounding (float64: `eager` alone); any strides
    with a contiguous last axis; the number of heads may differ. cos, sin: (S, D/2), or (S, D), of which the first
    half is read; any floating dtype. Returns new contiguous tensors, or q and k themselves with inplace=True.
    impl: a key of IMPLEMENTATIONS, or "auto": numba on the CPU, triton on a GPU, eager where neither serves the call
    (float64, gradients). ValueError names an argument that is not allowed, before anything is computed.
    """
    _check(q, k, cos, sin, inplace)
    rotate = _choose(impl, q, k, cos, sin)
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if torch.float64 in (cos.dtype, sin.dtype) and q.dtype != torch.float64:  # the arithmetic is fp32
        cos, sin = cos.float(), sin.float()
    return rotate(q, k, cos, sin, inplace)


def apply_rotary_qkv_(qkv, cos, sin, *, impl="auto") -> torch.Tensor:
    """q and k rotated in place in a packed (S, 3, H, D); v is not touched. Returns qkv. Else as `apply_rotary_qk`."""
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv={_about(qkv)}: a tensor (S, 3, H, D) is allowed")
    q, k, _ = qkv.unbind(1)
    apply_rotary_qk(q, k, cos, sin, inplace=True, impl=impl)
    return qkv


def _about(x) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def _check(q, k, cos, sin, inplace):
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
            raise ValueError(f"{name}={_about(x)}: a tensor of float32, bfloat16, float16 or float64 is allowed")
        if x.device != q.device:
            raise ValueError(f"{name} lies on {x.device}, q on {q.device}: one device is allowed")
    if q.dim() not in (3, 4):
        raise ValueError(f"q.shape={tuple(q.shape)}: (S, H, D) or (B, S, H, D) is allowed")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k.shape={tuple(k.shape)}: that of q, {tuple(q.shape)}, is allowed; only heads may differ")
    if k.dtype != q.dtype:
        raise ValueError(f"k.dtype={k.dtype}: that of q, {q.dtype}, is allowed")
    S, D = q.shape[-3], q.shape[-1]
    if D < 2 or D % 2:
        raise ValueError(f"q.shape={tuple(q.shape)}: a last axis (head_dim) that is even and at least 2 is allowed")
    for name, x in (("q", q), ("k", k)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name}.stride()={x.stride()}: a contiguous last axis (stride 1) is allowed")
        if inplace and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride())):
            raise ValueError(f"{name}.stride()={x.stride()} with inplace=True: no expanded axis is allowed")
    for name, x in (("cos", cos), ("sin", sin)):
        if tuple(x.shape) not in ((S, D // 2), (S, D)):
            raise ValueError(f"{name}.shape={tuple(x.shape)}: ({S}, {D // 2}) or ({S}, {D}) is allowed")
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace={inplace!r}: True or False is allowed")


def _choose(impl, q, k, cos, sin):
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: {', '.join(map(repr, [*IMPLEMENTATIONS, 'auto']))} are allowed")
    fast = "numba" if q.device.type == "cpu" else "triton"
    reason = None if impl == "eager" else _refusal(fast if impl == "auto" else impl, q, (q, k, cos, sin))
    if impl == "auto":
        impl = "eager" if reason else fast
    elif reason:
        raise ValueError(f"impl={impl!r}: {reason}")
    return IMPLEMENTATIONS[impl]


def _refusal(impl, q, tensors):
    """Why a named implementation other than eager cannot serve the call, and what would; None if it can."""
    package = "numba" if impl == "numba" else "triton"
    if not find_spec(package):
        return f"{package} is not installed; 'eager' or 'auto' would serve"
    if q.dtype == torch.float64:
        return "float64 is served by 'eager' alone"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "an input requires grad, which 'eager' alone serves ('auto' takes it)"
    if impl == "numba" and q.device.type != "cpu":
        return f"q lies on {q.device}, and numba serves the CPU; 'triton', 'eager' or 'auto' would serve"
    if package == "triton" and q.device.type == "cpu" and not import_module(f"{__name__}.triton_kernels").INTERPRETED:
        return "q lies on the CPU, and triton serves GPUs; 'numba', 'eager' or 'auto' would serve"
    return None
