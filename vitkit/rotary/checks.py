"""What a call may look like. A refusal names the argument, its value and what is allowed, before anything is done."""

from importlib import import_module
from importlib.util import find_spec
from numbers import Integral

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
INTEGER_NAMES = "int64, int32, int16, uint8 or int8"


def about(x) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def check_call(q, k, cos, sin, inplace):
    """The arguments of `apply_rotary_qk`."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        _check_floating(name, x)
        _check_device(name, x, q)
    _check_qk(q, k, inplace)
    S, D = q.shape[-3], q.shape[-1]
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dim() != 2 or x.shape[0] != S or x.shape[1] not in (D // 2, D):
            raise ValueError(f"{name}.shape={tuple(x.shape)}: ({S}, {D // 2}) or ({S}, {D}) is allowed")
    if inplace and q.numel() + k.numel():
        check_inplace(q, k, cos=cos, sin=sin)


def check_call_from_pos(q, k, pos_ids, table, inplace, max_position):
    """The arguments of `apply_rotary_qk_from_pos`."""
    for name, x in (("q", q), ("k", k)):
        _check_floating(name, x)
        _check_device(name, x, q)
    if not _is_strided(pos_ids) or pos_ids.dtype not in INTEGERS:
        raise ValueError(f"pos_ids={about(pos_ids)}: a tensor (S, 2) of {INTEGER_NAMES} is allowed")
    if not _is_strided(table) or table.dtype != torch.float32:
        raise ValueError(f"table={about(table)}: a float32 tensor (2, positions, D/4) is allowed")
    for name, x in (("pos_ids", pos_ids), ("table", table)):
        _check_device(name, x, q)
    _check_qk(q, k, inplace)
    S, D = q.shape[-3], q.shape[-1]
    if D % 4:
        raise ValueError(f"q.shape={tuple(q.shape)}: a last axis (head_dim) that is a multiple of 4 is allowed")
    if tuple(pos_ids.shape) != (S, 2):
        raise ValueError(f"pos_ids.shape={tuple(pos_ids.shape)}: ({S}, 2) is allowed")
    if table.dim() != 3 or table.shape[0] != 2 or table.shape[1] < 1 or table.shape[2] != D // 4:
        raise ValueError(f"table.shape={tuple(table.shape)}: (2, positions, {D // 4}) is allowed")
    if table.numel() >= 2**31:
        raise ValueError(f"table.shape={tuple(table.shape)}: fewer than 2^31 entries are allowed")
    if max_position is not None:
        if isinstance(max_position, bool) or not isinstance(max_position, Integral):
            raise ValueError(f"max_position={max_position!r}: an integer or None is allowed")
        if not 0 <= max_position < table.shape[1]:
            raise ValueError(f"max_position={max_position}: 0 to {table.shape[1] - 1}, the table's last, are allowed")
    if inplace and q.numel() + k.numel():
        check_inplace(q, k, pos_ids=pos_ids, table=table)


def _is_strided(x) -> bool:
    """A tensor with strides: neither sparse nor nested."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested


def check_packed(qkv):
    if not _is_strided(qkv) or qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv={about(qkv)}: a tensor (S, 3, H, D) is allowed")
    if qkv.dtype not in DTYPES or qkv.shape[3] % 2 or qkv.stride(3) != 1:
        allowed = "a floating dtype, an even D and a contiguous last axis are allowed"
        raise ValueError(f"qkv={about(qkv)} with stride()={qkv.stride()}: {allowed}")
    _check_recorded("qkv", qkv)


def _check_recorded(name, x):
    """Refuses to write what autograd would refuse after it has been written."""
    if not (torch.is_grad_enabled() and x.requires_grad) or torch.compiler.is_compiling():
        return
    if x.is_leaf or (x._is_view() and x._base.is_leaf and x._base.requires_grad):
        raise ValueError(f"{name} is a leaf that requires grad, or a view of one: in place it is not allowed to be")
    if x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        raise ValueError(f"{name} is a view that autograd lets nobody write, such as one of unbind: a slice is allowed")


def _check_floating(name, x):
    if not _is_strided(x) or x.dtype not in DTYPES:
        raise ValueError(f"{name}={about(x)}: a tensor of float32, bfloat16, float16 or float64 is allowed")


def _check_device(name, x, q):
    if x.device != q.device:
        raise ValueError(f"{name} lies on {x.device}, q on {q.device}: one device is allowed")


def _check_qk(q, k, inplace):
    if q.dim() not in (3, 4):
        raise ValueError(f"q.shape={tuple(q.shape)}: (S, H, D) or (B, S, H, D) is allowed")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k.shape={tuple(k.shape)}: that of q, {tuple(q.shape)}, is allowed; only heads may differ")
    if k.dtype != q.dtype:
        raise ValueError(f"k.dtype={k.dtype}: that of q, {q.dtype}, is allowed")
    D = q.shape[-1]
    if D < 2 or D % 2:
        raise ValueError(f"q.shape={tuple(q.shape)}: a last axis (head_dim) that is even and at least 2 is allowed")
    for name, x in (("q", q), ("k", k)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name}.stride()={x.stride()}: a contiguous last axis (stride 1) is allowed")
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace={inplace!r}: True or False is allowed")


