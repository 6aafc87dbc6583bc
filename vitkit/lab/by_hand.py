"""One workload by hand, as the notebooks offer it near their end: checked and timed as the others, and not written."""

import pandas as pd
import torch

from ..geometry import check_grid_thw, num_patches
from .peers import PEERS
from .tables import LIMITS
from .timing import Case, measure

PATCHES = 2**20  # of an index tensor's workload
BUDGET = {"budget_s": 0.3, "n_min": 3, "n_max": 50, "warmup": 2}
PLAIN = ("reference", "eager")  # the library's own plain way, which is what others are compared with


def check_grid(grid_thw, geometry, most: int = PATCHES) -> list[list[int]]:
    """`grid_thw` as lists of ints; ValueError that names a bad row, or the number of patches if 0 or over `most`."""
    grid = [list(row) for row in check_grid_thw(grid_thw, geometry)]
    if not 1 <= num_patches(grid) <= most:
        shown = f"{str(grid)[:60]}{'...' * (len(str(grid)) > 60)}"
        raise ValueError(f"grid_thw={shown}: {num_patches(grid)} patches, but 1 to {most} are allowed here")
    return grid


def check_choice(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: one of {', '.join(allowed)} is allowed")


def timed(case: Case, device, clock="e2e", ours="") -> pd.DataFrame:
    """`table` of the case's rows; about half a second of rounds at the most where a call is short."""
    return table(measure(case, clock, device=torch.device(device), **BUDGET), ours)


def table(rows: list[dict], ours="") -> pd.DataFrame:
    """A line an implementation: median, p20 and p80 in ms, the median over that of ours (times), and `correct`.

    rows: as `measure` returns them. ours: an implementation; "" is the fastest of ours that is no plain way. `correct`
    is "yes", or what is wrong, and then there is no time.
    """
    right = {row["impl"]: row["median_us"] for row in rows if row["correct"] and row.get("median_us")}
    fast = [impl for impl in right if impl not in (*PEERS, *LIMITS, *PLAIN)] or list(right)
    ours = ours or min(fast, key=right.get, default="")
    lines = []
    for row in rows:
        ms = [row.get(name, float("nan")) / 1e3 for name in ("median_us", "p20_us", "p80_us")]
        said = "yes" if row["impl"] in right else f"no: {row['error'] or row['note'] or 'differs'}"
        lines.append([row["impl"], *ms, 1e3 * ms[0] / right.get(ours, float("nan")), said])
    return pd.DataFrame(lines, columns=["impl", "median ms", "p20 ms", "p80 ms", f"over {ours or 'ours'}", "correct"])
