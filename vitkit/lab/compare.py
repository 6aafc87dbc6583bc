"""`python -m vitkit compare RUN RUN`: what changed between two runs, or between the newest runs of two machines.

Rows are matched by notebook, op, implementation, direction, dtype, case, grid, params, clock and cache. Each has a
median and the p20 and p80 of its samples. Where the two spans from p20 to p80 touch, the change is within the noise;
only where they lie apart is a row faster or slower.
"""

import pandas as pd

from . import results, runs
from .before_after import geomean
from .tables import is_correct, markdown, params

SAME = ["notebook", "op", "impl", "direction", "dtype", "case", "grid_thw", "params", "clock", "cache"]
NOISE, FASTER, SLOWER, FAILED = "within the noise", "faster", "slower", "failed"
COUNTED = ["notebook", "case", "version", "metric"]


def write(first: str, second: str, *, root=None, every=False) -> str:
    """What changed from `first` to `second`, as Markdown; every: with the rows that changed within the noise.

    first, second: the id of a run, or the name of a device, which stands for its newest run of every notebook. root:
    the folder with data/; None is the repository. ValueError names what there is.
    """
    there = runs.finished(root or results.repo_root())
    old, new = (pick(there, name) for name in (first, second))
    table, alone = match(_rows(old), _rows(new))
    a, b = label(old, first), label(new, second)
    if not len(table) and len(alone):
        raise ValueError(f"{first!r} and {second!r} have no row in common: two runs of one notebook are allowed")
    out = [f"# {b} against {a}", _table_of_runs(old, new)]
    out.append("A change is within the noise where the spans from p20 to p80 touch; a ratio above 1 is slower.")
    out += ["## By op and implementation", markdown(summary(table)).rstrip()]
    shown = table if every else table[table["change"] != NOISE]
    timed = shown[shown["change"] != FAILED]
    out += ["## Rows" if every else "## Rows that changed by more than the noise"]
    out.append(_shown(timed, a, b) if len(timed) else "None.")
    out += ["## Rows that failed their check", "\n".join(_failures(old, new)) or "None."]
    if len(alone):
        sides = alone.groupby(["side", "notebook", "op", "impl"], sort=False).size().reset_index(name="rows")
        sides["side"] = sides["side"].map({"first": f"only {a}", "second": f"only {b}"})
        out += ["## Rows of one side alone", markdown(sides).rstrip()]
    counts = changed_counts(old, new)
    if len(counts):
        out += ["## Counts that changed", markdown(counts.rename(columns={"first": a, "second": b})).rstrip()]
    return "\n\n".join(out) + "\n"


def pick(there, name: str) -> list:
    """The run of this id, or the newest run of every notebook on the device of this name."""
    devices = sorted({one.device for one in there})
    if name in devices:
        return runs.newest_of(there, name)
    found = [one for one in there if one.run_id == name]
    if not found:
        ids = ", ".join(f"{one.run_id} ({one.notebook}, {one.device})" for one in there)
        raise ValueError(f"run={name!r}: a device ({', '.join(devices)}) or the id of a run is allowed: {ids}")
    return found


def match(old: pd.DataFrame, new: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(rows of both, rows of one side alone), with the columns of SAME.

    The former have median_us, p20_us, p80_us and green of either side with the suffixes _a and _b, "ratio" (b over a)
    and "change", one of NOISE, FASTER, SLOWER and FAILED (either side's check was red, or there is no time).
    """
    keep = [*SAME, "median_us", "p20_us", "p80_us", "green"]
    old, new = (df.drop_duplicates(SAME, keep="last")[keep] for df in (old, new))
    both = old.merge(new, on=SAME, suffixes=("_a", "_b"))
    sides = old[SAME].assign(side="first"), new[SAME].assign(side="second")
    alone = pd.concat(sides, ignore_index=True).drop_duplicates(SAME, keep=False, ignore_index=True)
    both["ratio"] = (both["median_us_b"] / both["median_us_a"]).where(both["green_a"] & both["green_b"])
    both["change"] = [change(row) for row in both.itertuples()]
    return both, alone


def change(row) -> str:
    """How a matched row changed."""
    if not (row.green_a and row.green_b):
        return FAILED
    if row.p20_us_b > row.p80_us_a:
        return SLOWER
    return FASTER if row.p80_us_b < row.p20_us_a else NOISE


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A line an op, implementation, direction and clock: how many rows changed which way, and the mean ratio."""
    lines = []
    for key, group in table.groupby(["op", "impl", "direction", "clock"], sort=False):
        line = dict(zip(("op", "impl", "direction", "clock"), key)) | {"rows": len(group)}
        line |= {name: int((group["change"] == name).sum()) for name in (FASTER, SLOWER, NOISE, FAILED)}
        lines.append(line | {"geometric mean of the ratios": geomean(group["ratio"].dropna())})
    return pd.DataFrame(lines)


def changed_counts(old, new) -> pd.DataFrame:
    """Counts of both sides that differ, whole numbers at all, others by more than 2 %: COUNTED, first and second."""
    sides = []
    for name, side in (("first", old), ("second", new)):
        all_counts = pd.concat([one.counts.assign(notebook=one.notebook) for one in side])
        sides.append(
            all_counts.drop_duplicates(COUNTED, keep="last")[[*COUNTED, "value"]].rename(columns={"value": name})
        )
    both = sides[0].merge(sides[1], on=COUNTED)
    same = both["first"].eq(both["second"]) | (both["first"].isna() & both["second"].isna())
    whole = both["first"].mod(1).eq(0) & both["second"].mod(1).eq(0)
    same |= ~whole & both["second"].sub(both["first"]).abs().le(0.02 * both["first"].abs())
    return both[~same].reset_index(drop=True)


def label(side, name: str) -> str:
    """How a side is called in the tables."""
    return name if name == side[0].device else f"{side[0].notebook} {name}"


def _rows(side) -> pd.DataFrame:
    rows = pd.concat([one.rows.assign(notebook=one.notebook) for one in side], ignore_index=True)
    return rows.assign(green=is_correct(rows) & rows["median_us"].gt(0))


def _table_of_runs(old, new) -> str:
    lines = [
        {"side": side, "device": one.device, "notebook": one.notebook, "run": one.run_id, "rows": len(one.rows)}
        | {"code": ", ".join(h[:12] for h in one.code_hashes), "environment": ", ".join(one.env_ids)}
        for side, several in (("first", old), ("second", new))
        for one in several
    ]
    return markdown(pd.DataFrame(lines)).rstrip()


def _shown(table, a, b) -> str:
    out = table.assign(
        D=params(table, "D", 0), threads=params(table, "threads", 0), section=params(table, "section", "")
    )
    varying = [name for name in ("direction", "dtype", "clock", "D", "threads", "section") if out[name].nunique() > 1]
    for side, name in (("a", a), ("b", b)):
        columns = (out[f"{of}_us_{side}"] for of in ("median", "p20", "p80"))
        out[f"{name}, µs (p20 to p80)"] = [f"{m:.4g} ({lo:.4g} to {hi:.4g})" for m, lo, hi in zip(*columns)]
    named = [f"{name}, µs (p20 to p80)" for name in (a, b)]
    return markdown(out[["op", "impl", *varying, "case", *named, "ratio", "change"]].reset_index(drop=True)).rstrip()


def _failures(old, new):
    for side, several in (("first", old), ("second", new)):
        for one in several:
            yield from (f"- {side}, {one.device}, {one.notebook} {line}" for line in one.failed())
