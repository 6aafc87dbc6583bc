"""Whether colours of one figure can be told apart by eyes without one kind of cone."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from vitkit.lab import parallel_plots, traffic
from vitkit.lab.styles import STYLES, ordered

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
ROTARY = "transformers eager torch_compile"
FIGURES = {  # what the notebooks draw together
    "rotary, GPU": f"{ROTARY} liger flash_attn_cat flash_attn_2x triton triton_separate triton_in_place "
    "triton_from_pos triton_from_pos_in_place",
    "rotary, CPU": f"{ROTARY} numba numba_in_place numba_from_pos",
    "limit": "triton triton_in_place triton_from_pos triton_from_pos_in_place triton_low triton_low_in_place",
    "indices": "reference transformers torch numba triton",
    "plans": "reference transformers torch numba triton size_cache size_cache_numpy size_cache_cold "
    "transformers_cpu_grid auto",
}


def lab(colour, eyes):
    """CIELAB of an sRGB colour as these eyes see it, for daylight (D65)."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = XYZ @ np.clip(eyes @ linear, 0, 1) / (XYZ @ np.ones(3))
    f = np.where(seen > 216 / 24389, np.cbrt(seen), (24389 / 27 * seen + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colours, eyes):
    """(distance, names) of the two most alike of {name: colour}."""
    seen = {name: lab(colour, np.array(eyes)) for name, colour in colours.items()}
    return min((float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in combinations(seen, 2))


def test_white_and_black_are_where_they_should_be():
    for eyes in EYES.values():
        assert lab("white", np.array(eyes)) == pytest.approx([100, 0, 0], abs=0.1)
        assert lab("black", np.array(eyes)) == pytest.approx([0, 0, 0], abs=0.1)


@pytest.mark.parametrize("eyes", EYES.values(), ids=EYES)
@pytest.mark.parametrize("names", FIGURES.values(), ids=FIGURES)
def test_colours_of_implementations(names, eyes):
    names = names.split()
    assert closest({name: STYLES[name][0] for name in names}, eyes)[0] >= 10  # and markers and names tell them apart
    assert len({STYLES[name][1] for name in names}) == len(names)


@pytest.mark.parametrize("eyes", EYES.values(), ids=EYES)
def test_colours_that_stand_alone(eyes):
    assert closest(parallel_plots.PHASE_COLOURS, eyes)[0] >= 20  # a legend names them
    assert closest(parallel_plots.COLOURS, eyes)[0] >= 20
    assert closest({kind: colour for kind, (_, colour) in traffic.LANES.items()}, eyes)[0] >= 20
    shades = [*parallel_plots.SHADES, parallel_plots.SHADES[0]]  # only neighbours touch
    assert all(closest({"one": a, "next": b}, eyes)[0] >= 20 for a, b in zip(shades, shades[1:]))


def test_the_order_is_that_of_styles_and_then_by_name():
    assert ordered(["zeta", "triton", "alpha", "reference", "triton"]) == ["reference", "triton", "alpha", "zeta"]
