"""Tables of notebook 5 from rows of results: the limit of every forward, gains, and what others have measured."""

import json
from pathlib import Path

import pandas as pd

from . import results
from .forward_arms import THEIRS
from .tables import is_correct, params

OURS = "accelerate"


def with_limit(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of forwards with `limit_us`: their matrix products at the speed of the large one in their dtype.

    NaN where no such product was measured, or its check was not green.
    """
    flop = params(rows, "flop").astype(float)
    green = is_correct(rows) & rows["median_us"].gt(0)
    large = green & rows["op"].eq("matmul")
    speed = (flop[large] / rows.loc[large, "median_us"]).groupby(rows.loc[large, "dtype"]).last()  # FLOP a us
    forwards = rows["op"].eq("accelerate")
    return rows[forwards].assign(limit_us=flop[forwards] / rows.loc[forwards, "dtype"].map(speed).astype(float))


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a case: medians in ms of transformers' versions and of ours, our gain on each (times), the arithmetic
    limit in ms, and our time over it (times). Blank where a check was not green."""
    rows = with_limit(rows)
    timed = rows[is_correct(rows) & rows["median_us"].gt(0)]
    ms = timed.pivot_table(index="case", columns="impl", values="median_us", aggfunc="last", sort=False) / 1000
    limit = rows.drop_duplicates("case").set_index("case")["limit_us"] / 1000
    theirs = [impl for impl in THEIRS if impl in ms]
    out = ms.reindex(columns=[*theirs, OURS]).add_suffix(" ms")
    for impl in theirs:
        out[f"gain on {impl}"] = ms[impl] / out[f"{OURS} ms"]
    out["limit ms"] = limit
    out["times the limit"] = out[f"{OURS} ms"] / out["limit ms"]
    out.columns.name = None
    return out.reset_index()


def published(rows: pd.DataFrame, root=None) -> pd.DataFrame:
    """The forwards of data/published_forward.json, and this machine's beside them: a line a case, all in ms.

    Of this machine's only those of whole towers: a narrow one with fewer layers is another thing.
    """
    path = Path(root or results.repo_root()) / "data" / "published_forward.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    tables = info["tables"]
    out = pd.DataFrame(index=pd.Index(dict.fromkeys(case for t in tables for case in t["rows"]), name="case"))
    for table in tables:
        for i, column in enumerate(table["columns"]):
            name = f"{column}, ms ({table['machine']}, {table['kind']})"
            out[name] = pd.Series({case: values[i] for case, values in table["rows"].items()}, dtype=float)
    mine = rows[rows["op"].eq("accelerate") & is_correct(rows) & rows["case"].isin(out.index)]
    mine = mine[params(mine, "layers").eq(info["layers"])]
    for (impl, device), group in mine.groupby(["impl", "device"], sort=False):
        last = group.drop_duplicates("case", keep="last").set_index("case")["median_us"]
        out[f"{impl}, ms ({device})"] = last.astype(float) / 1000
    return out.reset_index()
