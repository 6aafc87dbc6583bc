"""Notebook 6's workload by hand: every rank's share one after the other in this process, so that any number of ranks
can be tried on any machine. What ranks wait for one another and gather is not in it."""

import gc
from copy import deepcopy
from functools import cache

import pandas as pd
import torch

from ..geometry import Geometry
from ..models import accelerate_
from ..parallel import FrameCosts, assign, whole_images
from ..parallel.encoder import Share
from . import by_hand
from .forward_cases import CPU_PATCHES, GPU_PATCHES, _in_float32
from .parallel_cases import OP, allowed, divided_threads, error_of
from .timing import Case, measure
from .tower import TOWERS, make_towers, merged

RANKS = 16


def one_workload(grid_thw, ranks: int, tower: str, device) -> pd.DataFrame:
    """`by_hand.table` of `one_process`, `frames` and `whole_images`, and `load`, the largest over the mean.

    A time is that of the rank whose upload and forward take longest. The shares' results in the caller's order may
    differ from what is right by as much as those of real ranks.
    """
    by_hand.check_choice("tower", tower, TOWERS)
    if type(ranks) is not int or not 1 <= ranks <= RANKS:
        raise ValueError(f"ranks={ranks!r}: an integer from 1 to {RANKS} is allowed here")
    device = torch.device(device)
    geometry = getattr(Geometry, tower)()
    grid = by_hand.check_grid(grid_thw, geometry, GPU_PATCHES if device.type == "cuda" else CPU_PATCHES)
    before = torch.get_num_threads()
    torch.set_num_threads(divided_threads(0, ranks))  # as many as each of so many ranks would have
    try:
        return _shares(grid, ranks, *_towers(tower, device))
    finally:
        torch.set_num_threads(before)


def _shares(grid, ranks, module, exact) -> pd.DataFrame:
    device = module.patch_embed.proj.weight.device
    geometry, costs = Geometry.from_config(module.config), FrameCosts.from_config(module.config)
    width = module.patch_embed.proj.weight[0].numel()
    pixels = torch.randn(sum(t * h * w for t, h, w in grid), width, generator=torch.Generator().manual_seed(0))
    shares = {
        "one_process": assign(grid, 1, geometry, costs=costs),
        "frames": assign(grid, ranks, geometry, costs=costs),
        "whole_images": whole_images(grid, ranks, geometry),
    }
    each = {impl: [Share(s, grid, geometry, r) for r in range(len(s))] for impl, s in shares.items()}
    calls = {(impl, r): _call(module, pixels, share) for impl, all_ in each.items() for r, share in enumerate(all_)}
    verdicts = _verdicts(module, exact, pixels, grid, calls, each)
    rows = measure(
        Case(OP, "by hand", calls, [()], lambda impl, *_: verdicts[impl[0]]), "e2e", device=device, **by_hand.BUDGET
    )
    slowest = [max((r for r in rows if r["impl"][0] == impl), key=_time) for impl in each]
    out = by_hand.table([row | {"impl": row["impl"][0]} for row in slowest], "frames")
    out.insert(5, "load", [_load(s, grid, costs) for s in shares.values()])
    return out


@cache
def _towers(name, device):
    """(the tower, accelerated, its exact one in float32), made once; random weights."""
    tower = make_towers(name, "", device)[name]
    exact = deepcopy(tower).float()
    accelerate_(tower)
    gc.collect()
    return tower, exact


def _call(tower, pixels, share):
    device, grid = tower.patch_embed.proj.weight.device, torch.tensor(share.grid)

    @torch.no_grad()
    def call():
        if not share.rows:
            return None
        rows = torch.cat([pixels[start:stop] for start, stop in share.rows])
        return merged(tower(rows.to(device), grid_thw=grid))

    return call


def _verdicts(tower, exact, pixels, grid, calls, each) -> dict:
    """{impl: (whether the shares joined together are right, a note)}"""
    device = tower.patch_embed.proj.weight.device
    one = calls["one_process", 0]()
    with _in_float32():
        right, most = allowed(one.dtype, one, merged(exact(pixels.to(device), grid_thw=torch.tensor(grid).to(device))))
    out = {}
    for impl, shares in each.items():
        found = [calls[impl, rank]() for rank in range(len(shares))]
        rows = torch.cat([x for x in found if x is not None])
        error = error_of(torch.cat([rows[at : at + n] for at, n in shares[0].order]), right)
        out[impl] = error <= most, f"error {error:.3g}, allowed {most:.3g}"
    return out


def _time(row) -> float:
    return float("inf") if row["error"] else row.get("median_us", 0.0)


def _load(shares, grid, costs) -> float:
    load = [sum(n * costs(*grid[i][1:]) for i, _, n in share) for share in shares]
    return max(load) * len(load) / sum(load)
