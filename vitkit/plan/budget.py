"""A plan whose buffers stay where they are, for CUDA graphs: a batch is described by a small table alone."""

import torch

from ..geometry import MAX_PATCHES, Geometry, _is_int
from ..indices import _device, _installed
from . import VisionPlan, _triton, host, upload_table


class BudgetPlan(VisionPlan):
    """Fixed buffers for any batch of at most `tokens` patches in `images` rows, `frames` frames and `windows` windows.

    `update(grid_thw)` sends the batch's table up (20 bytes an image and 32); `replay()` refills the buffers from it by
    a captured launch, or, while a stream is being captured, by a launch that becomes part of that capture. Both act on
    the current stream: on another one than the last, wait for the last first, as with any tensor.

    Every view keeps its address and length. Beyond the batch, offsets repeat the last one (empty segments), positions
    are (0, 0) and the window index is the identity, so that it stays a permutation of all of the units. `num_tokens`
    is the batch's; the maxima are bounds for every batch of the budget, since a graph has them built in. On the CPU,
    `replay` fills the same buffers on the host. Of transformers' attentions, `model_kwargs` serves those that take
    offsets whole (flash attention): those that split by them cannot leave rows out.
    """

    __slots__ = ("budget", "_table", "_graph")

    def __init__(self, geometry, *, tokens, images, frames, windows, device):
        if not isinstance(geometry, Geometry):
            raise ValueError(f"geometry={geometry!r}: a vitkit.Geometry is allowed")
        if windows is None and not geometry.window:
            windows = frames  # one a frame
        budget = {"tokens": tokens, "images": images, "frames": frames, "windows": windows}
        m, ws = geometry.spatial_merge_size, geometry.window
        for name, value in budget.items():
            if not (_is_int(value) and 1 <= value < MAX_PATCHES):
                raise ValueError(f"{name}={value!r}: an integer of at least 1 and below 2^31 is allowed")
        if tokens % (m * m):
            raise ValueError(
                f"tokens={tokens}: a multiple of spatial_merge_size^2={m * m} is allowed, counted in patches"
            )
        device = _device(device)
        self.budget = {name: int(value) for name, value in budget.items()}
        empty, counts = host.read_grid([], geometry)
        self._set(empty, counts, geometry, device, "numba" if host.has_numba() else "torch", "for a budget")
        tokens = self.budget["tokens"]
        self.max_seqlen, self.max_position = tokens, tokens // m - 1
        self.max_window_seqlen = min((ws * m) ** 2, tokens) if ws else tokens
        with torch.inference_mode(False):  # else it could not be refilled outside of one
            self._allocate(device)
        self.replay()

    def _allocate(self, device):
        self._buffer = torch.zeros(sum(self._parts()), dtype=torch.int32, device=device)
        self._image_ids = self._view(6).view(-1, 2)
        self._graph = self._table = None
        if device.type == "cuda":
            if not _installed("triton"):
                raise ValueError(f"device='{device}': a budget on a GPU needs triton, which is not installed")
            self.impl = "triton"
            self._table = torch.zeros(_triton().HEADER + 5 * self.budget["images"], dtype=torch.int32, device=device)
            upload_table(self._grid, self.geometry, device, self._table)
            with torch.cuda.device(device):
                self._launch()  # compiles: nothing of that may happen in a capture
                torch.cuda.synchronize(device)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may go on
                    self._launch()

    def _parts(self):
        b = self.budget
        return host.cut(b["tokens"], b["frames"], b["windows"], self.geometry.spatial_merge_size, image_ids=True)

    def update(self, grid_thw) -> "BudgetPlan":
        """Makes `grid_thw` the batch that the next `replay` fills in. A batch beyond the budget is a ValueError."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self.update)(grid_thw)
        grid, counts = host.read_grid(grid_thw, self.geometry)
        needs = dict(zip(("tokens", "frames", "windows"), counts), images=len(grid))
        for name, value in needs.items():
            if value > self.budget[name]:
                raise ValueError(
                    f"grid_thw has {value} {name}: the budget of {name}={self.budget[name]} allows no more"
                )
        if self._table is not None:
            upload_table(grid, self.geometry, self.device, self._table)
        self._grid, self._counts, self.num_images, self.num_tokens = grid, counts, len(grid), counts[0]
        return self

    def replay(self) -> "BudgetPlan":
        """Refills the buffers for the batch of the last `update`, without an allocation, an upload or a wait."""
        if self._table is None:
            self._fill_on_host()
        elif torch.cuda.is_current_stream_capturing():
            self._launch()
        else:
            self._graph.replay()
        return self

    def _launch(self):
        b = self.budget
        args = b["tokens"], b["frames"], b["windows"], self.geometry.spatial_merge_size, self.geometry.window, True
        _triton().launch(self._table, self._buffer, *args)

    def _fill_on_host(self):
        batch = VisionPlan.from_grid(self._grid, self.geometry, impl=self.impl)
        n, units = self.num_tokens, len(batch.window_index)
        for ids, of_batch in ((self.window_pos_ids, batch.window_pos_ids), (self.rot_pos_ids, batch.rot_pos_ids)):
            ids[:n], ids[n:] = of_batch, 0
        for index, of_batch in ((self.window_index, batch.window_index), (self.reverse_index, batch.reverse_index)):
            index[:units] = of_batch
            index[units:] = torch.arange(units, len(index), dtype=torch.int32, device="cpu")
        for cu, of_batch in ((self.cu_seqlens, batch.cu_seqlens), (self.cu_window_seqlens, batch.cu_window_seqlens)):
            cu[: len(of_batch)], cu[len(of_batch) :] = of_batch, n

    def to(self, device) -> "BudgetPlan":
        """Itself on its own device; to another one it cannot move."""
        if _device(device) == self.device:
            return self
        raise ValueError(f"device={device!r}: a budget's buffers stay on {self.device}; build another one there")

    def pin_memory(self):
        return self

    def __eq__(self, other):
        same = isinstance(other, BudgetPlan) and self.budget == other.budget
        return same and super().__eq__(other)

    def __reduce__(self):
        raise ValueError("a plan for a budget cannot be pickled: build another one where it is needed")
