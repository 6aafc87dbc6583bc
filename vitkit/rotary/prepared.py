"""The launch of a call seen before: no checks, no argument list rebuilt, nothing specialised anew.

A call is known by the shapes, strides, dtypes and devices of its tensors; what may differ from one such call to the
next is looked at every time: addresses (all on 16 bytes, as when it was prepared; in place also where they lie to each
other), the current device, and whether anything records or traces. A call that differs takes the checked, ordinary way.
Triton's launch hooks, which its own profiler uses, see the ordinary launches alone.
"""

import copy

import torch

from . import checks

MAX_PLANS = 256  # then the oldest goes; a plan is a few kB on the host
TRITON = ("3.6.", "3.7.")  # whose launchers take these arguments; another version always launches the ordinary way

PACKED = "packed"  # instead of True for in place
_plans = {}


def rotate(q, k, a, b, inplace, from_pos, max_position=None):
    """(q, k) rotated by a prepared launch, or None where there is none for this call.

    a, b: cos and sin, or pos_ids and table if from_pos, whose last position max_position may not exceed.
    """
    if not (type(q) is type(k) is type(a) is type(b) is torch.Tensor and q.is_cuda) or checks.traced():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or a.requires_grad or b.requires_grad):
        return None
    try:
        plan = _plans.get(_key(q, k, a, b, inplace, from_pos))
    except RuntimeError:  # no strides: a sparse or nested tensor, which the checks refuse
        return None
    if plan is None or not (max_position is None or (type(max_position) is int and 0 <= max_position < b.shape[1])):
        return None
    if q.is_neg() or k.is_neg() or a.is_neg() or b.is_neg():  # memory holds the negative
        return None
    return plan(q, k, a, b)


def rotate_packed(qkv, a, b, from_pos, max_position=None):
    """Whether the q and k of a packed (S, 3, H, D) have been rotated in place by a prepared launch."""
    return rotate(qkv, qkv, a, b, PACKED, from_pos, max_position) is not None


def prepare(q, k, yq, yk, a, b, inplace, from_pos, launched):
    """Keeps `launched`, what `triton_kernels.launch` returned for this call, for the calls that look like it."""
    import triton

    addresses = [x.data_ptr() for x in (q, k, yq, yk, a, b)]
    plain = q.is_cuda and all(type(x) is torch.Tensor for x in (q, k, a, b))
    # The interpreter, or a hook of Triton's, may have launched without a compiled kernel.
    if (
        launched is None
        or launched[0] is None
        or not plain
        or any(p % 16 for p in addresses)
        or not triton.__version__.startswith(TRITON)
    ):
        return
    _keep(_key(q, k, a, b, inplace, from_pos), _Plan(q, k, a, b, inplace, from_pos, launched))


def prepare_packed(qkv, a, b, from_pos):
    """Lets the plan that a call in place on qkv[:, 0] and qkv[:, 1] has left serve qkv without these views."""
    if not (type(qkv) is torch.Tensor and qkv.is_cuda):
        return
    plan = _plans.get(_key(qkv[:, 0], qkv[:, 1], a, b, True, from_pos))
    if plan and plan.apart == qkv.stride(1) * qkv.element_size():  # not that of some other q and k with such strides
        plan = copy.copy(plan)
        plan.packed = True
        _keep(_key(qkv, qkv, a, b, PACKED, from_pos), plan)


def _keep(key, plan):
    if key not in _plans:
        for oldest in list(_plans)[: max(0, len(_plans) - MAX_PLANS + 1)]:
            _plans.pop(oldest, None)
    _plans[key] = plan


def _key(q, k, a, b, inplace, from_pos):
    return (
        q.shape, q.stride(), k.shape, k.stride(), a.shape, a.stride(), b.shape, b.stride(), q.dtype, k.dtype, a.dtype,
        b.dtype, q.device, k.device, a.device, b.device, inplace, from_pos,
    )  # fmt: skip


class _Plan:
    def __init__(self, q, k, a, b, inplace, from_pos, launched):
        self.compiled, self.programs, self.args = launched  # kept, and with it the function that it has loaded
        self.run, self.function = self.compiled.run, self.compiled.function
        self.metadata = self.compiled.packed_metadata
        self.index = q.device.index
        self.current_device, self.current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        self.inplace, self.apart, self.packed = inplace, k.data_ptr() - q.data_ptr(), False
        self.table = b.stride(0) * b.element_size() if from_pos else None  # bytes from the cosines to the sines
        spans = [checks.extent(x) * x.element_size() for x in (q, k, a, b)]
        # In place the tables must lie outside of what q and k cover together, of which q's address is one corner.
        self.low, self.high = min(0, self.apart), max(spans[0], self.apart + spans[1])
        self.a_span, self.b_span = spans[2], spans[3]

    def __call__(self, q, k, a, b):
        p_q, p_a, p_b = q.data_ptr(), a.data_ptr(), b.data_ptr()
        p_k = p_q + self.apart if self.packed else k.data_ptr()
        if (p_q | p_k | p_a | p_b) & 15 or not (p_q and p_k and p_a and p_b) or self.current_device() != self.index:
            return None
        if self.inplace:
            if p_k - p_q != self.apart:
                return None
            counted = [x for x in (q, k) if not x.is_inference()]
            if len(counted) < 2 and not torch.is_inference_mode_enabled():
                return None
            low, high = p_q + self.low, p_q + self.high
            if (p_a < high and low < p_a + self.a_span) or (p_b < high and low < p_b + self.b_span):
                return None
            y_q, y_k, p_yq, p_yk = q, k, p_q, p_k
            if counted:
                torch.autograd.graph.increment_version(counted)
        else:
            y_q = torch.empty_like(q, memory_format=torch.contiguous_format)  # half the time of torch.empty(shape, ...)
            y_k = torch.empty_like(k, memory_format=torch.contiguous_format)
            p_yq, p_yk = y_q.data_ptr(), y_k.data_ptr()
            if (p_yq | p_yk) & 15:
                return None
        if self.table is None:
            tables = p_a, p_b, p_a
        else:
            tables = p_b, p_b + self.table, p_a
        self.run(
            self.programs, 1, 1, self.current_stream(self.index), self.function, self.metadata, None, None, None,
            p_q, p_k, p_yq, p_yk, *tables, *self.args,
        )  # fmt: skip
        return y_q, y_k
