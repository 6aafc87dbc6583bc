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

# Implementations that are not ours: one of them that fails or is wrong is reported and fails no run.
PEERS = ("transformers", "torch_compile", "flash_attn_2x", "flash_attn_cat", "liger")


class RotaryInputs(NamedTuple):
    """q, k (B, S, H, D) or (S, H, D); cos, sin float32 (S, D/2); the same doubled (S, D); and in the dtype of q."""

    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cos_doubled: torch.Tensor
    sin_doubled: torch.Tensor
    cos_low: torch.Tensor
    sin_low: torch.Tensor

    @classmethod
    def of(cls, q, k, cos, sin):
        doubled = (torch.cat([x, x], dim=-1) for x in (cos, sin))
        return cls(q, k, cos, sin, *doubled, cos.to(q.dtype), sin.to(q.dtype))


def rotary_peers(device, batched=False) -> dict:
    """{name: callable(RotaryInputs) -> (q, k)} of the peers that are installed and serve tensors on `device`."""
    peers, device = {}, torch.device(device)
    theirs = _imported("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "apply_rotary_pos_emb_vision")
    if theirs:
        peers["transformers"] = lambda r: theirs(r.q, r.k, r.cos_doubled, r.sin_doubled)
        if device.type == "cuda" or shutil.which("g++") or shutil.which("clang++"):  # it compiles C++ for the CPU
            torch._dynamo.reset()  # else it would keep to eager after eight shapes
            compiled = torch.compile(theirs, dynamic=False)
            peers["torch_compile"] = lambda r: compiled(r.q, r.k, r.cos_doubled, r.sin_doubled)
    if device.type != "cuda":
        return peers
    flash = _flash_attn_rotary()
    if flash:
        peers["flash_attn_2x"] = lambda r: tuple(_flash(flash, x, r) for x in (r.q, r.k))
        peers["flash_attn_cat"] = lambda r: _flash_cat(flash, r)
    liger = _imported("liger_kernel.transformers.rope", "liger_rotary_pos_emb_vision")
    if liger and not batched:  # it takes (S, H, D) alone
        peers["liger"] = lambda r: liger(r.q, r.k, r.cos_doubled, r.sin_doubled)
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


def _flash(apply, x, r):
    """Its kernel takes (B, S, H, D), and tables in the dtype of x, as its users pass them."""
    return apply(x if x.dim() == 4 else x.unsqueeze(0), r.cos_low, r.sin_low).view(x.shape)


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
