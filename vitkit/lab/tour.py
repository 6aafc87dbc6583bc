"""Pictures of what happens in a vision tower between pixels and attention, for one photo or clip.

Every picture takes (photo, t, h, w, window, merge, patch) and returns a Figure; it reads no file and keeps nothing.

photo: a workloads.Photo. t, h, w: the grid in patches. window: side of a window in merged units, 0 for a tower without
windows. merge: m, the side of a merge block in patches. patch: the chosen one, its row in image order (the order of
pixel_values), 0 to t*h*w - 1. What is not allowed is a ValueError that names it.
"""

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from .figure import WIDTH, Figure
from .partition import _borders
from .tour_scene import PIXELS, indices, pixels, scene

CHOSEN, ROW, COLUMN, QUIET = "#D55E00", "#0072B2", "#009E73", "#BBBBBB"  # Okabe and Ito's, and a grey
FULL, WINDOWED = "#56B4E9", "#E69F00"


def patches(photo, t, h, w, window, merge, patch) -> Figure:
    """The photo cut into patches and merge blocks; the chosen block enlarged; every index of the chosen patch."""
    s = scene(t, h, w, window, merge, patch)
    image, (row, column) = pixels(photo, s), s.pos_ids[patch]
    fig = _figure(max(3.6, 0.62 * WIDTH * h / w + 0.6))
    left, right = fig.subfigures(1, 2, width_ratios=(0.62, 0.38))
    ax, (above, below) = left.subplots(), right.subplots(2, 1, height_ratios=(0.42, 0.58))
    _photo(ax, image, h, w, merge)
    _mark(ax, column, row)
    ax.set_title(f"{h} × {w} patches in {h // merge} × {w // merge} merge blocks{_frame(s)}", fontsize=11, loc="left")
    ax.set(xlabel="column w (patches)", ylabel="row h (patches)")

    top, side = row // merge * merge, column // merge * merge
    part = image[top * PIXELS : (top + merge) * PIXELS, side * PIXELS : (side + merge) * PIXELS]
    _photo(above, part, merge, merge, merge)
    above.set_axis_off()
    _numbers(above, s.unit * merge**2 + np.arange(merge**2), merge, 11)
    _mark(above, column - side, row - top)
    above.set_title("Its merge block, by rows in image order", fontsize=10)
    below.set_axis_off()
    for i, (name, value) in enumerate(indices(t, h, w, window, merge, patch).items()):
        below.text(0, 0.97 - i * 0.125, name, fontsize=10, va="top", transform=below.transAxes)
        below.text(
            1, 0.97 - i * 0.125, str(value), fontsize=10.5, va="top", ha="right", color=CHOSEN, weight="bold",
            transform=below.transAxes,
        )  # fmt: skip
    return fig


def order(photo, t, h, w, window, merge, patch) -> Figure:
    """The way through the patches before and after windows: colour is the place, a line joins neighbours."""
    s = scene(t, h, w, window, merge, patch)
    n, start = h * w, s.frame * h * w
    places = np.empty(t * n, int)
    places[s.order] = np.arange(t * n)
    fig = _figure(min(3.1 * h / w, 6) + 0.9, "compressed")
    axes = fig.subplots(1, 2)
    for ax, values, title in zip(axes, (np.arange(t * n), places), ("Image order", "Window order")):
        shown = ax.imshow(s.map(values) - start, extent=(0, w, h, 0), cmap="cividis", vmin=0, vmax=n - 1)
        if n <= 800:
            along = s.pos_ids[np.argsort(values)[start : start + n]] + 0.5
            ax.plot(along[:, 1], along[:, 0], color="white", lw=1.1)
        ax.set_title(f"{title}: place {values[patch]:,}", fontsize=11, loc="left")
        ax.set_xlabel("column w (patches)")
        _mark(ax, *s.pos_ids[patch][::-1])
        _ticks(ax, h, w, merge)
    if window:
        _borders(axes[1], np.searchsorted(s.windows, s.map(places), side="right"))
    axes[0].set_ylabel("row h (patches)")
    bar = fig.colorbar(shown, ax=axes, fraction=0.04, pad=0.02, label="place in the frame's sequence")
    bar.outline.set_visible(False)
    return fig


