"""Tables of notebook 6 from its rows and counts: time and efficiency by ranks, where the time goes, what is moved."""

import pandas as pd

from .parallel_cases import PHASES
from .tables import is_correct, params

ONE = "one_process"
PHASE = "mean over the ranks"


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a case, way and number of ranks: columns tower, workload, case, n_tokens, ranks, impl, ms, faster (times
    one process), efficiency (of all ranks: faster / ranks). Blank without a green row of one process."""
    rows = rows[is_correct(rows) & rows["median_us"].gt(0)]
    out = rows[["case", "n_tokens", "impl"]].copy()
    for name in ("tower", "workload", "ranks"):
        out[name] = params(rows, name)
    out["ms"] = rows["median_us"] / 1000
    one = out[out["impl"] == ONE].drop_duplicates("case", keep="last").set_index("case")["ms"]
    out["faster"] = out["case"].map(one) / out["ms"]
    out["efficiency"] = out["faster"] / out["ranks"].astype(int)
    names = ["tower", "workload", "case", "n_tokens", "ranks", "impl", "ms", "faster", "efficiency"]
    return out[names].reset_index(drop=True)


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a case and number of ranks: ms of every way, and how many times faster `frames` is than the others."""
    table = scaling(rows)
    keys = ["case", "n_tokens", "ranks"]
    ms = table.pivot_table(index=keys, columns="impl", values="ms", aggfunc="last", sort=False)
    order = [impl for impl in (ONE, "frames", "whole_images", "whole_images_padded") if impl in ms]
    out = ms[order].add_suffix(" ms")
    for impl in order:
        if impl != "frames" and "frames" in ms:
            out[f"frames over {impl}"] = ms[impl] / ms["frames"]
    out.columns.name = None
    one = ms[ONE].groupby("case").last() if ONE in ms else pd.Series(dtype=float)
    out = out.reset_index().rename(columns={"n_tokens": "patches"})
    if "frames" in ms:
        out["efficiency"] = out["case"].map(one) / out["frames ms"] / out["ranks"].astype(int)
    return out


def phases(counts: pd.DataFrame) -> pd.DataFrame:
    """A line a case, way and number of ranks: ms of each phase, the mean over the ranks, and `gathering`, the share of
    all that `wait` and `gather` take."""
    rows = _split(counts[counts["metric"].str.endswith(PHASE)])
    rows = rows.assign(phase=rows["metric"].str.split(",").str[0], ms=rows["value"] / 1000)
    keys = ["case", "ranks", "impl"]
    out = rows.pivot_table(index=keys, columns="phase", values="ms", aggfunc="last", sort=False)
    out = out.reindex(columns=list(PHASES))
    out["gathering"] = (out["wait"] + out["gather"]) / out[list(PHASES)].sum(axis=1)
    out.columns.name = None
    return out.reset_index()


def moved(counts: pd.DataFrame) -> pd.DataFrame:
    """A line a case, way and number of ranks: the largest load over the mean, MB uploaded and gathered."""
    names = {
        "largest load over the mean": "largest load over the mean",
        "bytes of pixels uploaded by the busiest rank": "MB of pixels uploaded by the busiest rank",
        "bytes of features gathered": "MB of features gathered",
    }
    rows = _split(counts[counts["metric"].isin(names)])
    rows = rows.assign(value=rows["value"] / rows["unit"].map({"bytes": 1e6}).fillna(1.0))
    keys = ["case", "ranks", "impl"]
    out = rows.pivot_table(index=keys, columns="metric", values="value", aggfunc="last", sort=False)
    out = out.reindex(columns=list(names)).rename(columns=names)
    out.columns.name = None
    return out.reset_index()


def _split(counts):
    """With columns impl and ranks, of the version "impl, ranks=n"."""
    both = counts["version"].str.extract(r"^(?P<impl>\w+), ranks=(?P<ranks>\d+)$")
    return counts.assign(impl=both["impl"], ranks=both["ranks"].astype("Int64"))
