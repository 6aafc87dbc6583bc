"""Tables for a writeup, from the rows of one run: before, after and speedup of every workload, and their means."""

import json
import math
import re

import pandas as pd

from .overview import LIMITS
from .peers import PEERS
from .tables import baseline, is_correct, params

ALONE, SHARED = "one_process", "whole_images_padded"  # today's ways of encoding a batch, on one rank and on several
IN_USE = ("reference", "eager", SHARED, "whole_images", ALONE)  # today's ways, in this library's words
WHOLE = ("auto", "accelerate", "frames")  # what a user gets who chooses nothing
OTHER_CALLS = ("in_place", "from_pos", "low")  # the same rotation by another call: not set against the plain one
SERIES = ("direction", "clock", "dtype", "D", "threads", "ranks")  # what tells the series of one op apart
SAME = ["op", "direction", "dtype", "clock", "cache", "case", "grid_thw", "params"]
FAILED = "failed"
OWN = r"(?:.*, )?(?:own (?:line|batch) |given$)"  # cases named by `workloads.read_grids`; a tower stands before a comma


def plain(rows: pd.DataFrame, section="") -> pd.DataFrame:
    """The rows of one section; "" is that of most rows."""
    return rows[params(rows, "section", "").eq(section)]


def kinds(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each op that is no limit, with what tells its series apart."""
    rows = plain(rows)
    rows = rows.assign(**{name: params(rows, name, 0) for name in SERIES[3:]})
    return {op: group for op, group in rows.groupby("op", sort=False) if op not in LIMITS}


def after(rows: pd.DataFrame, before: str) -> str | None:
    """Which of this library's ways stands as "after": the one that chooses by itself where it was measured, else the
    one with the largest geometric mean of its speedups among those that served the most workloads; None without one."""
    names = [impl for impl in dict.fromkeys(rows["impl"]) if impl not in (*PEERS, *LIMITS, *IN_USE, before)]
    names = [impl for impl in names if not any(word in impl for word in OTHER_CALLS)]
    for impl in WHOLE:
        if impl in names:
            return impl
    medians = _medians(rows)
    if before not in medians:
        return names[0] if names else None
    gains = {impl: (medians[before] / medians[impl]).dropna() for impl in names if impl in medians}
    return max(gains, key=lambda impl: (len(gains[impl]), geomean(gains[impl])), default=None)


def compare_ways(rows: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """(a line a workload, before, after) for the rows of one op, as `kinds` gives them.

    Columns: what varies of SERIES, then patches, images, case, "before µs", "after µs" and "speedup". "fastest other"
    is the fastest way that is not ours, and "over it" our speedup over that. "failed" stands where a check was red; a
    workload is in the table as soon as either side has a row.
    """
    before = baseline(rows) if is_correct(rows).any() else next(iter(rows["impl"]))
    before = next((impl for impl in (SHARED, ALONE) if impl in set(rows["impl"])), before)
    ours = after(rows, before)
    others = [impl for impl in dict.fromkeys(rows["impl"]) if impl in (*PEERS, *IN_USE, before)]
    varying = [name for name in SERIES if rows[name].nunique() > 1]
    lines = []
    for _, group in rows[rows["impl"].isin([ours, *others])].groupby(SAME, sort=False):
        first = group.iloc[0]
        line = {name: first[name] for name in varying}
        line |= {"patches": first["n_tokens"], "images": first["n_images"], "case": named(first)}
        old, new = _median(group, before), _median(group, ours)
        line |= {"before µs": old, "after µs": new, "speedup": _over(old, new)}
        times = {impl: _median(group, impl) for impl in others}
        times = {impl: us for impl, us in times.items() if isinstance(us, float)}
        best = min(times, key=times.get, default=None)
        line |= {"fastest other": best, "over it": _over(times.get(best), new)}
        lines.append(line)
    out = pd.DataFrame(lines)
    return out.sort_values([*varying, "patches", "images"], ignore_index=True), before, ours


def own_grids(rows: pd.DataFrame) -> dict[str, list]:
    """{case: grid_thw} of the user's own grids (-p grids)."""
    own = rows[rows["case"].astype(str).str.match(OWN)]
    return dict(zip(own["case"], own["grid_thw"].map(_as_list)))


def named(row) -> str:
    """The case, and for the user's own, whose names only count lines, up to three of its t x h x w."""
    if not re.match(OWN, str(row["case"])):
        return row["case"]
    grid = _as_list(row["grid_thw"])
    shapes = ", ".join("x".join(map(str, image)) for image in grid[:3])
    return f"{row['case']}: {shapes}{f' and {len(grid) - 3} more' if len(grid) > 3 else ''}"


def _as_list(grid_thw) -> list:
    return json.loads(grid_thw) if isinstance(grid_thw, str) else grid_thw


def means(table: pd.DataFrame) -> pd.DataFrame:
    """A line a series of a `compare_ways` table: workloads, geometric mean, extremes, and how many became slower."""
    names = [name for name in SERIES if name in table]
    groups = table.groupby(names, sort=False) if names else [((), table)]
    lines = []
    for key, group in groups:
        gains = group["speedup"].dropna().astype(float)
        line = dict(zip(names, key)) | {"workloads": len(group), "with a speedup": len(gains)}
        line |= {"geometric mean": geomean(gains), "smallest": gains.min(), "largest": gains.max()}
        line |= {"slower than before": int(gains.lt(1).sum())}
        rival = group["over it"].dropna().astype(float)
        line |= {"over the fastest other": geomean(rival), "slower than that": int(rival.lt(1).sum())}
        lines.append(line)
    return pd.DataFrame(lines)


def geomean(values) -> float:
    values = [math.log(value) for value in values]
    return math.exp(sum(values) / len(values)) if values else float("nan")


def kernel_table(rows: pd.DataFrame, published: dict) -> pd.DataFrame:
    """The kernels at the published shape: median, p20 and p80 in ms and the speedup over `triton_separate`, with the
    published mean and median beside them. published: the entry of data/published.json. Empty without such rows.

    Rows hold no mean; red rows say so instead of a time.
    """
    rows = plain(rows, "published")
    if rows.empty:
        return rows
    lines, separate = [], _median(rows, "triton_separate")
    for row in rows.drop_duplicates("impl", keep="last").itertuples():
        median = _median(rows, row.impl)
        line = {"kernel": row.impl}
        for name, ms in zip(published["columns"], published["rows"].get(row.impl, [None] * 2)):
            line[f"published {name}, ms ({published['machine']})"] = ms
        if isinstance(median, float):
            line |= {"median, ms": median / 1e3, "p20": row.p20_us / 1e3, "p80": row.p80_us / 1e3}
        else:
            line |= {"median, ms": median}
        line["speedup over triton_separate"] = None if row.impl in LIMITS else _over(separate, median)
        lines.append(line)
    out = pd.DataFrame(lines)
    return out.sort_values("kernel", key=lambda names: names.map(_kernel_order), kind="stable", ignore_index=True)


def _kernel_order(impl):
    """The two published kernels, our other ways, what others have, and the limits last."""
    first = ("triton_separate", "triton")
    if impl in first:
        return first.index(impl)
    return 4 if impl in LIMITS else 3 if impl in (*PEERS, *IN_USE) else 2


def _medians(rows):
    green = rows[is_correct(rows) & rows["median_us"].gt(0)]
    return green.pivot_table(index=SAME, columns="impl", values="median_us", aggfunc="last")


def _median(group, impl):
    """µs of the last row of `impl`, "failed" where it was red, None where there is none."""
    mine = group[group["impl"] == impl]
    if mine.empty:
        return None
    last = mine.iloc[-1]
    green = last["correct"] is True or str(last["correct"]).lower() == "true"
    return float(last["median_us"]) if green and last["median_us"] > 0 else FAILED


def _over(old, new):
    return old / new if isinstance(old, float) and isinstance(new, float) else None
