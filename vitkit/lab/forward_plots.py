"""Figures of notebook 5: what every part of an accelerated forward gains, and the error layer by layer."""

import pandas as pd

from .figure import WIDTH, Figure
from .labels import INK, name_lines_once
from .overview import duration
from .plots import _rows, _titles
from .styles import GRID, STYLES, marker_size, style
from .tables import params

BAR = 0.27  # inches a bar


def waterfall(df, *, title=None) -> Figure:
    """A panel a case, a bar a version in the order of the rows, from 0: ms a forward, with p20 to p80.

    Beside every bar its gain on the one above, and on the first. The dashed line is the arithmetic limit.
    df: rows of one tower (as `forward_tables.with_limit` gives them; without its column limit_us no line).
    """
    rows = _rows(df, "waterfall")
    cases = list(dict.fromkeys(rows["case"]))
    counts = [sum(rows["case"] == case) for case in cases]
    heights = [BAR * (n + 1) + 0.62 for n in counts]
    fig = Figure(figsize=(WIDTH, sum(heights) + 1.1), layout="constrained")
    panels = fig.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    _titles(fig, rows, title or _tower_title(rows), "", "")
    for ax, case in zip(panels, cases):
        _bars(ax, rows[rows["case"] == case])
        ax.set_title(case, fontsize=10, loc="left", color="black")
    clock = rows["clock"].iloc[0] if "clock" in rows else "unknown"
    ax.set_xlabel(f"ms a forward (median, p20–p80), {clock} clock")
    return fig


def _bars(ax, rows):
    """The bars of one case, their gains, and the limit, which is named below the bars."""
    ms = [us / 1000 for us in rows["median_us"]]
    others = [impl for impl in rows["impl"] if impl not in STYLES]
    colours = [style(impl, others)[0] for impl in rows["impl"]]
    ends = {name: rows[name].fillna(rows["median_us"]) / 1000 for name in ("p20_us", "p80_us") if name in rows}
    whiskers = [ms - ends["p20_us"], ends["p80_us"] - ms] if len(ends) == 2 else None
    error = {"ecolor": "#404040", "lw": 0.8, "capsize": 2}
    ax.barh(range(len(ms)), ms, height=0.78, color=colours, xerr=whiskers, error_kw=error)
    for i, value in enumerate(ms):
        at = max(value, ends["p80_us"].iloc[i]) if whiskers else value
        said = duration(1000 * value) + (f"   ×{ms[i - 1] / value:.2f}   ×{ms[0] / value:.2f} in all" if i else "")
        ax.annotate(said, (at, i), (5, 0), textcoords="offset points", va="center", fontsize=9)
    limit = rows["limit_us"].dropna() / 1000 if "limit_us" in rows else pd.Series(dtype=float)
    if len(limit):
        ax.axvline(limit.iloc[0], color="#404040", ls="--", lw=1.4, label="arithmetic limit")
        said, where = f"arithmetic limit {duration(1000 * limit.iloc[0])}", (limit.iloc[0], len(ms) - 0.1)
        ax.annotate(said, where, (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    ax.set_yticks(range(len(ms)), rows["impl"])
    ax.set_ylim(len(ms) + (0.35 if len(limit) else -0.5), -0.5)
    ax.set_xlim(0, 1.45 * max(ms))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, axis="x", color=GRID, lw=0.7)
    ax.set_axisbelow(True)


def _tower_title(rows):
    first = {name: values.iloc[0] for name, values in rows.items()}
    tower, layers = (params(rows, name, "").iloc[0] for name in ("tower", "layers"))
    parts = [f"Vision tower of {tower}" if tower else "", f"{layers} layers" if layers else ""]
    return ", ".join(filter(None, [*parts, str(first.get("dtype", "")), str(first.get("device", ""))]))


def layers(df, *, title=None) -> Figure:
    """The relative error of every block's output against float32, a line a version, a panel a case.

    df: columns case, layer, version, error (as `forward_cases.accuracy_rows` gives them).
    """
    if not len(df):
        raise ValueError("layers: the frame has no row; at least one is allowed")
    if df.duplicated(["case", "layer", "version"]).any():
        raise ValueError("layers: more than one row for a case, layer and version; one is allowed")
    cases = list(dict.fromkeys(df["case"]))
    others = sorted(set(df["version"]) - set(STYLES))
    fig = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    panels = fig.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    for ax, case in zip(panels, cases):
        for i, (version, group) in enumerate(df[df["case"] == case].groupby("version", sort=False)):
            colour, marker = style(version, others)
            group = group.sort_values("layer")
            # lines may lie on each other: each is thinner than the one below, and has its marks at other layers
            options = {"color": colour, "marker": marker, "ms": marker_size(marker), "lw": max(1.2, 3.6 - 2.4 * i)}
            every = max(1, len(group) // 8)
            marks = ((i * every) // max(1, df["version"].nunique()), every)
            ax.plot(group["layer"], group["error"], mec="white", mew=0.5, markevery=marks, label=version, **options)
        ax.set_title(case, fontsize=10, loc="left")
        ax.set_xlabel("layer (number)")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color=GRID, lw=0.7)
        ax.set_axisbelow(True)
    top = df["error"].max()
    panels[0].set_ylim(0, 1.1 * top if top > 0 else 1)
    panels[0].set_ylabel("relative error of the block's output")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    name_lines_once(panels)
    fig.suptitle(title or "Error against float32, layer by layer", fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig
