"""Names at the right end of lines, where a legend would make the reader look back and forth."""

import numpy as np
from matplotlib.lines import Line2D

INK = "#222222"  # of names: light colours of lines cannot be read as text
SIZE = 9.5  # points
GAP = 1.35 * SIZE  # points from one name to the next
SAMPLE = 9, 27  # points from the axes, between which the line is repeated before its name


def name_lines(ax, lines) -> None:
    """Writes every line's label to the right of `ax`, beside its last point, with a piece of the line before it.

    Names that would lie on each other are spread; a thin line leads from each to the last point.
    """
    where = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    style = {"va": "center", "fontsize": SIZE, "color": INK}
    names = [ax.annotate(line.get_label(), (1, 0.5), (SAMPLE[1] + 4, 0), **where, **style) for line in lines]
    ax.figure.placing.append(lambda: _place(ax, lines, names))  # their heights follow from the layout


def name_lines_once(panels) -> None:
    """`name_lines` for panels side by side that share their lines' styles: each label in the last panel that has it."""
    named = set()
    for ax in reversed(panels):
        lines = [line for line in ax.lines if line.get_label() not in named]
        named |= {line.get_label() for line in lines}
        name_lines(ax, lines)


def spread(wanted, gap, low=0.0, high=1.0) -> np.ndarray:
    """Places for `wanted` in low..high, in the same order and at least `gap` apart, moved by as little as can be.

    Where there are too many for the gap, they share the room evenly.
    """
    wanted = np.asarray(wanted, float)
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = np.argsort(wanted, kind="stable")
    shifts = gap * np.arange(len(wanted))
    groups = []  # [sum, count] of neighbours that touch: without their shifts all of a group stand in one place
    for value in wanted[order] - shifts:
        groups.append([value, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    at = np.repeat([total / count for total, count in groups], [count for _, count in groups])
    out = np.empty(len(wanted))
    out[order] = np.clip(at, low, high - shifts[-1:].sum()) + shifts
    return out


def _place(ax, lines, names):
    width, height = ax.get_window_extent().size * 72 / ax.get_figure(root=True).dpi  # in points
    to_axes = ax.transAxes.inverted()
    ends = [to_axes.transform(line.get_transform().transform(line.get_xydata()[-1])) for line in lines]
    start, end = (1 + points / width for points in SAMPLE)
    for line, name, (x, y), at in zip(lines, names, ends, spread([y for _, y in ends], GAP / height)):
        name.xy = 1, at
        sample = Line2D([start, (start + end) / 2, end], [at] * 3)
        sample.update_from(line)  # colour, dashes and marker, the transform too
        sample.set(transform=ax.transAxes, clip_on=False, markevery=[1], label="_sample")
        leader = Line2D([x, start - 3 / width], [y, at], color=line.get_color(), lw=0.6, alpha=0.7)
        leader.set(transform=ax.transAxes, clip_on=False, label="_leader")
        ax.add_artist(leader)
        ax.add_artist(sample)
