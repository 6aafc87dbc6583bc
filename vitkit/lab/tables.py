"""Tables from rows of results: a summary, this machine beside the published figures, and Markdown of either."""

import html
import json
import math
from pathlib import Path

import pandas as pd

LIMITS = ("copy", "empty_launch", "in_place_negate")  # what the machine allows


def is_correct(df: pd.DataFrame) -> pd.Series:
    """True where a row's check was green: `correct` as a bool, or as the text that a CSV file holds."""
    return df["correct"].map(lambda value: str(value).strip().lower() == "true").astype(bool)


def _timed(df):
    """Rows that may show a number: the check was green and there is a median."""
    return df[is_correct(df) & pd.to_numeric(df["median_us"], errors="coerce").notna()]


def _varying(df, names):
    return [name for name in names if name in df and df[name].nunique(dropna=False) > 1]


def params(df: pd.DataFrame, name: str, default=None) -> pd.Series:
    """One entry of every row's `params`, which are a dict or the JSON that a CSV file holds."""
    values = df["params"] if "params" in df else pd.Series([None] * len(df), index=df.index)
    read = [json.loads(value) if isinstance(value, str) and value else value or {} for value in values]
    return pd.Series([value.get(name, default) for value in read], index=df.index, dtype=object)


def pick(df: pd.DataFrame, *, section="", direction="fwd", **wanted) -> pd.DataFrame:
    """The rows whose columns, or else whose params, are as asked; None: any. section "" is that of most rows."""
    for name, value in {"section": section, "direction": direction, **wanted}.items():
        if value is not None:
            df = df[(df[name] if name in df else params(df, name, "")) == value]
    return df


def with_shares(df: pd.DataFrame) -> pd.DataFrame:
    """Green rows with D (of their params), and `share`: bandwidth over that of the copy of the same case and clock.

    The copy's own rows are left out, and so are rows without a bandwidth or a copy.
    """
    rows = _timed(df).assign(D=params(_timed(df), "D"))
    rows = rows[pd.to_numeric(rows["gbps"], errors="coerce").gt(0)]
    keys = ["op", "direction", "dtype", "clock", "params", "case"]
    copy = rows[rows["impl"] == "copy"].drop_duplicates(keys, keep="last").set_index(keys)["gbps"].astype(float)
    rows = rows[rows["impl"] != "copy"]
    of_copy = [copy.get(key, float("nan")) for key in rows[keys].itertuples(index=False, name=None)]
    rows = rows.assign(share=rows["gbps"].astype(float) / of_copy)
    return rows[rows["share"].notna()]


def share_table(df: pd.DataFrame) -> pd.DataFrame:
    """A line a head size and number of tokens: every implementation's share of the copy's bandwidth."""
    rows = with_shares(df)
    out = rows.pivot(index=["D", "n_tokens"], columns="impl", values="share")[list(dict.fromkeys(rows["impl"]))]
    out = out.reset_index().rename(columns={"n_tokens": "patches"})
    out.columns.name = None
    return out


def baseline(df: pd.DataFrame) -> str:
    """What is compared with: transformers where it has a time, else the library's own plain way."""
    timed = set(_timed(df)["impl"])
    return next((impl for impl in ("transformers", "reference", "eager") if impl in timed), sorted(timed)[0])


