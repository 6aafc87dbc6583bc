"""What people use today, each called the way its users call it, where it is installed; absent where it is not.

transformers: `apply_rotary_pos_emb_vision` and `vision_utils`. torch_compile: the former through torch.compile,
compiled anew for each shape, which is its best case. flash_attn_2x: flash-attn's rotary kernel, once for q and once
for k; flash_attn_cat: once on their concatenation, as vLLM does. liger: liger-kernel's function for vision.
"""

import functools
import shutil
import sys
import types
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch._functorch.config

# Implementations that are not ours: one of them that fails or is wrong is reported and fails no run.
PEERS = (
    *("transformers", "torch_compile", "flash_attn_2x", "flash_attn_cat", "liger"),
    *("transformers_cpu_grid", "size_cache", "size_cache_numpy", "size_cache_cold", "transformers_varlen"),
)


class RotaryInputs(NamedTuple):
    """What the ways to rotate take.

    q, k (B, S, H, D) or (S, H, D); cos, sin float32 (S, D/2); the same doubled (S, D); and in the dtype of q.
    qkv (S, 3, H, D): the packed tensor whose parts q and k are, or None. pos_ids (S, 2) and table (2, P, D/4), or
    None. grad_q, grad_k: the gradients of the rotated q and k, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cos_doubled: torch.Tensor
    sin_doubled: torch.Tensor
    cos_low: torch.Tensor
    sin_low: torch.Tensor
    qkv: torch.Tensor | None = None
    pos_ids: torch.Tensor | None = None
    table: torch.Tensor | None = None
    grad_q: torch.Tensor | None = None
    grad_k: torch.Tensor | None = None

    @classmethod
    def of(cls, q, k, cos, sin, **more):
        doubled = (torch.cat([x, x], dim=-1) for x in (cos, sin))
        return cls(q, k, cos, sin, *doubled, cos.to(q.dtype), sin.to(q.dtype), **more)

    def fresh(self):
        """A copy that shares no memory with this; q and k are parts of its own qkv where they are of this one's."""
        copy = RotaryInputs(*(x if x is None else x.clone() for x in self))
        return copy if self.qkv is None else copy._replace(q=copy.qkv[:, 0], k=copy.qkv[:, 1])


class Backward:
    """The gradients of q and k through autograd: callable(RotaryInputs) -> (dq, dk), from `grad_q` and `grad_k`.

    forward: callable(RotaryInputs) -> (q, k). It runs when inputs are first met on a stream, and its graph is kept for
    the later calls: autograd runs a backward on the stream of its forward, and the clock `kernel` captures on a stream
    of its own, after a first call there. What is kept goes with this object.
    """

    keeps = True  # something for each set of inputs

    def __init__(self, forward):
        self.forward, self.graphs = forward, {}

    def __call__(self, r):
        key = id(r), torch.cuda.current_stream(r.q.device).cuda_stream if r.q.is_cuda else 0
        if key not in self.graphs:
            q, k = (x.detach().requires_grad_() for x in (r.q, r.k))
            # torch.compile would otherwise write into what it saved for the backward, which then serves once only
            with torch._functorch.config.patch(donated_buffer=False):
                self.graphs[key] = r, (q, k), self.forward(r._replace(q=q, k=k))  # r is kept, and with it its id
        _, leaves, outputs = self.graphs[key]
        return torch.autograd.grad(outputs, leaves, (r.grad_q, r.grad_k), retain_graph=True)


def rotary_peers(device, batched=False, compiled=True, backward=False) -> dict:
    """{name: callable(RotaryInputs) -> (q, k)} of the peers that are installed and serve tensors on `device`.

    compiled: with torch_compile, which takes seconds for each shape. backward: their backwards -> (dq, dk) instead.
    """
    peers, device = {}, torch.device(device)
    theirs = _imported("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "apply_rotary_pos_emb_vision")
    if theirs:
        peers["transformers"] = lambda r: theirs(r.q, r.k, r.cos_doubled, r.sin_doubled)
        # On the CPU it compiles C++.
        if compiled and (device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")):
            torch._dynamo.reset()  # else it would keep to eager after eight shapes
            fast = torch.compile(theirs, dynamic=False)
            peers["torch_compile"] = lambda r: fast(r.q, r.k, r.cos_doubled, r.sin_doubled)
    if device.type == "cuda":
        liger = _imported("liger_kernel.transformers.rope", "liger_rotary_pos_emb_vision")
        if liger and not batched:  # it takes (S, H, D) alone
            peers["liger"] = lambda r: liger(r.q, r.k, r.cos_doubled, r.sin_doubled)
    if backward:
        peers = {name: Backward(call) for name, call in peers.items()}
    flash = _flash_attn_rotary() if device.type == "cuda" else None
    if flash and backward:  # its backward is the same kernel
        peers["flash_attn_2x"] = lambda r: tuple(_flash(flash, x, r, conjugate=True) for x in (r.grad_q, r.grad_k))
    elif flash:
        peers["flash_attn_2x"] = lambda r: tuple(_flash(flash, x, r) for x in (r.q, r.k))
        peers["flash_attn_cat"] = lambda r: _flash_cat(flash, r)
    return peers


def _imported(module, name):
    """An attribute of a package that may be absent, broken or of a version without it; None then."""
    try:
        return getattr(import_module(module), name) if find_spec(module.split(".")[0]) else None
    except (ImportError, AttributeError, RuntimeError):
        return None


@functools.cache
def _flash_attn_rotary():
    """flash-attn's Triton rotary kernel, or None. It needs no compiled part, but its package imports one: where that
    is missing an empty module stands in for it while the kernel's file is imported."""
    if not find_spec("flash_attn"):
        return None
    compiled = "flash_attn_2_cuda"
    if compiled not in sys.modules and not find_spec(compiled):
        sys.modules[compiled] = types.ModuleType(compiled)
    return _imported("flash_attn.ops.triton.rotary", "apply_rotary")


def _flash(apply, x, r, **options):
    """Its kernel takes (B, S, H, D), and tables in the dtype of x, as its users pass them."""
    return apply(x if x.dim() == 4 else x.unsqueeze(0), r.cos_low, r.sin_low, **options).view(x.shape)


def _flash_cat(apply, r):
    both = torch.cat([r.q, r.k]) if r.q.dim() == 4 else torch.stack([r.q, r.k])
    return apply(both, r.cos_low, r.sin_low).view(2, *r.q.shape).unbind()


def index_peers(op: str, geometry):
    """{name: callable(grid, table)}: transformers' own function, given the table (G, 3) on the device, or {}.

    Its window function returns index and cu_seqlens; the inverse, which its tower computes later by an argsort, is not
    in its time. ids and index are int64.
    """
    names = {
        "rot_pos_ids": ("get_vision_position_ids", (geometry.spatial_merge_size,)),
        "window_index": (
            "get_vision_window_index",
            (geometry.spatial_merge_size, geometry.window_size, geometry.patch_size),
        ),
        "cu_seqlens": ("get_vision_cu_seqlens", ()),
    }
    name, arguments = names[op]
    theirs = _imported("transformers.vision_utils", name)
    return {"transformers": lambda grid, table: theirs(table, *arguments)} if theirs else {}
