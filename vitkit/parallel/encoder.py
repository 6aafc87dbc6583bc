"""`encode`: a vision tower over the ranks of a process group, each with its own frames."""

import torch

from ..geometry import Geometry, check_grid_thw, num_patches
from ..models import accelerated, check_tower
from .balance import assign
from .costs import FrameCosts
from .exchange import agree, call_number, digest, gather_rows, place, sends_from, status_device


def encode(tower, pixel_values, grid_thw, *, group=None):
    """What `tower(pixel_values, grid_thw)` returns as `pooler_output`, computed by all ranks of `group` together.

    Every rank calls it with the same tower (transformers' Qwen2-VL or Qwen2.5-VL, `accelerate`d or not, in float32,
    bfloat16 or float16), the same grids and pixel_values (N, channels * frames * patch_size^2) of the whole batch.
    pixel_values may lie on the CPU: a rank reads and uploads its own rows alone (from pinned memory without a wait, so
    synchronise before you write there). grid_thw: (G, 3) on the CPU. group: None is the default group.

    Returns the merged features (sum of t*h*w / m^2, width of the language model), in the caller's order, in the
    tower's dtype on its device, the same bits on every rank. Without gradients (it runs under no_grad). Frames are
    shared out by `assign` with the costs of the tower's config: a clip is cut between frames, which is exact, since
    positions do not count frames and no attention crosses one. A rank without frames takes part in the exchange alone.

    An exception on a rank, and different grids, are a `RankError` on every rank, which names the ranks and the cause;
    KeyboardInterrupt and its like are one on the others. A rank that dies ends the others by a RuntimeError within the
    group's timeout (NCCL: its watchdog ends them).
    """
    return shared(tower, pixel_values, grid_thw, group)


@torch.no_grad()
def shared(tower, pixel_values, grid_thw, group=None, assign=assign, after=lambda phase: None):
    """As `encode`. assign: callable(grid, world_size, geometry, costs=) in place of `assign`; after: is called with
    the name of each phase that has ended, of assign, upload, forward, wait and gather."""
    rank, world = place(group)
    number, job, error = call_number(group), None, None
    try:
        job = _Job(tower, pixel_values, grid_thw, group, assign, rank, world)
        after("assign")
        rows = job.own_rows(pixel_values)
        after("upload")
        job.forward(rows)
        after("forward")
    except BaseException as caught:  # all ranks are told, and raise
        error = caught
    own, text = (digest(number, job.said), f"call {number}: {job.text}") if job else (bytes(32), "")
    agree(group, own, text, error, status_device(group, _device_of(tower)))
    after("wait")
    features = job.gather(group)
    after("gather")
    return features


