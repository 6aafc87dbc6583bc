"""Figures from rows of results: each function takes a DataFrame and returns a Figure, and reads no file.

A row without a green check, or without a median, is never drawn. An implementation has one colour and one marker in
every figure, so that figures compare at a glance, in grey too.
"""

import json
import textwrap

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .figure import Figure
from .labels import INK, name_lines
from .partition import window_partition
from .shares import accuracy, shares
from .styles import GREY, GRID, LIMITS, STYLES, X_LABELS, marker_size, new_figure, ordered, style
from .tables import is_correct

CHARACTER = 0.0125  # width of one of a bar's name, as a share of the axes

__all__ = ["STYLES", "accuracy", "bandwidth", "latency", "shares", "speedup", "window_partition"]


def _rows(df, what, limits=(), column="median_us", one=("op", "direction", "dtype", "device", "clock")):
    """Rows to draw, numbers as floats; ValueError where nothing is left or the rows are not of one kind."""
    if not len(df):
        raise ValueError(f"{what}: the frame has no row; at least one measured row is allowed")
    rows = df.copy()
    for name in {column, "median_us", "p20_us", "p80_us"} & set(rows):
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    limit = rows["impl"].isin(limits) & (rows["correct"].astype(str).str.lower() != "false")  # a limit needs no check
    rows = rows[(is_correct(rows) | limit) & rows[column].gt(0)]
    if rows["impl"].isin(limits).all():
        raise ValueError(f"{what}: none of the {len(df)} rows has correct=True and a {column}; at least one must")
    kinds = rows[~rows["impl"].isin(limits)]
    for name in one:
        values = sorted(map(str, kinds[name].dropna().unique())) if name in kinds else []
        if len(values) > 1:
            raise ValueError(f"{what}: the frame mixes {name}={values}; one {name} in a figure is allowed")
    twice = kinds[kinds.duplicated(["impl", "case"])]
    if len(twice):
        impl, case = twice[["impl", "case"]].iloc[0]
        raise ValueError(
            f"{what}: more than one row for {impl} at {case!r}; one, such as of the newest run, is allowed"
        )
    return rows


def _params(value):
    try:
        return json.loads(value) if isinstance(value, str) else dict(value or {})
    except (TypeError, ValueError):
        return {}


def _titles(fig, rows, title, what, note, pad=6):
    """Title: op, dtype, what of the shape is common to all rows, device. Small: what is drawn; n, run, environment."""
    only = {name: rows[name].dropna().astype(str).unique() for name in rows}

    def common(name):
        values = only.get(name, [])
        return values[0] if len(values) == 1 and values[0] else ""

    params = [_params(value) for value in rows["params"]] if "params" in rows else [{}]
    shape = ", ".join(f"{k}={v}" for k, v in params[0].items() if k != "section" and all(p.get(k) == v for p in params))
    parts = [common("op"), {"bwd": "backward"}.get(common("direction"), ""), common("dtype"), shape, common("device")]
    n = pd.to_numeric(rows.get("n", pd.Series(dtype=float)), errors="coerce").dropna()
    count = "" if n.empty else f"n={n.min():.0f}" + (f"–{n.max():.0f}" if n.max() > n.min() else "")
    small = [count, f"{common('cache')} cache" if common("cache") else ""]
    small += [f"{label} {common(name)}" for label, name in (("run", "run_id"), ("env", "env_id")) if common(name)]
    title = textwrap.fill(title or ", ".join(filter(None, parts)), 76)
    fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    fig.axes[0].set_title("; ".join(filter(None, [what, note])), fontsize=9, color=GREY, loc="left", pad=pad)
    fig.supxlabel("; ".join(filter(None, small)), fontsize=9, color=GREY, x=0.01, ha="left")


