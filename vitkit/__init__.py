"""vitkit: the small operations around attention in the vision encoders of Qwen2-VL and Qwen2.5-VL."""

from importlib import import_module

from .geometry import Geometry
from .indices import CuSeqlens, WindowIndex, cu_seqlens, rot_pos_ids, window_index
from .plan import VisionPlan
from .rotary import (
    apply_rotary_qk,
    apply_rotary_qk_from_pos,
    apply_rotary_qkv_,
    apply_rotary_qkv_from_pos_,
    rotary_cos_sin,
    rotary_table,
)

__all__ = [
    "CuSeqlens",
    "Geometry",
    "VisionPlan",
    "WindowIndex",
    "accelerate",
    "accelerate_",
    "apply_rotary_qk",
    "apply_rotary_qk_from_pos",
    "apply_rotary_qkv_",
    "apply_rotary_qkv_from_pos_",
    "cu_seqlens",
    "rot_pos_ids",
    "rotary_cos_sin",
    "rotary_table",
    "window_index",
]


def __getattr__(name):
    # imported when first asked for: rows of notebooks that use no tower do not depend on these files
    if name in ("accelerate", "accelerate_"):
        return getattr(import_module(".models", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