class Share:
    """One rank's part of a batch, and where every rank's rows belong.

    shares: as `assign` gives them. grid: [frames, h, w] of this rank's pieces. rows: (start, stop) of its rows of the
    pixels, neighbours joined. units: every rank's number of merged units. order: (start, units) of the pieces in the
    caller's order, out of the ranks' units one after the other; neighbours joined.
    """

    def __init__(self, shares, grid, geometry, rank):
        first_row, row = [], 0
        for t, h, w in grid:
            first_row.append(row)
            row += t * h * w
        frame = [h * w for _, h, w in grid]
        m2 = geometry.spatial_merge_size**2
        self.grid = [[n, *grid[i][1:]] for i, _, n in shares[rank]]
        starts = [(first_row[i] + first * frame[i], n * frame[i]) for i, first, n in shares[rank]]
        self.rows = [(start, start + n) for start, n in _joined(starts)]
        self.units = [sum(n * frame[i] for i, _, n in share) // m2 for share in shares]
        pieces, at = [], 0
        for share in shares:
            for i, first, n in share:
                pieces.append((i, first, at, n * frame[i] // m2))
                at += pieces[-1][3]
        self.order = _joined((at, units) for _, _, at, units in sorted(pieces))
        self.start = sum(self.units[:rank])


def _joined(runs) -> list:
    """(start, length) runs, each joined to the one before where it goes on from its end."""
    out = []
    for start, n in runs:
        if out and sum(out[-1]) == start:
            start, before = out.pop()
            n += before
        out.append((start, n))
    return out


class _Job:
    """One call on one rank. Everything that can fail is done before the ranks tell each other that none did."""

    def __init__(self, tower, pixel_values, grid_thw, group, assign, rank, world):
        check_tower(tower)
        config, weight = tower.config, tower.patch_embed.proj.weight
        geometry, costs = Geometry.from_config(config), FrameCosts.from_config(config)
        grid = check_grid_thw(grid_thw, geometry)
        wanted = num_patches(grid), weight[0].numel()
        if not isinstance(pixel_values, torch.Tensor) or pixel_values.shape != wanted:
            what = tuple(pixel_values.shape) if isinstance(pixel_values, torch.Tensor) else type(pixel_values).__name__
            raise ValueError(f"pixel_values: {what}, but a tensor {wanted} is allowed with this grid_thw and tower")
        if not pixel_values.is_floating_point():
            raise ValueError(f"pixel_values: {pixel_values.dtype}, but a floating-point dtype is allowed")
        self.tower, self.device, self.rank = tower, weight.device, rank
        self.share = Share(assign(grid, world, geometry, costs=costs), grid, geometry, rank)
        width = getattr(config, "out_hidden_size", config.hidden_size)  # Qwen2-VL calls it hidden_size
        where = sends_from(group, self.device)
        self.all = torch.empty(sum(self.share.units), width, dtype=weight.dtype, device=where)
        in_order = self.share.order == _joined([(0, len(self.all))]) or not len(self.all)
        self.ordered = self.all if in_order else torch.empty_like(self.all)
        self.said = grid, geometry, costs, width, weight.dtype, self.share.units  # what all must have in common
        named = f"{len(grid)} images or clips of {wanted[0]} patches (grid {digest(grid).hex()[:8]})"
        self.text = f"{named}, {weight.dtype} {width} wide"

    def own_rows(self, pixel_values):
        """This rank's rows on the tower's device; on the way there no other row is read."""
        runs = self.share.rows
        if len(runs) == 1:
            return pixel_values[slice(*runs[0])].to(self.device, non_blocking=True)
        parts = [pixel_values[start:stop] for start, stop in runs]
        if pixel_values.device == self.device:
            return torch.cat(parts) if parts else pixel_values[:0]
        rows = pixel_values.new_empty(sum(map(len, parts)), pixel_values.shape[1], device=self.device)
        for part, target in zip(parts, rows.split([len(part) for part in parts])):
            target.copy_(part, non_blocking=True)  # no copy on the host before it, which would not be pinned
        return rows

    def forward(self, rows):
        units = self.share.units[self.rank]
        if not units:
            return
        grid, found = torch.tensor(self.share.grid), accelerated(self.tower)
        if found is None or "plan" not in found.parts:  # transformers' own wants its grid beside the pixels
            grid = grid.to(self.device)
        out = self.tower(rows, grid_thw=grid)
        out = out[1] if isinstance(out, tuple) else out.pooler_output
        if out.shape != (units, self.all.shape[1]):
            wanted = units, self.all.shape[1]
            raise ValueError(f"tower returned {tuple(out.shape)} features: {wanted} are allowed for {self.share.grid}")
        self.all[self.share.start : self.share.start + units].copy_(out)

    def gather(self, group):
        gather_rows(self.all, self.share.units, group)
        if self.ordered is not self.all:
            torch.cat([self.all[at : at + n] for at, n in self.share.order], out=self.ordered)
        return self.ordered.to(self.device)


def _device_of(tower):
    """Of its parameters; None for what is no tower."""
    try:
        return next(tower.parameters()).device
    except (AttributeError, StopIteration, TypeError):
        return None
