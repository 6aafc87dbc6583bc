"""The tour: what it says of a patch, its pictures, and the controls that redraw them."""

import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

from vitkit import Geometry, reference
from vitkit.lab import tour, tour_scene
from vitkit.lab.tour_scene import indices, scene
from vitkit.lab.tour_widgets import Explorer, explore
from vitkit.lab.workloads import Photo

DEFAULT = {"t": 1, "h": 12, "w": 18, "window": 4, "merge": 2, "patch": 100}
OTHERS = [
    {"t": 3, "h": 10, "w": 6, "window": 2, "merge": 2, "patch": 179},
    {"t": 2, "h": 9, "w": 12, "window": 0, "merge": 3, "patch": 0},
    {"t": 1, "h": 1, "w": 1, "window": 12, "merge": 1, "patch": 0},
    {"t": 1, "h": 48, "w": 48, "window": 1, "merge": 4, "patch": 2303},
]
PICTURES = [tour.patches, tour.order, tour.sequence, tour.positions, tour.segments]


@pytest.fixture(scope="module")
def photo():
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    return Photo("noise", Image.fromarray(pixels), "drawn")


def texts(figure) -> str:
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_what_is_said_of_a_patch_counted_by_hand():
    """Patch 100 of 12 x 18: block 25 of 9 a row is (2, 7), its first patch (4, 14). Window (0, 1) begins at 64, after
    16 units of 4 patches; there unit (2, 3) is the 12th, so place 64 + 11 * 4."""
    assert indices(**DEFAULT) == {
        "row in image order": 100,
        "frame": 0,
        "position ids h and w": "4 and 14",
        "merge block": 25,
        "window": 1,
        "place in window order": 108,
        "window segment": "64 to 127",
        "frame segment": "0 to 215",
    }


@pytest.mark.parametrize("values", [DEFAULT, *OTHERS])
def test_a_scene_is_the_references(values):
    s = scene(**values)
    t, h, w, window, m, patch = values.values()
    index, reverse, windows = reference.window_index([(t, h, w)], m, window)
    assert s.index.tolist() == index.tolist() and s.reverse.tolist() == reverse.tolist()
    assert s.windows.tolist() == windows.tolist() and s.frames.tolist() == list(range(0, t * h * w + 1, h * w))
    assert s.order[s.place] == patch and sorted(s.order) == list(range(t * h * w))
    numbers = s.map(np.arange(t * h * w))  # of the chosen frame, laid out as the photo
    row, column = s.pos_ids[patch]
    assert numbers[row, column] == patch and numbers.min() == s.frame * h * w
    assert s.geometry == Geometry(14, m, window * m * 14 or None)


@pytest.mark.parametrize("values", [DEFAULT, *OTHERS])
@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_is_drawn_and_is_the_same_each_time(draw, values, photo):
    first = draw(photo, **values)._repr_png_()
    assert first.startswith(b"\x89PNG") and first == draw(photo, **values)._repr_png_()
    if values["t"] * values["h"] * values["w"] > 1:
        other = 0 if values["patch"] else values["merge"] ** 2
        assert draw(photo, **{**values, "patch": other})._repr_png_() != first  # the chosen patch is marked


def test_pictures_say_what_they_show(photo):
    said = texts(tour.patches(photo, **DEFAULT))
    assert "12 × 18 patches in 6 × 9 merge blocks" in said
    assert all(f"{name}" in said and f"{value}" in said for name, value in indices(**DEFAULT).items())
    assert all(f"\n{number}\n" in said for number in (100, 101, 102, 103))
    said = texts(tour.order(photo, **DEFAULT))
    assert "Image order: place 100" in said and "Window order: place 108" in said
    said = texts(tour.sequence(photo, **DEFAULT))
    assert [int(x) for x in said.split() if x.isdigit()] == [*range(54), *scene(**DEFAULT).index]
    said = texts(tour.segments(photo, **DEFAULT))  # 64² + 64² + 16² + 32² + 32² + 8² of 216²
    assert "6 segments, 23 % of all pairs" in said and "1 segment, 100 % of all pairs" in said
    assert "frame 2 of 0 to 2" in texts(tour.patches(photo, **OTHERS[0]))
    assert "no windows" in texts(tour.segments(photo, **OTHERS[1]))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"t": 0}, "t=0: an integer from 1 to 8"),
        ({"h": 49}, "h=49: an integer from 1 to 48"),
        ({"w": 18.0}, "w=18.0: an integer"),
        ({"h": 11}, "multiples of spatial_merge_size=2"),
        ({"window": -1}, "window=-1: an integer from 0 to 12"),
        ({"merge": True}, "merge=True: an integer from 1 to 4"),
        ({"patch": 216}, "patch=216: an integer from 0 to 215"),
    ],
)
def test_what_is_refused(wrong, said, photo):
    for call in (lambda v: indices(**v), lambda v: explore(tour.order, photo, v)):
        with pytest.raises(ValueError, match=said):
            call({**DEFAULT, **wrong})


def test_photos_by_name():
    photo = tour_scene.find_photo()
    assert tour_scene.find_photo(photo.name).name == photo.name
    with pytest.raises(ValueError, match=f"photo='nobody': one of .*{photo.name}.* is allowed"):
        tour_scene.find_photo("nobody")


def test_controls_redraw(photo):
    pytest.importorskip("ipywidgets")
    drawn = []

    def draw(photo, **values):
        drawn.append(values)
        return tour.segments(photo, **values)

    shown = explore(draw, photo, DEFAULT)
    assert isinstance(shown, Explorer) and shown.values == DEFAULT and drawn == [DEFAULT]
    for name, value in {"patch": 7, "window": 2, "t": 2, "w": 24, "h": 4}.items():
        before = shown.image.value
        shown.sliders[name].value = value
        assert shown.image.value != before and drawn[-1] == shown.values and shown.values[name] == value
    assert len(drawn) == 6  # once a change
    assert shown.image.value == tour.segments(photo, **shown.values)._repr_png_()


def test_controls_keep_to_what_is_allowed(photo):
    pytest.importorskip("ipywidgets")
    shown = explore(tour.positions, photo, {**DEFAULT, "patch": 215})
    shown.sliders["merge"].value = 4  # 18 columns are none of its multiples
    assert shown.values == {**DEFAULT, "merge": 4, "w": 16, "patch": 191}
    shown.sliders["merge"].value = 3
    assert (shown.values["h"], shown.values["w"]) == (12, 15)
    shown.sliders["merge"].value = 1
    shown.sliders["h"].value = 1
    assert shown.values["patch"] < 15 and shown.sliders["patch"].max == 14
    shown.sliders["window"].value = 0
    scene(**shown.values)


def test_the_same_picture_with_and_without_widgets(photo, monkeypatch):
    pytest.importorskip("ipywidgets")
    bundle = explore(tour.order, photo, DEFAULT)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert explore(tour.order, photo, DEFAULT)._repr_png_() == bundle["image/png"]