def overview(df: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A line a case, by rising tokens: every implementation's median in µs, the fastest, and its gain on `baseline`.

    Blank where the check was not green. What varies of op, direction, dtype, D, threads and clock comes first.
    """
    df = df.assign(D=params(df, "D", 0), threads=params(df, "threads", 0))
    varying = _varying(df, ["op", "direction", "dtype", "D", "threads", "clock"])
    keys = [*varying, "n_tokens", "n_images", "case"]
    timed = _timed(df).drop_duplicates([*keys, "impl"], keep="last")
    medians = timed.pivot(index=keys, columns="impl", values="median_us").astype(float)
    limits = [impl for impl in LIMITS if impl in medians]
    ways = [impl for impl in medians if impl not in limits]
    out = medians[[*ways, *limits]].add_suffix(" µs")
    out["fastest"] = medians[ways].idxmin(axis=1)
    if baseline in ways:
        out[f"gain on {baseline}"] = medians[baseline] / medians[ways].min(axis=1)
    out = out.reset_index().rename(columns={"n_tokens": "patches", "n_images": "images"})
    out.columns.name = None
    return out


def load_published(root: Path | None = None) -> dict:
    """data/published.json below `root`: for every table its op, title, unit, machine, columns and rows."""
    if root is None:
        from .results import repo_root

        root = repo_root()
    return json.loads((Path(root) / "data" / "published.json").read_text(encoding="utf-8"))


def published(df: pd.DataFrame, table: str, root: Path | None = None) -> pd.DataFrame:
    """The published figures of a table, and beside them this machine's medians in ms, one column an implementation.

    table: a key of data/published.json: rot_pos_ids_gpu, rot_pos_ids_cpu and window_index_gpu have one row a workload;
    rotary one row a kernel, and one column a case of `df`. Every column says on which machine it was measured. Only
    rows of the table's op with a green check count; of several rows for one place the last is taken.
    """
    tables = load_published(root)
    if table not in tables:
        raise ValueError(f"table={table!r}: one of {sorted(tables)} is allowed")
    info = tables[table]
    key, across = info["key"], {"case": "impl", "impl": "case"}[info["key"]]
    columns = [f"{name}, {info['unit']} ({info['machine']}, published)" for name in info["columns"]]
    out = pd.DataFrame.from_dict(info["rows"], orient="index", columns=columns)
    out.index.name = key
    rows = _timed(df)
    rows = rows[(rows["op"] == info["op"]) & rows[key].isin(out.index)]
    extra = _varying(rows, ["direction", "dtype", "clock"])
    for (name, device, *more), group in rows.groupby([across, "device", *extra], sort=False):
        last = group.drop_duplicates(key, keep="last").set_index(key)["median_us"]
        out[", ".join([name, *map(str, more), f"ms ({device})"])] = last.astype(float) / 1000
    return out.reset_index()


def show(df: pd.DataFrame):
    """The whole table as a notebook shows it: all rows and columns, with the texts of the Markdown that is saved.

    Long names may break at an underscore, and a table that is still wider than the page scrolls in a box of its own.
    """
    return _Shown(df)


class _Shown:
    def __init__(self, df):
        self.df = df

    def _repr_mimebundle_(self, include=None, exclude=None):
        text = markdown(self.df)
        return {"text/html": _html(self.df), "text/markdown": text, "text/plain": text}


def _html(df) -> str:
    heads, right, rows = _texts(df)
    to_left = ' align="left" style="text-align: left"'  # GitHub keeps the attribute, JupyterLab looks at the style
    sides = ["" if r else to_left for r in right]

    def line(tag, texts):
        cells = (f"<{tag}{side}>{_breakable(text)}</{tag}>" for side, text in zip(sides, texts))
        return f"<tr>{''.join(cells)}</tr>\n"

    return (
        '<div style="overflow-x: auto; max-width: 100%">\n<table border="1" class="dataframe">\n'
        f"<thead>\n{line('th', heads)}</thead>\n<tbody>\n{''.join(line('td', row) for row in rows)}</tbody>\n"
        "</table>\n</div>"
    )


def _breakable(text) -> str:
    return html.escape(text, quote=False).replace("_", "_<wbr>").replace("\n", "<br>")


def _texts(df):
    """(heads, whether a column goes to the right, rows) as texts; a named index becomes columns."""
    if not isinstance(df.index, pd.RangeIndex):
        df = df.reset_index()
    right = [pd.api.types.is_numeric_dtype(df[c]) and not pd.api.types.is_bool_dtype(df[c]) for c in df.columns]
    rows = [[_cell(value) for value in row] for row in df.itertuples(index=False, name=None)]
    return [_cell(c) for c in df.columns], right, rows


def _cell(value) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):  # numpy's float64 is one; four digits, and no exponent for a large number
        return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def markdown(df: pd.DataFrame) -> str:
    """A GitHub table, numbers to the right, floats with four digits, nothing where there is no value."""
    heads, right, rows = _texts(df)
    escaped = [[text.replace("|", "\\|").replace("\n", "<br>") for text in row] for row in (heads, *rows)]
    lines = [escaped[0], ["---:" if r else "---" for r in right], *escaped[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
