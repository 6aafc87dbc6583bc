import numpy as np
import pytest

from vitkit.lab.figure import Figure
from vitkit.lab.labels import name_lines, name_lines_once, spread


@pytest.mark.parametrize(
    "wanted, places",
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.9, 0.1], [0.9, 0.1]),  # far enough apart: not moved
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.2, 0.8, 0.21], [0.155, 0.8, 0.255]),
        ([1.0, 1.0, 1.0], [0.8, 0.9, 1.0]),
        ([-3.0, 0.05], [0.0, 0.1]),
    ],
)
def test_names_are_spread_by_as_little_as_can_be(wanted, places):
    assert spread(wanted, 0.1) == pytest.approx(places)


def test_too_many_names_share_the_room():
    wanted = np.random.default_rng(0).random(31)
    places = spread(wanted, 0.1)
    assert list(np.argsort(places)) == list(np.argsort(wanted))
    assert np.diff(sorted(places)) == pytest.approx(1 / 30) and places.min() == pytest.approx(0)


def drawn(count=6):
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    lines = [ax.plot([1, 2], [1, 2 + 0.001 * i], label=f"way_{i}", color=f"C{i}", marker="o")[0] for i in range(count)]
    lines.append(ax.axhline(1.5, ls="--", color="grey", label="limit"))
    name_lines(ax, lines)
    figure.settle()
    return ax, lines


def test_names_stand_beside_the_axes_inside_the_figure_and_apart():
    ax, lines = drawn()
    assert [text.get_text() for text in ax.texts] == [line.get_label() for line in lines]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert all(box.x0 > ax.bbox.x1 and box.x1 <= ax.figure.bbox.x1 for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    height = ax.transData.transform((0, 1.5))[1]
    assert boxes[-1].y0 < height < boxes[-1].y1  # nothing near the limit's end: its name was not moved


def test_a_name_has_a_piece_of_its_line_and_is_led_to_its_end():
    ax, lines = drawn(2)
    samples = [line for line in ax.lines if line.get_label() == "_sample"]
    leaders = [line for line in ax.lines if line.get_label() == "_leader"]
    for line, sample, leader, text in zip(lines, samples, leaders, ax.texts, strict=True):
        for get in ("get_color", "get_linestyle", "get_marker"):
            assert getattr(sample, get)() == getattr(line, get)()
        ends = leader.get_transform().transform(leader.get_xydata())
        assert ends[0] == pytest.approx(line.get_transform().transform(line.get_xydata()[-1]))
        left, _, right = sample.get_transform().transform(sample.get_xydata())
        assert ends[1][1] == pytest.approx(left[1]) and ends[1][0] < left[0] < right[0] < text.get_window_extent().x0


def test_panels_side_by_side_name_a_line_once():
    panels = Figure().subplots(1, 3)
    for ax, names in zip(panels, ("ab", "abc", "a")):
        for name in names:
            ax.plot([1, 2], label=name)
    name_lines_once(panels)
    assert [[text.get_text() for text in ax.texts] for ax in panels] == [[], ["b", "c"], ["a"]]
