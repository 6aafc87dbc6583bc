"""A picture of a window partition: which patch of a photo goes where."""

import numpy as np
from matplotlib.collections import LineCollection

from .figure import WIDTH, Figure

PHOTO = 4.4  # most inches that the photo is high
YELLOW = "#F0E442"


def window_partition(image, grid_row, geometry, *, title=None) -> Figure:
    """Which patch goes where: a photo cut into patches, merged units and windows, and its units in window order.

    image: PIL or array (h*patch_size, w*patch_size, 3), as the tower sees it; grid_row: its [t, h, w]. One frame is
    drawn. Above: thin lines around patches, thicker around merged units, yellow borders around windows, numbered in
    window order. Below: the units in window order, read row by row like text; a border stands where cu_seqlens cuts.
    """
    from ..indices import window_index

    image, (_, h, w) = np.asarray(image), grid_row
    patch, m = geometry.patch_size, geometry.spatial_merge_size
    if image.shape[:2] != (h * patch, w * patch):
        raise ValueError(f"image of shape {image.shape}: {h * patch} x {w * patch} pixels are allowed for {grid_row}")
    if image.ndim == 2:
        image = np.repeat(image[..., None], 3, axis=2)
    windows = window_index([[1, h, w]], geometry)
    index, rows, columns, unit = windows.index.numpy(), h // m, w // m, patch * m
    lengths = np.diff(windows.cu_seqlens.numpy()) // (m * m)  # in merged units
    starts = np.cumsum(lengths) - lengths
    window = np.repeat(np.arange(len(lengths)), lengths)  # of every place in window order
    where = np.empty(len(index), int)
    where[index] = window  # of every unit of the photo
    where = where.reshape(rows, columns)

    side = geometry.window**2 or columns
    across = side * max(1, round(32 / side))  # whole windows in a row, about 32 units
    down = -(-len(index) // across)
    units = image.reshape(rows, unit, columns, unit, -1).swapaxes(1, 2).reshape(rows * columns, unit, unit, -1)
    tiles = np.full((down * across, unit, unit, image.shape[2]), 255, image.dtype)
    tiles[: len(index)] = units[index]
    order = tiles.reshape(down, across, unit, unit, -1).swapaxes(1, 2).reshape(down * unit, across * unit, -1)
    places = np.concatenate([window, np.full(down * across - len(index), -1)]).reshape(down, across)

    heights = min(PHOTO, (WIDTH - 0.8) * rows / columns), (WIDTH - 0.8) * down / across
    fig = Figure(figsize=(WIDTH, sum(heights) + 1.8 + 0.3 * bool(title)), layout="constrained")
    above, below = fig.subplots(2, 1, height_ratios=heights)
    _image(above, image, rows, columns)
    _image(below, order, down, across)
    above.hlines(np.arange(h) / m, 0, columns, color="white", lw=0.3, alpha=0.7)
    above.vlines(np.arange(w) / m, 0, rows, color="white", lw=0.3, alpha=0.7)
    _borders(above, where)
    _borders(below, places)
    for i, start in enumerate(starts):
        y, x = np.nonzero(where == i)
        _number(above, i, x.mean() + 0.5, y.mean() + 0.5)
        _number(below, i, start % across + 0.5, start // across + 0.5)
    count = f"{len(lengths)} window" + "s" * (len(lengths) > 1)
    above.set_title(f"The photo: {h} × {w} patches, {rows} × {columns} merged units, {count}", fontsize=10, loc="left")
    below.set_title("The sequence in window order: a border stands where cu_seqlens cuts", fontsize=10, loc="left")
    above.set(xlabel="column (merged units)", ylabel="row (merged units)")
    below.set(xlabel="place within the row (merged units)", ylabel="first place of the row (merged units)")
    above.set_xticks(range(0, columns + 1, geometry.window or 4))
    above.set_yticks(range(0, rows + 1, geometry.window or 4))
    below.set_xticks(range(0, across + 1, 4))
    step = -(-down // 12)
    below.set_yticks(np.arange(0, down, step) + 0.5, [str(across * i) for i in range(0, down, step)])
    if title:
        fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig


def _image(ax, image, rows, columns):
    """The image on axes that count merged units, with a line around each unit."""
    ax.imshow(image, extent=(0, columns, rows, 0), interpolation="antialiased")
    ax.hlines(np.arange(1, rows), 0, columns, color="white", lw=0.8, alpha=0.8)
    ax.vlines(np.arange(1, columns), 0, rows, color="white", lw=0.8, alpha=0.8)
    ax.spines[:].set_visible(False)


def _borders(ax, ids):
    """A yellow line, cased in black, between neighbours of different windows and around them all (-1: no unit)."""
    ids = np.pad(ids, 1, constant_values=-1)
    lines = [[(x - 1, y), (x, y)] for y, x in np.argwhere(ids[1:] != ids[:-1])]
    lines += [[(x, y - 1), (x, y)] for y, x in np.argwhere(ids[:, 1:] != ids[:, :-1])]
    for color, width in (("black", 3.6), (YELLOW, 1.8)):
        ax.add_collection(LineCollection(lines, colors=color, linewidths=width, capstyle="projecting", clip_on=False))


def _number(ax, i, x, y):
    box = dict(boxstyle="round,pad=0.12", fc=YELLOW, ec="black", lw=0.6)
    ax.text(x, y, str(i), ha="center", va="center", fontsize=9, bbox=box)