def check_inplace(q, k, **tables):
    """Refuses what could be half written, or written twice: before anything is."""
    if torch.compiler.is_compiling():  # no addresses yet; the op checks them when it runs
        return
    for name, x in (("q", q), ("k", k)):
        _check_recorded(name, x)
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} is an inference tensor: with inplace=True only in inference mode allowed")
        extent = 1
        for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1 and x.numel()):
            if stride < extent:
                raise ValueError(f"{name}.stride()={x.stride()} with inplace=True: entries of their own are allowed")
            extent += (n - 1) * stride
    if _meet(q, k) and not _interleaved(q, k):
        raise ValueError("q and k share memory: with inplace=True only apart, or as parts of a packed qkv allowed")
    for name, x in tables.items():
        if _meet(x, q) or _meet(x, k):
            raise ValueError(f"{name} shares memory with q or k: with inplace=True it is not allowed to")


def _has_memory(x) -> bool:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type in ("cpu", "cuda")
    return plain and x.numel() > 0 and not x._is_zerotensor()


def extent(x, below=None) -> int:
    """Entries from the first to the last, counting only axes whose stride is smaller than `below`."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()) if below is None or s < below)


def _meet(x, y) -> bool:
    """Whether the ranges of memory from first to last entry meet. (A tensor without memory, as on meta, has none.)"""
    if traced() or not (_has_memory(x) and _has_memory(y)):
        return False
    start_x, start_y = x.data_ptr(), y.data_ptr()
    return start_x < start_y + extent(y) * y.element_size() and start_y < start_x + extent(x) * x.element_size()


def _interleaved(q, k) -> bool:
    """Whether q and k repeat with one stride s and keep to parts of it of their own, as in a packed qkv."""
    if q.stride() != k.stride():
        return False
    apart = (k.data_ptr() - q.data_ptr()) // q.element_size()
    for s in q.stride():
        if s > 1 and all(t % s == 0 for t in q.stride() if t > s):
            place = apart % s
            if place >= extent(q, s) and place + extent(k, s) <= s:
                return True
    return False


def check_impl(impl, implementations):
    if type(impl) is not str or (impl != "auto" and impl not in implementations):
        raise ValueError(f"impl={impl!r}: {', '.join(map(repr, [*implementations, 'auto']))} are allowed")


def choose(impl, implementations, q, k, tables) -> str:
    """The implementation that serves the call; ValueError where the named one cannot, saying what would."""
    check_impl(impl, implementations)
    if impl == "eager" or (impl == "auto" and torch.compiler.is_compiling()):  # what no operator serves is traced
        return "eager"
    fast = "numba" if q.device.type == "cpu" else "triton"
    reason = _refusal(fast if impl == "auto" else impl, (q, k, *tables), tables)
    if impl == "auto":
        return "eager" if reason else fast
    if reason:
        raise ValueError(f"impl={impl!r}: {reason}")
    return impl


def _refusal(impl, tensors, tables):
    """Why a named implementation other than eager cannot serve the call, and what would; None if it can."""
    package, device = "numba" if impl == "numba" else "triton", tensors[0].device.type
    if not find_spec(package):
        return f"{package} is not installed; 'eager' or 'auto' would serve"
    if tensors[0].dtype == torch.float64:
        return "float64 is served by 'eager' alone"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tables):
        return "a table requires grad, which 'eager' alone serves ('auto' takes it)"
    if impl == "numba" and device != "cpu":
        return f"q lies on {device}, and numba serves the CPU; 'eager' or 'auto' would serve"
    if package == "triton" and device != "cuda" and not (device == "cpu" and interpreted()):
        return f"q lies on {device}, and triton serves GPUs; 'eager' or 'auto' would serve"
    if not all(map(is_plain, tensors)) or traced():
        return "an input is no plain tensor with memory of its own, or is being traced; 'eager' would serve"
    return None


def interpreted() -> bool:
    return import_module("vitkit.rotary.triton_kernels").INTERPRETED


def is_plain(x) -> bool:
    """Memory that can be read by address: no subclass (fake, distributed, ...), no lazy negation, no implied zeros."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_neg() and not x._is_zerotensor()


def traced() -> bool:
    """Whether a dispatch mode, vmap, grad, forward-mode differentiation or torch.jit.trace looks on."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._get_tracing_state() is not None or torch.autograd.forward_ad._current_level >= 0


def transformed() -> bool:
    """`traced` for torch.compile, which calls this while it traces and takes the answer for a constant."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


transformed._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which imports half of torch
