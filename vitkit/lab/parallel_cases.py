"""What notebook 6 shares out over ranks: three kinds of batches, the ways to share them out, and what is right.

frames                ours: `vitkit.parallel.encode`
whole_images          the same with whole images by number of patches: another assignment and nothing else
whole_images_padded   the usual way in full: whole images by patches, every rank uploads all pixels, and results are
                      padded to the largest share and gathered
one_process           the tower on all pixels, without torch.distributed; with one rank alone
"""

import os

import pandas as pd
import torch
import torch.distributed as dist

from ..geometry import Geometry
from ..parallel import FrameCosts, assign, whole_images
from ..parallel.encoder import Share, shared
from .forward_cases import FLOAT32_ERROR, MORE_ERROR
from .tower import merged

OP = "encode"
PHASES = ("assign", "upload", "forward", "wait", "gather")
PICTURE_RANKS = 8  # of the picture of the balance, whatever the machine has
SIDES = (12, 30, 8, 16, 42, 10, 24, 20)  # of a mixture's images, in patches on a GPU; half of that on a CPU


def parallel_grids(size) -> list[tuple[str, str, list]]:
    """(kind, name, grid): equal images, a mixture of large and small ones, and one long clip among images.

    A mixture is repeated an odd number of times: an even one falls into two equal halves, however it is shared out.
    """
    if size.name == "tiny":
        sides, times, frames, equal = [4], (1,), 6, 4
    elif size.name == "cpu":
        sides, times, frames, equal = [6, 12], (1, 5), 32, 64
    else:
        sides, times, frames, equal = [16, 36], (1, 11), 48, 64
    found = [("equal images", f"{equal} of 1x{s}x{s}", [[1, s, s]] * equal) for s in sides]
    for n in times:
        half = 1 if size.name == "gpu" else 2
        mixture = [[1, s // half // 2 * 2, s // half // 2 * 4] for s in SIDES]
        found.append(("large and small", f"mixture of {n * len(mixture)}", mixture * n))
    for s in sides:
        clip = [[1, s, s], [1, s, s + 4], [frames, s, s], [1, s + 8, s]]
        found.append(("a clip among images", f"{frames}x{s}x{s} among 3", clip))
    return found


def rank_counts(size, device, gpus: int) -> list[int]:
    """How many ranks are measured: 1, 2, 4 and so on up to the number of GPUs; on a CPU 1 and 2."""
    if torch.device(device).type == "cpu":
        return [1, 2]
    return [2**i for i in range(max(1, gpus).bit_length())]


def divided_threads(threads: int, world: int) -> int:
    """CPU threads of a rank: the cores that this process may use, divided by the ranks; or the number given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return threads or max(1, cores // world)


def ways(tower, pixels, grid, world) -> dict:
    """{impl: callable(after=...) -> features (U, width) on the tower's device}, each called by all ranks at once."""
    device = tower.patch_embed.proj.weight.device

    @torch.no_grad()
    def alone(after=None):
        return merged(tower(pixels.to(device, non_blocking=True), grid_thw=torch.tensor(grid)))

    def frames(**after):
        return shared(tower, pixels, grid, **after)

    def images(**after):
        return shared(tower, pixels, grid, assign=_whole, **after)

    def padded(after=None):
        return _padded(tower, pixels, grid)

    if world == 1:
        return {"one_process": alone, "frames": frames}
    return {"frames": frames, "whole_images": images, "whole_images_padded": padded}


def _whole(grid, world, geometry, costs=None):
    return whole_images(grid, world, geometry)


@torch.no_grad()
def _padded(tower, pixels, grid):
    geometry, rank, world = Geometry.from_config(tower.config), dist.get_rank(), dist.get_world_size()
    weight = tower.patch_embed.proj.weight
    share = Share(whole_images(grid, world, geometry), grid, geometry, rank)
    x = pixels.to(weight.device, non_blocking=True)  # all of them
    width, longest = getattr(tower.config, "out_hidden_size", tower.config.hidden_size), max(share.units)
    mine = weight.new_zeros(longest, width)
    if share.units[rank]:
        rows = torch.cat([x[start:stop] for start, stop in share.rows])
        mine[: share.units[rank]] = merged(tower(rows, grid_thw=torch.tensor(share.grid)))
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    rows = torch.cat([part[:n] for part, n in zip(parts, share.units)])
    return torch.cat([rows[start : start + n] for start, n in share.order])


def moved(impl, tower, pixels, grid, world) -> list[tuple]:
    """[(metric, value, unit)] by the assignment: the largest load over the mean, and what the busiest rank moves."""
    geometry, costs = Geometry.from_config(tower.config), FrameCosts.from_config(tower.config)
    shares = assign(grid, world, geometry, costs=costs)
    if impl.startswith("whole_images"):
        shares = whole_images(grid, world, geometry)
    each = [Share(shares, grid, geometry, rank) for rank in range(world)]
    load = [sum(n * costs(*grid[i][1:]) for i, _, n in share) for share in shares]
    row = pixels[0].numel() * pixels.element_size()
    up = max(sum(stop - start for start, stop in share.rows) for share in each) * row
    weight, units = tower.patch_embed.proj.weight, each[0].units
    unit = getattr(tower.config, "out_hidden_size", tower.config.hidden_size) * weight.element_size()
    gathered = sum(units) * unit
    if impl == "whole_images_padded":
        up, gathered = len(pixels) * row, world * max(units) * unit
    return [
        ("largest load over the mean", max(load) * world / sum(load), "1"),
        ("bytes of pixels uploaded by the busiest rank", up, "bytes"),
        ("bytes of features gathered", gathered, "bytes"),
    ]


def error_of(out, exact) -> float:
    return float((out.float() - exact.float()).norm() / exact.float().norm())


def allowed(dtype, one, exact) -> tuple[torch.Tensor, float]:
    """(what results are compared with, the largest relative error): in float32 one process's result, and a tenth of
    what that may differ from transformers; else the exact result, and one process's own error and 2 % more."""
    if dtype == torch.float32:
        return one, FLOAT32_ERROR / 10
    return exact, MORE_ERROR * error_of(one, exact)


def balance(grids, world: int, geometry: Geometry) -> pd.DataFrame:
    """A row a frame: columns kind, name, version, rank, image, frame, load (of the mean load of a rank).

    grids: (kind, name, grid), with the published tower's costs.
    """
    costs, rows = FrameCosts.from_geometry(geometry), []
    for kind, name, grid in grids:
        cost = [costs(h, w) for _, h, w in grid]
        mean = sum(t * c for (t, _, _), c in zip(grid, cost)) / world
        for version, shares in (
            ("frames", assign(grid, world, geometry)),
            ("whole_images", whole_images(grid, world, geometry)),
        ):
            for rank, share in enumerate(shares):
                for i, first, n in share:
                    label = kind, name, version, rank, i
                    rows += [(*label, frame, cost[i] / mean) for frame in range(first, first + n)]
    return pd.DataFrame(rows, columns=["kind", "name", "version", "rank", "image", "frame", "load"])
