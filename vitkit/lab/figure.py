"""The figure that every plot returns: shown once by a notebook, and the same bytes whenever the rows are the same."""

import io

import matplotlib
from matplotlib.figure import Figure as _Figure

WIDTH = 8.0  # inches; 800 pixels at 100 dots an inch
NO_STAMP = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}  # neither when nor by which version


class Figure(_Figure):
    """A figure made without pyplot, which would show what it holds a second time at the end of a cell.

    IPython knows how to show a plain matplotlib Figure only after its inline backend was switched on: `_repr_png_`
    works in any notebook.

    It is laid out once, before it is first drawn, and stays so: matplotlib would lay it out anew at every drawing, from
    where the last one ended, and the bytes would tell how often it was shown. `placing` holds functions without
    arguments, called after that layout, for what has to know the size of the axes.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{"dpi": 100, "facecolor": "white", **options})
        self.placing, self._settled = [], False

    def settle(self) -> None:
        """Lays the figure out, if that has not been done."""
        if not self._settled:
            self._settled = True
            self.draw_without_rendering()
            self.set_layout_engine("none")
            for place in self.placing:
                place()

    def draw(self, renderer):
        self.settle()
        super().draw(renderer)

    def savefig(self, fname, **options):
        """As matplotlib's, without date and version in the file, and with ids that follow from the drawing alone."""
        self.settle()
        kind = options.get("format") or str(fname).rpartition(".")[2]
        options["metadata"] = {**NO_STAMP.get(kind, {}), **(options.get("metadata") or {})}
        with matplotlib.rc_context({"svg.hashsalt": "vitkit"}):
            super().savefig(fname, **options)

    def _repr_png_(self):
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()
