"""Caches of index tensors by image size: what a plan is compared with.

`SizeCache` is the way of vLLM 0.33, torch operations image by image; `NumpySizeCache` keeps and uploads the same, and
joins a batch by a few numpy calls: the best that we could make of the idea.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .. import reference
from ..rotary import rotary_cos_sin


class Entry(NamedTuple):
    """What is kept of one size (t, h, w), N patches and U merged units: int32 on the CPU, cos and sin on the device.

    numpy arrays instead of tensors on the CPU in a `NumpySizeCache`."""

    cos: torch.Tensor  # float32 (N, head_dim/2), in window order
    sin: torch.Tensor
    index: torch.Tensor  # (U): the window order within the image
    window_ends: torch.Tensor  # (windows): where each window of the image ends, in patches
    frames: torch.Tensor  # (t): lengths in patches


class Tensors(NamedTuple):
    """A batch on the device: int32, and cos and sin float32 (N, head_dim/2) in window order."""

    window_index: torch.Tensor  # (U)
    reverse_index: torch.Tensor  # (U)
    cu_seqlens: torch.Tensor  # (frames + 1)
    cu_window_seqlens: torch.Tensor  # (windows + 1)
    cos: torch.Tensor
    sin: torch.Tensor


class SizeCache:
    """Callable: grid_thw, int64 (G, 3) on the CPU, G >= 1 -> `Tensors` on `device`; for a geometry with windows.

    A size that was never met is computed, cos and sin included. A hit concatenates, adds the offsets of the images,
    inverts the permutation on the CPU and uploads four tensors from pinned memory, without waiting; cos and sin are
    concatenated on the device. What was met once is kept: a stream of new sizes fills the memory.
    """

    def __init__(self, geometry, device="cpu"):
        if not geometry.window:
            raise ValueError(f"geometry.window_size={geometry.window_size!r}: a number of pixels is allowed")
        self.geometry, self.device = geometry, torch.device(device)
        self.pinned = self.device.type != "cpu"
        self.entries: dict[tuple[int, int, int], Entry] = {}

    def __call__(self, grid_thw) -> Tensors:
        index, window_ends, frames, cos, sin = [], [], [], [], []
        units, m2 = 0, self.geometry.spatial_merge_size**2
        for entry in self._entries(grid_thw):
            index.append(entry.index + units)
            window_ends.append(entry.window_ends + units * m2)
            frames.append(entry.frames)
            cos.append(entry.cos)
            sin.append(entry.sin)
            units += len(entry.index)
        index = torch.cat(index)
        reverse = torch.empty_like(index, pin_memory=self.pinned)
        reverse[index] = torch.arange(len(index), dtype=index.dtype)
        cu_seqlens = F.pad(torch.cat(frames).cumsum(0, dtype=torch.int32), (1, 0))
        up = (self._up(x) for x in (index, reverse, cu_seqlens, F.pad(torch.cat(window_ends), (1, 0))))
        return Tensors(*up, torch.cat(cos), torch.cat(sin))

    def _up(self, x):
        if not self.pinned:
            return x
        return (x if x.is_pinned() else x.pin_memory()).to(self.device, non_blocking=True)

    def _entries(self, grid_thw) -> list[Entry]:
        """One an image; those of sizes not met before are computed first."""
        sizes = list(map(tuple, grid_thw.tolist()))
        for size in set(sizes) - self.entries.keys():
            self.entries[size] = self._computed(size)
        return list(map(self.entries.__getitem__, sizes))

    def _computed(self, size) -> Entry:
        """One size, by the plain way that is in use where there is no cache."""
        m, ws = self.geometry.spatial_merge_size, self.geometry.window
        index, _, cu_windows = reference.window_index([size], m, ws)
        ids = reference.rot_pos_ids([size], m).view(-1, m * m, 2)[index].view(-1, 2)
        cos, sin = rotary_cos_sin(ids.to(self.device), self.geometry)
        t, h, w = size
        return Entry(cos, sin, index, cu_windows[1:].clone(), torch.full((t,), h * w, dtype=torch.int32))


class NumpySizeCache(SizeCache):
    """As `SizeCache`, with numpy's operations over the whole batch."""

    def __call__(self, grid_thw) -> Tensors:
        cos, sin, index, window_ends, frames = zip(*self._entries(grid_thw))
        m2 = self.geometry.spatial_merge_size**2
        units = np.fromiter(map(len, index), np.int32, len(index))
        starts = np.cumsum(units, dtype=np.int32) - units  # of the images, in merged units
        index = self._joined(index, starts)
        reverse = self._empty(len(index))
        reverse.numpy()[index.numpy().astype(np.intp)] = np.arange(len(index), dtype=np.int32)
        cu_windows = self._joined(window_ends, starts * m2, first=1)
        cu_seqlens = self._joined(frames, first=1)
        np.cumsum(cu_seqlens.numpy(), out=cu_seqlens.numpy())
        up = map(self._up, (index, reverse, cu_seqlens, cu_windows))
        return Tensors(*up, *(torch.cat(x) if len(x) > 1 else x[0] for x in (cos, sin)))

    def _computed(self, size) -> Entry:
        entry = super()._computed(size)
        return entry._replace(**{name: getattr(entry, name).numpy() for name in ("index", "window_ends", "frames")})

    def _joined(self, parts, starts=None, first=0) -> torch.Tensor:
        """The parts one after another, in memory to upload from, each with its start added; `first` zeros before."""
        lengths = list(map(len, parts))
        out = self._empty(first + sum(lengths))
        values = out.numpy()
        values[:first] = 0
        np.concatenate(parts, out=values[first:])
        if starts is not None and len(parts) > 1:
            values[first:] += np.repeat(starts, lengths)
        return out

    def _empty(self, n) -> torch.Tensor:
        """int32 (n). torch hands pinned memory out again only when the copies from it have ended."""
        return torch.empty(n, dtype=torch.int32, pin_memory=self.pinned)
