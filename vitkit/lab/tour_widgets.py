"""A picture of the tour under controls that redraw it; the picture alone where there are no widgets."""

from functools import partial

from .tour_scene import MOST, scene

LABELS = {
    "t": "frames t",
    "h": "rows h (patches)",
    "w": "columns w (patches)",
    "window": "window (merged units)",
    "merge": "merge size m",
    "patch": "chosen patch",
}


class Explorer:
    """What a notebook shows: its controls and picture where widgets are, else the PNG that lies beside them.

    sliders: {name: IntSlider} of t, h, w, window, merge and patch; image: the ipywidgets.Image that they redraw.
    A change of merge size moves h and w to the nearest multiples, and one of the grid keeps the patch within it.
    """

    def __init__(self, draw, photo, values):
        import ipywidgets

        self.draw, self.photo, self._holds = draw, photo, False
        make = partial(ipywidgets.IntSlider, style={"description_width": "150px"}, layout={"width": "310px"})
        self.sliders = {
            name: make(
                values[name], int(name not in ("window", "patch")), MOST.get(name, values[name]), description=label
            )
            for name, label in LABELS.items()
        }
        self._limit()
        self.image = ipywidgets.Image(
            value=draw(photo, **values)._repr_png_(), format="png", layout={"max_width": "100%"}
        )
        controls = ipywidgets.HBox(list(self.sliders.values()), layout={"flex_flow": "row wrap"})  # for narrow pages
        self.box = ipywidgets.VBox([controls, self.image])
        for slider in self.sliders.values():
            slider.observe(self._changed, "value")

    @property
    def values(self) -> dict:
        return {name: slider.value for name, slider in self.sliders.items()}

    def _limit(self):
        """Every slider within what the others allow; nothing is drawn meanwhile."""
        s = self.sliders
        merge = s["merge"].value
        for name in ("h", "w"):
            value = max(1, round(s[name].value / merge)) * merge
            s[name].min, s[name].step, s[name].max = merge, merge, MOST[name] // merge * merge
            s[name].value = min(value, s[name].max)
        s["patch"].min, s["patch"].max = 0, s["t"].value * s["h"].value * s["w"].value - 1  # lowers its value too

    def _changed(self, change):
        if self._holds:  # a change that _limit makes
            return
        self._holds = True
        try:
            self._limit()
        finally:
            self._holds = False
        self.image.value = self.draw(self.photo, **self.values)._repr_png_()

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Widgets for a front end that has them, and the same picture for one that has none."""
        return {**self.box._repr_mimebundle_(), "image/png": bytes(self.image.value)}


def explore(draw, photo, values):
    """`draw`, a picture of tour.py, with controls that start from `values`; its Figure if ipywidgets is missing.

    values: {"t", "h", "w", "window", "merge", "patch"}; ValueError names the one that is not allowed.
    """
    scene(**values)
    try:
        return Explorer(draw, photo, values)
    except ModuleNotFoundError as error:
        if error.name != "ipywidgets":
            raise
        return draw(photo, **values)
