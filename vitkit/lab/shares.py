"""Figures of shares: of the error that is allowed, and of the copy's bandwidth."""

from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from .figure import WIDTH, Figure
from .labels import INK
from .styles import GREY, GRID, STYLES, marker_size, new_figure, ordered, style


def accuracy(df, *, title=None) -> Figure:
    """Share of the error allowed: a panel a dtype, a row an implementation, a mark a head size; right of 1 is red.

    df: columns dtype, D, impl, share (as `rotary_cases.rotary_accuracy` gives them).
    """
    if not len(df):
        raise ValueError("accuracy: the frame has no row; at least one is allowed")
    dtypes, impls, dims = list(dict.fromkeys(df["dtype"])), list(dict.fromkeys(df["impl"])), sorted(set(df["D"]))
    others = sorted(set(impls) - set(STYLES))
    high = 0.085 * max(3, len(dims))  # of a row, in inches: no mark lies on another
    fig = Figure(figsize=(WIDTH, 1.5 + high * len(impls)), layout="constrained")
    panels = fig.subplots(1, len(dtypes), sharex=True, sharey=True, squeeze=False)[0]
    for ax, dtype in zip(panels, dtypes):
        for i, impl in enumerate(impls):
            colour, marker = style(impl, others)
            mine = df[(df["dtype"] == dtype) & (df["impl"] == impl)]
            at = [i + 0.84 * ((dims.index(dim) + 0.5) / len(dims) - 0.5) for dim in mine["D"]]
            options = {
                "marker": marker,
                "ms": 0.75 * min(7, marker_size(marker)),
                "mew": 0.5,
                "ls": "",
                "color": colour,
            }
            ax.plot(mine["share"], at, label=impl, **options)
        for i in range(1, len(impls)):
            ax.axhline(i - 0.5, color=GRID, lw=0.7, zorder=0)
        ax.axvline(1, color=GREY, ls="--", lw=1.4, zorder=1, label="allowed")
        ax.annotate("allowed", (1, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
                    ha="center", fontsize=9, color=INK)  # fmt: skip
        ax.set_title(dtype, fontsize=10, loc="left")
        ax.grid(axis="x", color=GRID, lw=0.7)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_axisbelow(True)
    panels[0].set_ylim(len(impls) - 0.5, -0.5)
    panels[0].set_yticks(range(len(impls)), impls)
    panels[0].set_xlim(-0.04, max(1.2, 1.1 * df["share"].max()))
    panels[0].xaxis.set_major_locator(MaxNLocator(3))
    for ax in panels:
        ax.tick_params(axis="y", length=0)
    order = f"; the marks of a row, from above: D = {', '.join(map(str, dims))}" if len(dims) > 1 else ""
    fig.supxlabel(f"error / error allowed (ratio){order}", fontsize=10)
    fig.suptitle(title or "Error against float64", fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig


def shares(df, *, by="D", ylabel="bandwidth (% of the copy)", xlabel="head size (entries)", title=None) -> Figure:
    """Horizontal bars: the share of the copy's bandwidth that each implementation reaches, grouped by `by`.

    df: columns impl, share and `by`, one row for each pair (as `tables.with_shares` gives them). ylabel names the
    share, xlabel the groups.
    """
    if not len(df):
        raise ValueError("shares: the frame has no row; at least one is allowed")
    if df.duplicated(["impl", by]).any():
        raise ValueError(f"shares: more than one row for an implementation and {by}; one is allowed")
    impls = ordered(df["impl"])
    others = [i for i in impls if i not in STYLES]
    places = {value: i for i, value in enumerate(sorted(df[by].unique()))}
    step = 0.84 / len(impls)
    fig, ax = new_figure(1.2 + len(places) * max(0.5, 0.19 * len(impls) + 0.1))
    for i, impl in enumerate(impls):
        mine = df[df["impl"] == impl]
        at = [places[value] - 0.42 + step * (i + 0.5) for value in mine[by]]
        colour = style(impl, others)[0]
        ax.barh(at, mine["share"], height=step * 0.92, color=colour, label=impl)
        ink = "white" if _luminance(colour) < 0.2 else "black"
        for y, share in zip(at, mine["share"]):
            where = {"textcoords": "offset points", "va": "center", "fontsize": 9}
            ax.annotate(impl, (0, y), (4, 0), color=ink, **where)
            ax.annotate(f"{share:.1%}", (share, y), (-4, 0), ha="right", color=ink, **where)
    ax.axvline(1, color=GREY, ls="--", lw=1.4)
    ax.annotate("copy (limit)", (1, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", fontsize=9, color=INK)  # fmt: skip
    ax.set_yticks(range(len(places)), [str(value) for value in places])
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlim(0, max(1.08, 1.05 * df["share"].max()))
    ax.set_ylabel(xlabel)
    ax.set_xlabel(ylabel)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID, lw=0.7)
    fig.suptitle(title or "Share of the copy's bandwidth", fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig


def _luminance(colour):
    """Of WCAG 2, from 0 to 1: white text has more contrast below 0.18, black above."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
