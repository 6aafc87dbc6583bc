"""Figures of shares: of the error that is allowed, and of the copy's bandwidth."""

from matplotlib.colors import to_rgb

from .figure import Figure
from .styles import GREY, GRID, STYLES, marker_size, new_figure, style


def accuracy(df, *, title=None) -> Figure:
    """Share of the error allowed, one line an implementation, over dtype and head size; above the dashed 1 is red.

    df: columns dtype, D, impl, share (as `rotary_cases.rotary_accuracy` gives them).
    """
    if not len(df):
        raise ValueError("accuracy: the frame has no row; at least one is allowed")
    names = [(dtype, dim) for dtype, dim in zip(df["dtype"], df["D"])]
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    others = sorted(set(df["impl"]) - set(STYLES))
    fig, ax = new_figure(4.2)
    impls = list(dict.fromkeys(df["impl"]))
    for i, impl in enumerate(impls):
        colour, marker = style(impl, others)
        mine = [(places[name], share) for name, share, who in zip(names, df["share"], df["impl"]) if who == impl]
        step = min(0.12, 0.8 / len(impls))
        x = [place + step * (i - (len(impls) - 1) / 2) for place, _ in mine]  # side by side: many are equal
        options = {"marker": marker, "ms": marker_size(marker), "ls": "", "color": colour, "label": impl}
        ax.plot(x, [share for _, share in mine], **options)
    ax.axhline(1, color=GREY, linestyle="--", label="allowed")
    ax.set_xticks(range(len(places)), [dim for _, dim in places], fontsize=9)
    for dtype in dict.fromkeys(df["dtype"]):
        at = [i for (name, _), i in places.items() if name == dtype]
        ax.annotate(
            dtype,
            (sum(at) / len(at), 0),
            (0, -24),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
        )
        ax.axvline(at[-1] + 0.5, color=GRID)
    ax.set_ylim(0, max(1.15, 1.1 * df["share"].max()))
    ax.set_xlabel("head size (entries) and dtype", labelpad=20)
    ax.set_ylabel("error / error allowed (ratio)")
    ax.grid(axis="y", color=GRID)
    ax.set_title(title or "Error against float64", loc="left", fontsize=11, fontweight="bold")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return fig


def shares(df, *, by="D", ylabel="bandwidth (% of the copy)", xlabel="head size (entries)", title=None) -> Figure:
    """Grouped bars: the share of the copy's bandwidth that each implementation reaches, for every value of `by`.

    df: columns impl, share and `by`, one row for each pair (as `tables.with_shares` gives them).
    """
    if not len(df):
        raise ValueError("shares: the frame has no row; at least one is allowed")
    if df.duplicated(["impl", by]).any():
        raise ValueError(f"shares: more than one row for an implementation and {by}; one is allowed")
    impls = [*[i for i in STYLES if i in set(df["impl"])], *sorted(set(df["impl"]) - set(STYLES))]
    others = [i for i in impls if i not in STYLES]
    places = {value: i for i, value in enumerate(sorted(df[by].unique()))}
    step = 0.84 / len(impls)
    fig, ax = new_figure(4.4)
    for i, impl in enumerate(impls):
        mine = df[df["impl"] == impl]
        at = [places[value] - 0.42 + step * (i + 0.5) for value in mine[by]]
        colour = style(impl, others)[0]
        ax.bar(at, mine["share"], width=step * 0.92, color=colour, label=impl)
        ink = "white" if sum(to_rgb(colour)) < 1.6 else "black"
        for x, share in zip(at, mine["share"]):
            text = {"ha": "center", "va": "top", "rotation": 90, "fontsize": 9, "color": ink}
            ax.annotate(f"{share:.2f}", (x, share), (0, -4), textcoords="offset points", **text)
    ax.axhline(1, color=GREY, linestyle="--", label="copy (limit)")
    ax.set_xticks(range(len(places)), [str(value) for value in places])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, max(1.08, 1.05 * df["share"].max()))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(axis="y", color=GRID, lw=0.7)
    ax.set_title(title or "Share of the copy's bandwidth", loc="left", fontsize=11, fontweight="bold")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
    return fig
