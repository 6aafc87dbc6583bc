"""The figure that every plot returns: shown once by a notebook, and independent of the drawing backend."""

import io

from matplotlib.figure import Figure as _Figure

WIDTH = 8.0  # inches; 800 pixels at 100 dots an inch


class Figure(_Figure):
    """A figure made without pyplot, which would show what it holds a second time at the end of a cell.

    IPython knows how to show a plain matplotlib Figure only after its inline backend was switched on: `_repr_png_`
    works in any notebook.
    """

    def _repr_png_(self):
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()
