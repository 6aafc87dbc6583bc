"""The shape of a vision tower, the checks on `grid_thw`, and every count by closed form.

`grid_thw` holds one row (t, h, w) an image or clip, in patches. It stays on the CPU: reading it back from a GPU
would make the host wait for everything queued there.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

MAX_PATCHES = 2**31  # offsets are int32


@dataclass(frozen=True)
class Geometry:
    """What the index tensors and the rotary embedding need to know of a vision tower.

    patch_size, window_size: pixels; window_size is None where the tower has no window attention.
    spatial_merge_size: m; m x m patches become one merged unit, and h and w are multiples of m.
    num_heads, head_dim: of the attention; head_dim is a multiple of 4 (half of it rotates by row, half by column).
    rope_theta: the base of the rotary frequencies.
    """

    patch_size: int = 14
    spatial_merge_size: int = 2
    window_size: int | None = 112
    num_heads: int = 16
    head_dim: int = 80
    rope_theta: float = 10000.0

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "rope_theta":
                number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
                if not (number and 0 < value < 1e300):
                    raise ValueError(f"rope_theta={value!r}: a finite number above 0 is allowed")
                object.__setattr__(self, field.name, float(value))
            elif not (field.name == "window_size" and value is None):
                if not (_is_int(value) and 1 <= value < MAX_PATCHES):
                    raise ValueError(f"{field.name}={value!r}: an integer of at least 1 and below 2^31 is allowed")
                object.__setattr__(self, field.name, int(value))  # numpy's would overflow in products
        if self.head_dim % 4:
            raise ValueError(f"head_dim={self.head_dim}: a multiple of 4 is allowed (rows and columns share it)")
        if self.window_size is not None and self.window < 1:
            least = self.patch_size * self.spatial_merge_size
            raise ValueError(f"window_size={self.window_size}: at least one merged unit, {least} pixels, is allowed")

    @cached_property
    def window(self) -> int:
        """Side of a window in merged units; 0 where the tower has no windows."""
        return self.window_size // self.spatial_merge_size // self.patch_size if self.window_size else 0

    @classmethod
    def qwen2_vl(cls) -> "Geometry":
        return cls(window_size=None)

    @classmethod
    def qwen2_5_vl(cls) -> "Geometry":
        return cls()

    @classmethod
    def qwen3_vl(cls) -> "Geometry":
        return cls(patch_size=16, window_size=None, head_dim=72)

    @classmethod
    def from_config(cls, config) -> "Geometry":
        """From a transformers vision config, or a model's that holds one. Qwen2-VL calls its width `embed_dim`, the
        others `hidden_size` (which in Qwen2-VL is the width of the language model)."""
        config = getattr(config, "vision_config", config)
        width = config.embed_dim if hasattr(config, "embed_dim") else config.hidden_size
        return cls(
            patch_size=config.patch_size,
            spatial_merge_size=config.spatial_merge_size,
            window_size=getattr(config, "window_size", None),
            num_heads=config.num_heads,
            head_dim=width // config.num_heads,
            rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        )


def _is_int(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _plain(name, value) -> list | tuple:
    """A table or a row as plain Python objects, without a check of what is in it."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(
                f"{name} is a tensor on {value.device}; keep it on the CPU (a list, a numpy array or a CPU tensor): "
                "reading it back would make the host wait for everything queued on the device"
            )
        if value.layout != torch.strided or value.is_floating_point() or value.is_complex():
            raise ValueError(f"{name} is a {value.layout} tensor of {value.dtype}: one of integers is allowed")
        value = value.numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" and value.dtype != object:
            raise ValueError(f"{name} is an array of {value.dtype}: integers are allowed")
        if value.ndim and value.shape[-1] != 3:
            raise ValueError(f"{name} is an array of shape {value.shape}: (G, 3) is allowed")
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}={value!r}: a list of [t, h, w], a numpy array or a CPU tensor (G, 3) is allowed")
    return value


def _three_ints(i, row) -> tuple[int, int, int]:
    """Row i, which is no list or tuple of three plain ints, as one; ValueError if it cannot be."""
    row = _plain(f"grid_thw[{i}]", row)
    if len(row) != 3:
        raise ValueError(f"grid_thw[{i}]={row!r}: three integers [t, h, w] are allowed")
    for name, value in zip("thw", row):
        if not _is_int(value):
            raise ValueError(f"grid_thw[{i}]={row!r}: {name}={value!r}, but only an integer is allowed")
    return tuple(int(value) for value in row)


def check_grid_thw(grid_thw, geometry: Geometry) -> list[tuple[int, int, int]]:
    """`grid_thw`, (G, 3) in patches, as a list of tuples of plain ints; ValueError if any row is not allowed.

    Allowed: integers (no bool, no float), t, h, w >= 1, h and w multiples of `spatial_merge_size`, and fewer than
    2^31 patches altogether. An empty list is legal. The error names the row, its value and what is allowed.
    """
    if not isinstance(geometry, Geometry):
        raise ValueError(f"geometry={geometry!r}: a vitkit.Geometry is allowed")
    rows = grid_thw if type(grid_thw) is list else _plain("grid_thw", grid_thw)
    m, checked, patches = geometry.spatial_merge_size, [], 0
    for i, row in enumerate(rows):
        # Plain lists of plain ints take no call: a batch of 256 images is checked in some 50 us.
        if not ((type(row) is list or type(row) is tuple) and len(row) == 3):
            row = _three_ints(i, row)
        t, h, w = row
        if not type(t) is type(h) is type(w) is int:
            t, h, w = _three_ints(i, row)
        if t < 1 or h < 1 or w < 1:
            raise ValueError(f"grid_thw[{i}]={row!r}: t, h and w of at least 1 are allowed")
        if h % m or w % m:
            raise ValueError(f"grid_thw[{i}]={row!r}: h and w must be multiples of spatial_merge_size={m}")
        patches += t * h * w
        if patches >= MAX_PATCHES:
            raise ValueError(f"grid_thw[{i}]={row!r}: brings the batch to {patches} patches; below 2^31 is allowed")
        checked.append((t, h, w))
    return checked


def num_patches(grid) -> int:
    """Patches of a checked grid: the sum of t*h*w."""
    return sum(t * h * w for t, h, w in grid)


def num_frames(grid) -> int:
    """Frames of a checked grid: the sum of t."""
    return sum(t for t, _, _ in grid)


def num_windows(grid, geometry: Geometry) -> int:
    """Windows of a checked grid: the sum of t * ceil(H/ws) * ceil(W/ws); one a frame where there are no windows."""
    if not geometry.window:
        return num_frames(grid)
    side = geometry.window * geometry.spatial_merge_size  # of a window, in patches
    return sum(t * -(-h // side) * -(-w // side) for t, h, w in grid)
