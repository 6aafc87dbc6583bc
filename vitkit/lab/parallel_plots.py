"""Figures of notebook 6: each rank's load by frame, time and efficiency by ranks, and where the time goes."""

from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from .figure import WIDTH, Figure
from .labels import INK, name_lines_once
from .parallel_cases import PHASES
from .styles import GRID

COLOURS = {"one_process": "#000000", "frames": "#0072B2", "whole_images": "#E69F00", "whole_images_padded": "#882255"}
MARKERS = {"one_process": "o", "frames": "s", "whole_images": "^", "whole_images_padded": "v"}
RANKS = [("#56B4E9", "s", "-"), ("#4A90D9", "D", "--"), ("#0072B2", "^", "-."), ("#08306B", "v", ":")]  # 1, 2, 4, 8
PHASE_COLOURS = dict(zip(PHASES, ("#888888", "#56B4E9", "#0072B2", "#E69F00", "#661100")))
SHADES = ("#0072B2", "#56B4E9", "#009E73", "#DDCC77", "#332288", "#CC79A7")  # of images, in turn


def balance(df, *, title=None) -> Figure:
    """A panel a batch and way, a bar a rank, a segment a frame, in the colour of its image; the mean load is 1.

    df: columns kind, name, version, rank, image, frame, load (as `parallel_cases.balance` gives them).
    """
    if not len(df):
        raise ValueError("balance: the frame has no row; at least one is allowed")
    names, versions = list(dict.fromkeys(df["name"])), list(dict.fromkeys(df["version"]))
    world = int(df["rank"].max()) + 1
    fig, panels = _grid(len(names), len(versions), 0.9 + 0.16 * world, sharex="row")
    for line, name in zip(panels, names):
        for ax, version in zip(line, versions):
            rows = df[(df["name"] == name) & (df["version"] == version)].sort_values(["rank", "image", "frame"])
            left = rows.groupby("rank")["load"].cumsum() - rows["load"]
            colours = [SHADES[i % len(SHADES)] for i in rows["image"]]
            ax.barh(rows["rank"], rows["load"], left=left, height=0.8, color=colours, ec="white", lw=0.25)
            ax.axvline(1, color="#404040", ls="--", lw=1.2)
            loads = rows.groupby("rank")["load"].sum()
            at = max(1, loads.get(world - 1, 0)), world - 1  # to the right of the last bar
            ax.annotate("mean", at, (4, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
            ax.set_title(f"{name}: {version}, largest {loads.max():.2f}", fontsize=9, loc="left")
            ax.set_ylim(world - 0.5, -0.5)
            ax.set_yticks(range(world))
            ax.set_xlim(
                0, max(1.2, 1.05 * df["load"].groupby([df["name"], df["version"], df["rank"]]).sum()[name].max())
            )
            _plain(ax, "x")
        line[0].set_ylabel("rank")
    for ax in panels[-1]:
        ax.set_xlabel("load of a rank (mean = 1)")
    return _titled(fig, title or f"Load of {world} ranks, a segment a frame")


def time(table, *, title=None) -> Figure:
    """Time against the number of patches, a panel a tower and workload: `frames`, a line a number of ranks.

    table: as `parallel_tables.scaling` gives it.
    """
    rows = table[table["impl"].isin(["one_process", "frames"])]

    def draw(ax, group):
        for i, (ranks, line) in enumerate(group[group["impl"] == "frames"].groupby("ranks", sort=True)):
            name, look = f"{ranks} rank{'s'[: ranks > 1]}", RANKS[i % len(RANKS)]
            _line(ax, line.sort_values("n_tokens"), "n_tokens", "ms", "frames", name, look)
        _line(ax, group[group["impl"] == "one_process"].sort_values("n_tokens"), "n_tokens", "ms", "one_process")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ticks = sorted(set(group["n_tokens"]))
        ax.set_xticks(ticks, [f"{n / 1000:.3g}k" if n >= 1000 else f"{n:g}" for n in ticks])
        ax.xaxis.set_minor_locator(NullLocator())

    return _panels(rows, draw, "patches", "ms (median, e2e)", title or "Time by number of ranks")


def efficiency(table, *, title=None) -> Figure:
    """One process's time over (ranks x time) against the number of ranks, a panel a tower and workload, a line a way,
    at the largest batch of the workload.

    table: as `parallel_tables.scaling` gives it; rows without an efficiency are left out.
    """
    rows = table[(table["impl"] != "one_process") & table["efficiency"].notna()]
    largest = rows.groupby(["tower", "workload"])["n_tokens"].transform("max")
    rows = rows[rows["n_tokens"] == largest]
    ticks = sorted(set(rows["ranks"]))

    def draw(ax, group):
        for impl, line in group.groupby("impl", sort=False):
            _line(ax, line.sort_values("ranks"), "ranks", "efficiency", impl)
        ax.axhline(1, color="#404040", ls="--", lw=1, label="ideal")
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, ticks)
        ax.set_ylim(0, max(1.15, 1.1 * rows["efficiency"].max()))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _panels(rows, draw, "ranks (processes)", "efficiency", title or "Efficiency, at the largest batch")


def phases(df, *, title=None) -> Figure:
    """A bar a case, way and number of ranks, in parts: each phase's share of the time, mean over the ranks.

    df: as `parallel_tables.phases` gives it.
    """
    if not len(df):
        raise ValueError("phases: the frame has no row; at least one is allowed")
    fig = Figure(figsize=(WIDTH, 1.3 + 0.2 * len(df)), layout="constrained")
    ax = fig.subplots()
    total, left = df[list(PHASES)].sum(axis=1), 0 * df[PHASES[0]]
    for phase in PHASES:
        share = df[phase] / total
        ax.barh(range(len(df)), share, left=left, height=0.8, color=PHASE_COLOURS[phase], ec="white", lw=0.4,
                label=phase)  # fmt: skip
        left = left + share
    for i, value in enumerate(df["gathering"]):
        ax.annotate(f"{value:.1%}", (1, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.annotate("wait\n+ gather", (1, -0.5), (4, 3), textcoords="offset points", va="bottom", fontsize=9, color=INK)
    ranks, before = sorted(set(df["ranks"])), df["case"].shift()
    labels = []
    for row, above in zip(df.itertuples(), before):  # a case is named once, over its ways
        way = row.impl if len(ranks) == 1 else f"{row.impl}, {row.ranks}"
        labels.append(way if row.case == above else f"{row.case}:  {way}")
    ax.set_yticks(range(len(df)), labels)
    ax.set_ylim(len(df) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("share of the time of a rank" + (f" (of {ranks[0]})" if len(ranks) == 1 else "; ways with the ranks"))
    fig.legend(loc="outside lower center", ncols=len(PHASES), frameon=False, fontsize=9)
    _plain(ax, "x")
    return _titled(fig, title or "Where the time of a rank goes")


def _grid(rows, columns, height, **options):
    fig = Figure(figsize=(WIDTH, 0.5 + rows * height), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def _panels(rows, draw, xlabel, ylabel, title) -> Figure:
    if not len(rows):
        raise ValueError(f"{title}: the table has no row to draw; at least one is allowed")
    towers, kinds = list(dict.fromkeys(rows["tower"])), list(dict.fromkeys(rows["workload"]))
    fig, panels = _grid(len(towers), len(kinds), 2.4, sharey="row")
    for line, tower in zip(panels, towers):
        for ax, kind in zip(line, kinds):
            group = rows[(rows["tower"] == tower) & (rows["workload"] == kind)]
            if len(group):
                draw(ax, group)
            ax.set_title(kind, fontsize=10, loc="left")
            _plain(ax, "both")
        line[0].set_ylabel(f"{tower}\n{ylabel}")
        name_lines_once(line)
    for ax in panels[-1]:
        ax.set_xlabel(xlabel)
    return _titled(fig, title)


def _line(ax, rows, x, y, impl, label=None, look=None):
    color, marker, ls = look or (COLOURS.get(impl, "#6E6E6E"), MARKERS.get(impl, "o"), "-")
    style = {"color": color, "marker": marker, "ls": ls, "lw": 1.6, "ms": 6, "mec": "white", "mew": 0.5}
    ax.plot(rows[x].astype(float), rows[y], label=label or impl, **style)


def _plain(ax, axis):
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, axis=axis, color=GRID, lw=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9)


def _titled(fig, title):
    fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig
