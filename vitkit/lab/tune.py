"""`python -m vitkit tune`: from which size on the second way of building index tensors is the faster one here."""

import math
import os
from functools import partial
from importlib.util import find_spec

import torch

from vitkit import Geometry, VisionPlan, indices, tuned
from vitkit.lab.cases import tokens
from vitkit.lab.timing import Case, measure

# 64 to 663,552 patches; in each step of two the same work on either side of the middle.
LADDER = [[[1, 8, 8]], [[1, 18, 18]]] + [[[1, 36, 36]] * 2**i for i in range(10)]


def run(device: torch.device, *, ladder=None, say=print, **options):
    """Measures every op of `tuned.OPS` on `device`, prints the times, stores the crossovers and says where.

    ladder: batches, smallest first. options: of `measure`; without them as many rounds as 0.15 s allow, 20 to 200.
    """
    ways = ("numba", "triton") if device.type == "cuda" else ("numba", "torch")
    missing = [way for way in ways if not find_spec(way)]
    if missing:
        raise ValueError(
            f"device={str(device)!r}: {missing[0]} is not installed, so there is nothing to choose between"
        )
    _check_folder(device)
    geometry, found = Geometry.qwen2_5_vl(), {}
    options = {"budget_s": 0.15, "n_min": 20, **options}
    say(f"{'op':<14}{'patches':>9}{ways[0] + ', us':>12}{ways[1] + ', us':>12}")
    for op in tuned.OPS:
        times = []
        for grid in ladder or LADDER:
            rows = measure(_case(op, grid, geometry, device, ways), "e2e", device=device, **options)
            for row in rows:
                if row.get("median_us") is None:
                    raise ValueError(
                        f"{op} by {row['impl']} at {row['case']}: {row['error'] or row['note'] or 'wrong'}"
                    )
            first, second = (row["median_us"] for row in rows)
            times.append((tokens(grid), first, second))
            say(f"{op:<14}{tokens(grid):>9,}{first:>12.1f}{second:>12.1f}")
        found[op] = crossover(times)
        say(
            f"{op:<14}{'':>9}  {ways[1]} from {found[op]:,} patches on"
            if found[op] < math.inf
            else f"{op:<14} {ways[0]}"
        )
    say(f"wrote {tuned.save(device, found)}")
    return found


def _check_folder(device):
    """ValueError where what is measured could not be written."""
    try:
        folder = tuned.folder()
    except RuntimeError:
        raise ValueError("VITKIT_CACHE is not set and there is no home directory: a folder in it is allowed") from None
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or tuned.file_of(device).is_dir():
        raise ValueError(f"VITKIT_CACHE={str(folder)!r}: a folder that can be written is allowed")


def crossover(times) -> float:
    """Patches from which the second of two ways is faster; inf if never. times: (patches, first, second), ascending.

    The last step of the ladder from where the second way stays the faster one; between its ends, on logarithmic scales,
    where the ratio of the times is 1.
    """
    at = len(times)
    while at and times[at - 1][2] < times[at - 1][1]:
        at -= 1
    if at == len(times):
        return math.inf
    if at == 0:
        return 0
    (low, *before), (high, *after) = times[at - 1], times[at]
    behind, ahead = math.log(before[1] / before[0]), math.log(after[0] / after[1])
    share = behind / (behind + ahead) if behind + ahead > 0 else 0.5
    return round(low * (high / low) ** share)


def _case(op, grid, geometry, device, ways) -> Case:
    table = torch.tensor(grid)
    if op == "VisionPlan":
        make = partial(VisionPlan.from_grid, table, geometry, device=device)
        read = _plan_tensors
    else:
        make = partial(getattr(indices, op), grid, geometry, device=device)
        read = _op_tensors
    right = [x.cpu() for x in read(make(impl="torch"))]

    def check(impl, outputs, inputs):
        return all(torch.equal(x.cpu(), y) for x, y in zip(outputs, right, strict=True))

    calls = {way: lambda way=way: read(make(impl=way)) for way in ways}
    return Case(op, f"{len(grid)} x {grid[0]}", calls, [()], check, n_images=len(grid), n_tokens=tokens(grid))


def _plan_tensors(plan):
    return [plan.window_pos_ids, plan.window_index, plan.reverse_index, plan.cu_seqlens, plan.cu_window_seqlens]


def _op_tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    return [out.index, out.reverse, out.cu_seqlens] if isinstance(out, indices.WindowIndex) else [out.cu_seqlens]