def _plain(value, base):
    """1k, 4k, 16k, 1M: with base 1024 for powers of two, else 1000."""
    for size, unit in ((base**2, "M"), (base, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _log_x(ax, values):
    low, high = min(values), max(values)
    powers = [2**i for i in range(0, 40) if low / 1.5 <= 2**i <= high * 1.5]
    powers = powers[:: -(-len(powers) // 9)] or [low]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(powers))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _plain(v, 1024)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(low / 1.25, high * 1.25)


def _log_y(ax, values):
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    ticks = [s * 10.0**e for e in range(-4, 10) for s in steps]
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low / 2.5 <= t <= high * 2.5]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _plain(v, 1000)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(low / 1.4, high * 1.4)


def _lines(ax, rows, x, y, band, limits):
    """One line an implementation, the limits in grey behind them, each named at its end."""
    others = sorted(set(rows["impl"]) - set(STYLES) - set(limits))
    for impl, group in rows.groupby("impl", sort=False):
        group = group.sort_values([x, y])
        if impl in limits:
            line = dict(color="#808080", ls=LIMITS.get(impl, "-."), lw=1.6, zorder=1, label=f"{impl} (limit)")
            if group[x].nunique() == 1:
                ax.axhline(group[y].median(), **line)
            else:
                ax.plot(group[x], group[y], **line)
            continue
        color, marker = style(impl, others)
        ax.plot(group[x], group[y], color=color, marker=marker, ms=marker_size(marker), mec="white", mew=0.5, lw=1.6,
                label=impl, zorder=3)  # fmt: skip
        if band and {"p20_us", "p80_us"} <= set(group):
            ax.fill_between(group[x], group["p20_us"], group["p80_us"], color=color, alpha=0.2, lw=0, zorder=2)
    name_lines(ax, list(ax.lines))
    ax.grid(True, color=GRID, lw=0.7, zorder=0)


def latency(df, *, x="n_tokens", title=None, limits=("copy", "empty_launch"), xlabel=None) -> Figure:
    """Latency against `x`, both axes logarithmic: median, with p20 to p80 as a band; one line an implementation.

    df: rows of one op, direction, dtype, device and clock. `limits` are implementations to draw as dashed grey lines.
    """
    rows = _rows(df, "latency", limits)
    fig, ax = new_figure(max(4.6, 1.6 + 0.2 * rows["impl"].nunique()))
    _lines(ax, rows, x, "median_us", True, limits)
    _log_x(ax, rows[x])
    _log_y(ax, rows["median_us"])
    clock = rows["clock"].iloc[0] if "clock" in rows else "unknown"
    ax.set_xlabel(xlabel or X_LABELS.get(x, x))
    ax.set_ylabel(f"latency (µs), {clock} clock")
    _titles(fig, rows[~rows["impl"].isin(limits)], title, "median, band p20–p80", "")
    return fig


def bandwidth(df, *, x="n_tokens", title=None, share=None, limits=("copy",), xlabel=None) -> Figure:
    """Bandwidth reached against `x`, from 0: as a share of the copy of the same bytes, or in GB/s.

    share: True, False, or None for a share wherever `df` has a copy for every point. The copy is the dashed line.
    """
    rows = _rows(df, "bandwidth", limits, column="gbps")
    copy = rows[rows["impl"] == "copy"].groupby(x)["gbps"].last()
    impls = rows["impl"] != "copy"
    covered = rows.loc[impls, x].isin(copy.index).all()
    if share and not covered:
        missing = sorted(set(rows.loc[impls, x]) - set(copy.index))
        raise ValueError(f"share=True: {x}={missing} has no copy to compare with; share=False is allowed")
    share = covered if share is None else share
    rows["reached"] = rows["gbps"] / rows[x].map(copy) if share else rows["gbps"]
    rows = rows[rows["reached"].notna()]
    fig, ax = new_figure(max(4.2, 1.6 + 0.2 * rows["impl"].nunique()))
    _lines(ax, rows, x, "reached", False, limits)
    _log_x(ax, rows[x])
    ax.set_ylim(0, rows["reached"].max() * 1.12)
    if share:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    clock = rows["clock"].iloc[0] if "clock" in rows else "unknown"
    ax.set_xlabel(xlabel or X_LABELS.get(x, x))
    ax.set_ylabel(f"bandwidth ({'% of the copy' if share else 'GB/s'}), {clock} clock")
    reaches = dict.fromkeys([f"{copy.min():.0f}", f"{copy.max():.0f}"])
    note = f"the copy reaches {'–'.join(reaches)} GB/s" if share else ""
    _titles(fig, rows[~rows["impl"].isin(limits)], title, "bytes that must move / median", note)
    return fig


def speedup(df, baseline: str, *, title=None, limits=("copy", "empty_launch")) -> Figure:
    """Horizontal bars: how many times faster than `baseline` each implementation is, grouped by case.

    The baseline's own latency stands under the name of its case; a case without a green baseline is left out.
    """
    rows = _rows(df, "speedup", limits)
    rows = rows[~rows["impl"].isin(limits)]
    base = rows[rows["impl"] == baseline].set_index("case")["median_us"]
    if base.empty:
        raise ValueError(f"baseline={baseline!r}: one of {sorted(set(rows['impl']))} is allowed")
    rows = rows[rows["case"].isin(base.index) & (rows["impl"] != baseline)]
    if rows.empty:
        raise ValueError(f"baseline={baseline!r}: no other implementation has a green row for the same case")
    rows["speedup"] = rows["case"].map(base) / rows["median_us"]
    impls = ordered(rows["impl"])
    others = [i for i in impls if i not in STYLES]
    cases = list(dict.fromkeys(rows["case"]))
    step = 0.84 / len(impls)
    fig, ax = new_figure(1.5 + len(cases) * max(0.5, 0.21 * len(impls) + 0.12))
    low, high = min(1, rows["speedup"].min()) / 1.1, max(1, rows["speedup"].max())
    ends = [high]
    for i, impl in enumerate(impls):
        group = rows[rows["impl"] == impl]
        at = [cases.index(case) - 0.42 + step * (i + 0.5) for case in group["case"]]
        # From 1 outwards on a logarithmic axis: twice as slow is as long as twice as fast.
        ax.barh(at, group["speedup"] - 1, left=1, height=step * 0.9, color=style(impl, others)[0], label=impl)
        for y, value in zip(at, group["speedup"]):
            said, end = f"{value:.2f}× {impl}", max(value, 1)
            ax.annotate(said, (end, y), (3, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
            ends.append(low * (end / low) ** (1 / (1 - len(said) * CHARACTER)))  # the axis that has room for the text
    ax.axvline(1, color="#404040", lw=1)
    ax.annotate(f"{baseline} = 1", (1, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", fontsize=9, color=INK)  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(low, max(ends))
    steps = (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [t for t in (s * 10.0**e for e in range(-3, 4) for s in steps) if low <= t <= 1.1 * high]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_yticks(range(len(cases)), [f"{case}\n({_us(base[case])})" for case in cases])
    ax.tick_params(axis="y", length=0)
    clock = rows["clock"].iloc[0] if "clock" in rows else "unknown"
    ax.set_xlabel(f"speedup over {baseline} (times), {clock} clock")
    ax.grid(True, axis="x", color=GRID, lw=0.7)
    _titles(fig, rows, title, f"ratio of medians; in brackets the median of {baseline}", "", pad=20)
    return fig


def _us(value):
    return f"{value / 1000:.3g} ms" if value >= 1000 else f"{value:.3g} µs"
