"""`VisionPlan`: every index tensor of a batch in one buffer, by one upload and without waiting for a GPU.

On a GPU there are two ways. `numba` fills the buffer in pinned memory and copies it once (8 bytes a patch, 8 a merged
unit, 4 a window and a frame); `triton` copies a table of 20 bytes an image and fills the buffer by one launch. The
pinned memory is torch's: it hands none out again before the copy from it has ended.
"""

from functools import cache

import torch

from .. import tuned
from ..geometry import Geometry
from ..indices import _CPU, _device, _installed
from . import host

# Names of the ways to build a plan, and what each needs to be installed.
IMPLEMENTATIONS = {"reference": None, "torch": None, "numba": "numba", "triton": "triton"}


@cache
def _triton():
    from . import triton_kernels

    return triton_kernels


class VisionPlan:
    """The index tensors of a batch of images and clips, as int32 views of one buffer on `device`; by `from_grid`.

    N patches, U = N / m^2 merged units (m = spatial_merge_size). What a GPU would have to be asked for is known on the
    host: `num_tokens` (N), `num_images`, `max_seqlen`, `max_window_seqlen` (patches), `max_position`. `impl` built the
    buffer, because of `chosen_by`. Plans of the same grid and geometry are equal, wherever they lie.
    """

    __hash__ = None
    __slots__ = (
        "geometry", "device", "impl", "chosen_by", "num_images", "num_tokens", "max_seqlen", "max_window_seqlen",
        "max_position", "_grid", "_counts", "_buffer", "_views", "_image_ids",
    )  # fmt: skip

    @staticmethod
    def from_grid(grid_thw, geometry: Geometry, *, device="cpu", impl="auto") -> "VisionPlan":
        """The plan of `grid_thw`, (G, 3) rows [t, h, w] in patches: a list, numpy array or CPU tensor.

        impl: a key of IMPLEMENTATIONS; "auto" takes the way that was the faster one at this size, on this device if
        `python -m vitkit tune` has measured it. ValueError names what is not allowed, before anything is computed.
        """
        if torch.compiler.is_compiling():  # numba cannot be traced
            return torch.compiler.disable(VisionPlan.from_grid)(grid_thw, geometry, device=device, impl=impl)
        grid, counts = host.read_grid(grid_thw, geometry)
        device = _device(device)
        impl, chosen_by = _choose(impl, counts[0], device)
        plan = VisionPlan.__new__(VisionPlan)
        plan._set(grid, counts, geometry, device, impl, chosen_by)
        m, (patches, frames, windows, *_) = geometry.spatial_merge_size, counts
        entries = 2 * (patches + patches // (m * m)) + frames + windows + 2
        entries += entries % 2
        if impl == "triton" and patches:
            buffer = torch.empty(entries, dtype=torch.int32, device=device)
            table = upload_table(grid, geometry, device)
            _triton().launch(table, buffer, patches, frames, windows, m, geometry.window)
        else:
            buffer = torch.empty(entries, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            host.fill("torch" if impl == "triton" else impl, grid, geometry, counts, buffer)
            if device is not _CPU:
                buffer = buffer.to(device, non_blocking=True)
        plan._buffer = buffer
        return plan

    @staticmethod
    def for_budget(geometry, *, tokens, images, frames, windows=None, device) -> "VisionPlan":
        """A plan of fixed buffers for batches up to these counts, for CUDA graphs: see `budget.BudgetPlan`."""
        from .budget import BudgetPlan

        return BudgetPlan(geometry, tokens=tokens, images=images, frames=frames, windows=windows, device=device)

    def _set(self, grid, counts, geometry, device, impl, chosen_by):
        self.geometry, self.device, self.impl, self.chosen_by = geometry, device, impl, chosen_by
        self._grid, self._counts, self._views, self._image_ids = grid, counts, None, None
        self.num_images, self.num_tokens = len(grid), counts[0]
        self.max_seqlen, self.max_window_seqlen, self.max_position = counts[3:]

    def _parts(self):
        return host.cut(*self._counts[:3], self.geometry.spatial_merge_size)

    def _view(self, i):
        if self._views is None:
            self._views = self._buffer.split_with_sizes(self._parts())
        return self._views[i]

    @property
    def window_pos_ids(self) -> torch.Tensor:
        """int32 (N, 2): row and column of every patch, in window order."""
        return self._view(0).view(-1, 2)

    @property
    def rot_pos_ids(self) -> torch.Tensor:
        """int32 (N, 2): row and column of every patch, in image order: gathered on the device when first asked for."""
        if self._image_ids is None:
            if not self.geometry.window:
                self._image_ids = self.window_pos_ids
            else:
                units = self._view(0).view(len(self.reverse_index), -1) if self.num_tokens else self.window_pos_ids
                self._image_ids = units.index_select(0, self.reverse_index).view(-1, 2)
        return self._image_ids

    @property
    def window_index(self) -> torch.Tensor:
        """int32 (U): the merged unit that stands at each place of the window order."""
        return self._view(1)

    @property
    def reverse_index(self) -> torch.Tensor:
        """int32 (U): the inverse of `window_index`."""
        return self._view(2)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 (frames + 1): offsets of the frames in patches."""
        return self._view(3)

    @property
    def cu_window_seqlens(self) -> torch.Tensor:
        """int32 (windows + 1): offsets of the windows in patches, none empty; without windows, of the frames."""
        return self._view(4)

    def model_kwargs(self) -> dict:
        """What transformers' Qwen2-VL and Qwen2.5-VL towers take under their names, instead of computing it.

        `position_ids` are in image order: the tower permutes them itself. `window_index`, `cu_window_seqlens` and
        `max_window_seqlen` only where the geometry has windows.
        """
        out = {"position_ids": self.rot_pos_ids, "cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}
        if self.geometry.window:
            out |= {"window_index": self.window_index, "cu_window_seqlens": self.cu_window_seqlens}
            out["max_window_seqlen"] = self.max_window_seqlen
        return out

    def to(self, device) -> "VisionPlan":
        """This plan on `device`: itself if it is there; up by one copy; down to the CPU built anew, not read back."""
        device = _device(device)
        if device == self.device:
            return self
        if self._buffer.device.type != "cpu":
            return VisionPlan.from_grid(self._grid, self.geometry, device=device)
        buffer = self._buffer
        if device.type == "cuda" and not buffer.is_pinned():
            buffer = buffer.pin_memory()
        return _restore(self._grid, self.geometry, buffer.to(device, non_blocking=True), self.impl, self.chosen_by)

    def pin_memory(self) -> "VisionPlan":
        """A plan on the CPU in pinned memory, as torch's DataLoader asks for: `to` then copies without waiting."""
        if self.device.type != "cpu":
            return self
        return _restore(self._grid, self.geometry, self._buffer.pin_memory(), self.impl, self.chosen_by)

    def __eq__(self, other):
        if not isinstance(other, VisionPlan):
            return NotImplemented
        same = self.geometry == other.geometry and self._parts() == other._parts()
        return same and self._grid.tolist() == other._grid.tolist()

    def __reduce__(self):
        if self.device.type != "cpu":
            raise ValueError(
                f"a plan on {self.device} cannot be pickled: one on the CPU, such as .to('cpu'), is allowed"
            )
        return _restore, (self._grid, self.geometry, self._buffer, self.impl, self.chosen_by)

    def __repr__(self):
        c = host.Counts(*self._counts)
        size = f"{self.num_images:,} images or clips, {c.patches:,} patches, {c.frames:,} frames"
        size += f", {c.windows:,} windows" if self.geometry.window else ", no windows"
        place = f"{self.device}, {self._buffer.numel() * 4:,} bytes"
        return f"{type(self).__name__}({size}; {place}; by {self.impl}, {self.chosen_by})"


def _restore(grid, geometry, buffer, impl, chosen_by) -> VisionPlan:
    """A plan around a buffer that holds it already."""
    grid, counts = host.read_grid(grid, geometry)
    plan = VisionPlan.__new__(VisionPlan)
    plan._set(grid, counts, geometry, buffer.device, impl, chosen_by)
    plan._buffer = buffer
    return plan


def upload_table(grid, geometry, device, out=None) -> torch.Tensor:
    """The table of `triton_kernels` for a checked grid, int32, copied to `device`, or into the beginning of `out`."""
    header = _triton().HEADER
    size = header + 5 * max(len(grid), 1)
    table = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    m, ws = geometry.spatial_merge_size, min(geometry.window, 2**29)
    if host.has_numba():
        host.kernels().fill_table(grid, m, ws, header, table.numpy())
    else:
        table.copy_(_plain_table(grid, m, ws, header))
    return table.to(device, non_blocking=True) if out is None else out[:size].copy_(table, non_blocking=True)


def _plain_table(grid, m, ws, n_header):
    """As numba's `fill_table`, from the table that the single ops send up."""
    from ..indices.triton_kernels import _table

    rows, patches, frames, windows = _table([tuple(row) for row in grid.tolist()], m, ws)
    images = len(grid)
    header = [images, max(images - 1, 0).bit_length(), patches, frames, windows]
    header += [0] * (n_header - len(header))
    return torch.tensor(header + (rows or [m, m, 0, 0, 0]), dtype=torch.int32, device="cpu")


def _choose(impl, patches, device):
    """(way, why) for a batch of so many patches."""
    if type(impl) is str and impl == "auto":
        small, big, threshold = _auto(device, torch.get_num_threads() if device is _CPU else 0)
        return big if patches >= threshold else small
    if type(impl) is not str or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: {', '.join(map(repr, [*IMPLEMENTATIONS, 'auto']))} are allowed for a plan")
    if IMPLEMENTATIONS[impl] and not _serves(IMPLEMENTATIONS[impl]):
        raise ValueError(f"impl={impl!r}: {impl} is not installed; 'torch', 'reference' or 'auto' would serve")
    if impl == "triton" and device.type != "cuda" and not (device is _CPU and _triton().INTERPRETED):
        raise ValueError(f"impl='triton' with device='{device}': it serves GPUs; 'numba', 'torch', 'auto' would serve")
    return impl, "asked for"


def _serves(package) -> bool:
    return _installed(package) and (package != "numba" or host.has_numba())


@tuned.cached
def _auto(device, threads):
    """What "auto" takes: (way, why) below and from a number of patches, and that number. threads: torch's on a CPU."""
    threshold, source = tuned.crossover("VisionPlan", device)
    small, big = "numba", "triton" if device.type == "cuda" else "torch"
    there = [way for way in (small, big) if not IMPLEMENTATIONS[way] or _serves(IMPLEMENTATIONS[way])]
    if len(there) == 2:
        return (small, f"auto: {source}"), (big, f"auto: {source}"), threshold
    missing = " and ".join(way for way in (small, big) if way not in there)
    only = (there or ["torch"])[0], f"auto: {missing} not installed"
    return only, only, threshold