def sequence(photo, t, h, w, window, merge, patch) -> Figure:
    """The merge blocks of a frame as the sequence holds them, before and after; numbers are those of image order."""
    s = scene(t, h, w, window, merge, patch)
    count, unit = h * w // merge**2, merge * PIXELS
    image = pixels(photo, s).reshape(h // merge, unit, w // merge, unit, 3).swapaxes(1, 2).reshape(count, unit, unit, 3)
    first = s.frame * count
    across = 18 if count <= 180 else 36
    down = -(-count // across)
    cell = WIDTH / across
    fig = _figure(2 * down * cell + 0.9)
    before, after = np.arange(first, first + count), s.index[first : first + count]
    moved = "window_index; a border stands where a window ends" if window else "no windows, so nothing moves"
    titles = "Before: image order", f"After: {moved}"
    for ax, which, title in zip(fig.subplots(2, 1), (before, after), titles):
        tiles = np.full((down * across, unit, unit, 3), 255, np.uint8)
        tiles[:count] = image[which - first]
        strip = tiles.reshape(down, across, unit, unit, 3).swapaxes(1, 2).reshape(down * unit, across * unit, 3)
        ax.imshow(strip, extent=(0, across, down, 0), interpolation="antialiased")
        ax.vlines(np.arange(1, across), 0, down, color="white", lw=1)
        ax.hlines(np.arange(1, down), 0, across, color="white", lw=1)
        if window and which is after:
            ends = np.searchsorted(s.windows, before * merge**2, side="right")
            _borders(ax, np.append(ends, np.full(down * across - count, -1)).reshape(down, across))
        at = int(np.nonzero(which == s.unit)[0][0])
        if across == 18:
            _numbers(ax, which, across, 9)
        _mark(ax, at % across, at // across)
        ax.set_title(f"{title}{_frame(s)}", fontsize=11, loc="left")
        ax.set_axis_off()
    return fig


def positions(photo, t, h, w, window, merge, patch) -> Figure:
    """Row and column of every patch along the sequence, in image order and in window order."""
    s = scene(t, h, w, window, merge, patch)
    fig = _figure(4.6)
    axes = fig.subplots(2, 1, sharex=True)
    for ax, ids, at, title in zip(
        axes, (s.pos_ids, s.pos_ids[s.order]), (patch, s.place), ("Image order", "Window order")
    ):
        ends = ids[-1].astype(float)
        if abs(ends[0] - ends[1]) < 0.12 * max(h, w):  # the two names would lie on each other
            ends[np.argmax(ends)] += 0.12 * max(h, w)
        for i, (name, color) in enumerate((("row h", ROW), ("column w", COLUMN))):
            ax.step(np.arange(len(ids)), ids[:, i], where="mid", color=color, lw=1.2)
            ax.text(1.01, ends[i], name, color=color, fontsize=11, va="center", transform=ax.get_yaxis_transform())
        ax.axvline(at, color=CHOSEN, lw=1.5)
        ax.plot([at, at], ids[at], "o", color=CHOSEN, ms=6)
        row, column = (int(x) for x in ids[at])
        ax.set_title(f"{title}: place {at:,} is row {row}, column {column}", fontsize=11, loc="left")
        ax.set(ylabel="position id (patches)", xlim=(-1, len(ids)))
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("place in the sequence (patches)")
    return fig


def segments(photo, t, h, w, window, merge, patch) -> Figure:
    """Who attends to whom: a square between two offsets of cu_seqlens is a segment; outside nothing is computed."""
    s = scene(t, h, w, window, merge, patch)
    n = t * h * w
    kinds = [("Window layers: cu_window_seqlens", s.windows, WINDOWED), ("Full layers: cu_seqlens", s.frames, FULL)]
    kinds = kinds if window else [("Every layer, no windows: cu_seqlens", s.frames, FULL)]
    fig = _figure(4.9)
    for ax, (title, offsets, color) in zip(fig.subplots(1, len(kinds), squeeze=False)[0], kinds):
        starts, lengths = offsets[:-1], np.diff(offsets)
        squares = [Rectangle((a, a), size, size) for a, size in zip(starts, lengths)]
        ax.add_collection(PatchCollection(squares, facecolor=color, edgecolor="white", linewidth=0.8))
        i = int(np.searchsorted(offsets, s.place, side="right")) - 1
        ax.plot([starts[i], offsets[i + 1]], [s.place] * 2, color=CHOSEN, lw=2.5)
        ax.add_patch(Rectangle((starts[i],) * 2, lengths[i], lengths[i], fill=False, ec=CHOSEN, lw=2))
        share, many = (lengths.astype(float) ** 2).sum() / n**2, "s" * (len(lengths) > 1)
        ax.set_title(
            f"{title}\n{len(lengths)} segment{many}, {share * 100:.0f} % of all pairs", fontsize=11, loc="left"
        )
        ticks = _apart(offsets.tolist(), n / 14)
        ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=ticks, yticks=ticks, facecolor="#F4F4F4")
        ax.tick_params(axis="x", labelrotation=90)
        ax.set(xlabel="key (place in window order)", ylabel="query (place in window order)")
        ax.spines[:].set_color(QUIET)
    return fig


def _figure(height, layout="constrained"):
    return Figure(figsize=(WIDTH, min(height, 9)), layout=layout)


def _photo(ax, image, h, w, merge):
    """An image of h x w patches, with thin lines around patches and thick ones around merge blocks."""
    ax.imshow(image, extent=(0, w, h, 0), interpolation="antialiased")
    for step, lw in ((1, 0.6), (merge, 1.8)):
        ax.hlines(np.arange(step, h, step), 0, w, color="white", lw=lw)
        ax.vlines(np.arange(step, w, step), 0, h, color="white", lw=lw)
    ax.spines[:].set_visible(False)
    _ticks(ax, h, w, merge)


def _ticks(ax, h, w, merge):
    ax.set_xticks(range(0, w + 1, merge * -(-w // (9 * merge))))
    ax.set_yticks(range(0, h + 1, merge * -(-h // (9 * merge))))


def _mark(ax, x, y):
    """A frame around the cell whose upper left corner is (x, y), cased in white."""
    for color, lw in (("white", 5), (CHOSEN, 2.8)):
        ax.add_patch(Rectangle((x, y), 1, 1, fill=False, ec=color, lw=lw, zorder=5, clip_on=False))


def _numbers(ax, numbers, across, size):
    """White on a dark ground in the middle of cells 0, 1, 2, ... of rows of `across`; size in points.

    Texts with an outline would take twice as long to draw.
    """
    inches = ax.get_position().width * ax.figure.bbox.width / ax.figure.dpi / across  # of a cell, about
    em, grounds = size / 72 / inches, []
    for i, number in enumerate(numbers):
        x, y = i % across + 0.5, i // across + 0.5
        ax.text(x, y, str(number), color="white", fontsize=size, ha="center", va="center_baseline")
        wide = em * (0.2 + 0.32 * len(str(number)))
        grounds.append(Rectangle((x - wide, y - 0.65 * em), 2 * wide, 1.3 * em))
    ax.add_collection(PatchCollection(grounds, facecolor="black", alpha=0.6, linewidth=0))


def _frame(s) -> str:
    return f", frame {s.frame} of 0 to {s.grid[0] - 1}" if s.grid[0] > 1 else ""


def _apart(values, least) -> list:
    """Of rising values those that keep a distance, with the first and the last."""
    kept = values[:1]
    for value in values[1:-1]:
        if value - kept[-1] >= least and values[-1] - value >= least:
            kept.append(value)
    return kept + values[-1:]
