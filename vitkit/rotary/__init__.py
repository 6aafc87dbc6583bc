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
from . import eager

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _way(module, function="rotary_qk"):
    """An implementation that imports its module, and so numba or triton, when it is first called."""

    def call(q, k, cos, sin, inplace):
        return getattr(import_module(f"{__name__}.{module}"), function)(q, k, cos, sin, inplace)

    return call


# Every entry takes (q, k, cos, sin, inplace), already checked, and returns (q, k).
IMPLEMENTATIONS = {
    "eager": eager.rotary_qk,
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
    if not isinstance(geometry, Geometry):
        raise ValueError(f"geometry={geometry!r}: a vitkit.Geometry is allowed")
    if not isinstance(pos_ids, torch.Tensor) or pos_ids.dtype not in integers:
        raise ValueError(f"pos_ids={_about(pos_ids)}: an integer tensor (N, 2) is allowed")
    if pos_ids.dim() != 2 or pos_ids.shape[1] != 2:
        raise ValueError(f"pos_ids.shape={tuple(pos_ids.shape)}: (N, 2) is allowed")
    n = geometry.head_dim // 4
    exponent = torch.arange(n, dtype=torch.float64, device=pos_ids.device) / n
    angles = (pos_ids.unsqueeze(-1) * geometry.rope_theta**-exponent).flatten(1).contiguous()
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
    impl = _choose(impl, q, k, cos, sin)
    if cos.dtype != sin.dtype or (cos.dtype == torch.float64 and q.dtype != torch.float64):
        wide = torch.promote_types(q.dtype, torch.float32)  # the dtype of the arithmetic
        cos, sin = cos.to(wide), sin.to(wide)
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    out = IMPLEMENTATIONS[impl](q, k, cos, sin, inplace)
    if inplace and impl != "eager":  # autograd then notices a write to what it had saved
        for x in (q, k):
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
    return out


def apply_rotary_qkv_(qkv, cos, sin, *, impl="auto") -> torch.Tensor:
    """q and k rotated in place in a packed (S, 3, H, D); v is not touched. Returns qkv. Else as `apply_rotary_qk`."""
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv={_about(qkv)}: a tensor (S, 3, H, D) is allowed")
    if qkv.dtype not in DTYPES or qkv.shape[3] % 2 or qkv.stride(3) != 1:
        allowed = "a floating dtype, an even D and a contiguous last axis are allowed"
        raise ValueError(f"qkv={_about(qkv)} with stride()={qkv.stride()}: {allowed}")
    apply_rotary_qk(qkv[:, 0], qkv[:, 1], cos, sin, inplace=True, impl=impl)
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
    for name, x in (("cos", cos), ("sin", sin)):
        if tuple(x.shape) not in ((S, D // 2), (S, D)):
            raise ValueError(f"{name}.shape={tuple(x.shape)}: ({S}, {D // 2}) or ({S}, {D}) is allowed")
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace={inplace!r}: True or False is allowed")
    if inplace and q.numel() + k.numel():
        _check_inplace(q, k, cos, sin)


def _check_inplace(q, k, cos, sin):
    """Refuses what could be half written, or written twice: before anything is."""
    for name, x in (("q", q), ("k", k)):
        if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
            raise ValueError(f"{name} is a leaf that requires grad: with inplace=True it is not allowed to be")
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} is an inference tensor: with inplace=True only in inference mode allowed")
        extent = 1
        for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1):
            if stride < extent:
                raise ValueError(f"{name}.stride()={x.stride()} with inplace=True: entries of their own are allowed")
            extent += (n - 1) * stride
    if _meet(q, k) and not _interleaved(q, k):
        raise ValueError("q and k share memory: with inplace=True only apart, or as parts of a packed qkv allowed")
    for name, x in (("cos", cos), ("sin", sin)):
        if _meet(x, q) or _meet(x, k):
            raise ValueError(f"{name} shares memory with q or k: with inplace=True it is not allowed to")


def _extent(x, below=None) -> int:
    """Entries from the first to the last, counting only axes whose stride is smaller than `below`."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()) if below is None or s < below)


def _meet(x, y) -> bool:
    """Whether the ranges of memory from first to last entry meet. (A tensor without memory, as on meta, has none.)"""
    if x.device.type not in ("cpu", "cuda") or type(x) is not type(y) or not x.numel() or not y.numel():
        return False
    start_x, start_y = x.data_ptr(), y.data_ptr()
    return start_x < start_y + _extent(y) * y.element_size() and start_y < start_x + _extent(x) * x.element_size()


def _interleaved(q, k) -> bool:
    """Whether q and k repeat with one stride s and keep to parts of it of their own, as in a packed qkv."""
    if q.stride() != k.stride():
        return False
    apart = (k.data_ptr() - q.data_ptr()) // q.element_size()
    for s in q.stride():
        if s > 1 and all(t % s == 0 for t in q.stride() if t > s):
            place = apart % s
            if place >= _extent(q, s) and place + _extent(k, s) <= s:
                return True
    return False


def _choose(impl, q, k, cos, sin) -> str:
    if type(impl) is not str or (impl != "auto" and impl not in IMPLEMENTATIONS):
        raise ValueError(f"impl={impl!r}: {', '.join(map(repr, [*IMPLEMENTATIONS, 'auto']))} are allowed")
    if impl == "eager" or (impl == "auto" and torch.compiler.is_compiling()):  # torch.compile fuses what it traces
        return "eager"
    fast = "numba" if q.device.type == "cpu" else "triton"
    reason = _refusal(fast if impl == "auto" else impl, (q, k, cos, sin))
    if impl == "auto":
        return "eager" if reason else fast
    if reason:
        raise ValueError(f"impl={impl!r}: {reason}")
    return impl


def _refusal(impl, tensors):
    """Why a named implementation other than eager cannot serve the call, and what would; None if it can."""
    package, device = "numba" if impl == "numba" else "triton", tensors[0].device.type
    if not find_spec(package):
        return f"{package} is not installed; 'eager' or 'auto' would serve"
    if tensors[0].dtype == torch.float64:
        return "float64 is served by 'eager' alone"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "an input requires grad, which 'eager' alone serves ('auto' takes it)"
    if impl == "numba" and device != "cpu":
        return f"q lies on {device}, and numba serves the CPU; 'eager' or 'auto' would serve"
    if package == "triton" and device != "cuda" and not (device == "cpu" and _interpreted()):
        return f"q lies on {device}, and triton serves GPUs; 'eager' or 'auto' would serve"
    if not all(_is_plain(x) for x in tensors) or torch._C._len_torch_dispatch_stack() or _transformed():
        return "an input is no plain tensor with memory of its own, or is being traced; 'eager' would serve"
    return None


def _interpreted() -> bool:
    return import_module(f"{__name__}.triton_kernels").INTERPRETED


def _is_plain(x) -> bool:
    """Memory that can be read by address: no subclass (fake, distributed, ...), no lazy negation, no implied zeros."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_neg() and not x._is_zerotensor()


def _transformed() -> bool:
    """Whether vmap, grad or forward-mode differentiation looks on."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
