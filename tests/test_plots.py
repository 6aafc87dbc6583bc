import json

import numpy as np
import pandas as pd
import pytest

from vitkit.geometry import Geometry
from vitkit.indices import window_index
from vitkit.lab import plots

CASES = ("1x8x8", 16), ("1x36x36", 324), ("10x36x36", 3240)
COST = {"yours": 0.9, "reference": 3.0, "numba": 0.2, "triton": 0.1, "copy": 0.05, "empty_launch": 0.01, "mine": 1.0}


def frame(impls=("reference", "numba", "mine", "copy", "empty_launch"), **changed):
    rows = []
    for case, tokens in CASES:
        for impl in impls:
            median = 10 + COST[impl] * tokens
            params = json.dumps({"S": tokens, "H": 16, "D": 80})
            row = dict(op="apply_rotary_qk", impl=impl, direction="fwd", device="cpu-some", dtype="bfloat16", case=case)
            row |= dict(params=params, n_tokens=tokens, clock="e2e", cache="warm", n=20, median_us=median)
            row |= dict(p20_us=median * 0.9, p80_us=median * 1.1, gbps=tokens * 20480 / median / 1e3, correct=True)
            rows.append(row | dict(run_id="r1", env_id="e1") | changed)
    return pd.DataFrame(rows)


def labelled(ax):
    return sorted(line.get_label() for line in ax.lines if not line.get_label().startswith("_"))


def drawn(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def texts(fig):
    """Every text of the figure that is set, the legend's and the ticks' included."""
    fig.draw_without_rendering()
    from matplotlib.text import Text

    return [text for text in fig.findobj(Text) if text.get_text().strip() and text.get_visible()]


def test_latency_has_a_line_an_implementation_units_and_limits():
    fig = plots.latency(frame())
    (ax,) = fig.axes
    assert labelled(ax) == ["copy (limit)", "empty_launch (limit)", "mine", "numba", "reference"]
    assert ax.get_xlabel() == "tokens" and ax.get_ylabel() == "latency (µs), e2e clock"
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert (
        drawn(ax, "copy (limit)").get_linestyle() == "--" and drawn(ax, "empty_launch (limit)").get_linestyle() == ":"
    )
    assert len(ax.collections) == 3  # bands, none for a limit
    title = fig.get_suptitle()
    assert (
        all(part in title for part in ("apply_rotary_qk", "bfloat16", "H=16", "D=80", "cpu-some")) and "S=" not in title
    )
    assert "run r1" in fig.get_supxlabel() and "env e1" in fig.get_supxlabel() and "n=20" in fig.get_supxlabel()
    fig.draw_without_rendering()
    assert [t.get_text() for t in ax.get_xticklabels()] == "16 32 64 128 256 512 1k 2k 4k".split()
    assert ax.get_legend() is None and sorted(text.get_text() for text in ax.texts) == labelled(ax)


def test_no_text_below_nine_points():
    df = frame()
    for fig in (plots.latency(df), plots.bandwidth(df), plots.speedup(df, "reference")):
        assert min(text.get_fontsize() for text in texts(fig)) >= 9


def test_colours_and_markers_are_fixed_per_implementation():
    whole, part = plots.latency(frame()).axes[0], plots.latency(frame(("numba", "triton"))).axes[0]
    for ax in (whole, part):
        assert drawn(ax, "numba").get_color() == plots.STYLES["numba"][0]
    assert len(set(plots.STYLES.values())) == len(plots.STYLES)
    for part in zip(*plots.STYLES.values()):  # colours, markers
        assert len(set(part)) == len(plots.STYLES)


@pytest.mark.parametrize("red", [False, "False", None, float("nan")])
def test_red_rows_are_left_out(red):
    df = frame().astype({"correct": object})
    df.loc[(df["impl"] == "numba") & (df["n_tokens"] == 324), "correct"] = red
    df.loc[df["impl"] == "mine", "correct"] = red
    ax = plots.latency(df).axes[0]
    assert "mine" not in labelled(ax) and list(drawn(ax, "numba").get_xdata()) == [16, 3240]
    bars = plots.speedup(df, "reference").axes[0].containers
    assert [(c.get_label(), len(c)) for c in bars] == [("numba", 2)]


def test_rows_without_a_median_are_left_out():
    df = frame()
    df.loc[df["impl"] == "mine", "median_us"] = np.nan
    assert "mine" not in labelled(plots.latency(df).axes[0])


def test_correct_as_read_from_csv():
    df = frame().astype({"correct": str, "median_us": str})
    assert "numba" in labelled(plots.latency(df).axes[0])


@pytest.mark.parametrize("draw", [plots.latency, plots.bandwidth, lambda df: plots.speedup(df, "reference")])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="no row"):
        draw(frame().iloc[:0])
    with pytest.raises(ValueError, match="correct=True"):
        draw(frame(correct=False))
    with pytest.raises(ValueError, match="correct=True"):
        draw(frame(("copy",)))
    with pytest.raises(ValueError, match="clock="):
        draw(pd.concat([frame(), frame(clock="host")]))
    with pytest.raises(ValueError, match="more than one row.*1x8x8"):
        draw(pd.concat([frame(), frame(run_id="r2")]))


@pytest.mark.filterwarnings("error")
def test_one_size_alone():
    df = frame().iloc[:5]
    for fig in (plots.latency(df), plots.bandwidth(df), plots.speedup(df, "reference")):
        assert texts(fig)


def test_bandwidth_as_a_share_and_in_gigabytes():
    ax = plots.bandwidth(frame(("numba", "copy"))).axes[0]
    assert ax.get_ylabel() == "bandwidth (% of the copy), e2e clock" and labelled(ax) == ["copy (limit)", "numba"]
    share = [(10 + 0.05 * n) / (10 + 0.2 * n) for _, n in CASES]
    np.testing.assert_allclose(drawn(ax, "numba").get_ydata(), share)
    df = frame(("numba", "copy"))
    ax = plots.bandwidth(df, share=False).axes[0]
    assert ax.get_ylabel() == "bandwidth (GB/s), e2e clock"
    assert plots.bandwidth(frame(("numba",))).axes[0].get_ylabel() == "bandwidth (GB/s), e2e clock"
    with pytest.raises(ValueError, match="no copy"):
        plots.bandwidth(frame(("numba",)), share=True)


def test_speedup_names_its_baseline_and_labels_bars():
    ax = plots.speedup(frame(), "reference").axes[0]
    assert ax.get_xlabel() == "speedup over reference (times), e2e clock"
    assert [bars.get_label() for bars in ax.containers] == ["numba", "mine"]
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "1x8x8\n(58 µs)",
        "1x36x36\n(982 µs)",
        "10x36x36\n(9.73 ms)",
    ]
    assert f"{9730 / 658:.2f}× numba" in [text.get_text() for text in ax.texts]
    with pytest.raises(ValueError, match="baseline='absent'.*numba"):
        plots.speedup(frame(), "absent")


def test_shares_are_grouped_by_head_size_and_labelled():
    df = pd.DataFrame(
        [dict(D=d, impl=i, share=s) for d, i, s in ((72, "triton", 0.9), (80, "triton", 0.95), (80, "mine", 1.02))]
    )
    fig = plots.shares(df, title="a title")
    (ax,) = fig.axes
    assert [bars.get_label() for bars in ax.containers] == ["triton", "mine"]
    assert [[bar.get_width() for bar in bars] for bars in ax.containers] == [[0.9, 0.95], [1.02]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["72", "80"] and ax.get_xlim()[1] > 1.02
    said = [text.get_text() for text in texts(fig)]
    assert {"90.0%", "95.0%", "102.0%", "copy (limit)", "a title"} <= set(said) and said.count("triton") == 2
    assert min(text.get_fontsize() for text in texts(fig)) >= 9
    with pytest.raises(ValueError, match="no row"):
        plots.shares(df.iloc[:0])
    with pytest.raises(ValueError, match="more than one row"):
        plots.shares(pd.concat([df, df]))


def test_accuracy_has_a_row_an_implementation_and_no_mark_on_another():
    rows = [
        dict(dtype=t, D=d, impl=i, share=0.5) for t in ("float32", "float16") for d in (64, 80) for i in plots.STYLES
    ]
    fig = plots.accuracy(pd.DataFrame(rows))
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["float32", "float16"]
    assert "D = 64, 80" in fig.get_supxlabel() and [t.get_text() for t in fig.axes[0].texts] == ["allowed"]
    fig.draw_without_rendering()
    for ax in fig.axes:
        assert labelled(ax) == sorted([*plots.STYLES, "allowed"]) and set(drawn(ax, "allowed").get_xdata()) == {1}
        marks = []
        for i, impl in enumerate(plots.STYLES):
            line = drawn(ax, impl)
            assert line.get_linestyle() == "None" and line.get_marker() == plots.STYLES[impl][1]
            assert list(line.get_xdata()) == [0.5, 0.5] and max(abs(line.get_ydata() - i)) < 0.5
            marks += [(y, line.get_markersize()) for _, y in ax.transData.transform(line.get_xydata())]
        inch = fig.dpi / 72
        assert all(above - below > size * inch for (above, _), (below, size) in zip(marks, marks[1:]))
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == list(plots.STYLES)
    with pytest.raises(ValueError, match="no row"):
        plots.accuracy(pd.DataFrame(columns=["dtype", "D", "impl", "share"]))


@pytest.mark.parametrize("gbps, said", [((25.1, 24.9, 25.2), "25 GB/s"), ((20.0, 24.9, 25.2), "20–25 GB/s")])
def test_the_copys_bandwidth_is_a_range_where_it_is_one(gbps, said):
    df = frame(("numba", "copy"))
    df.loc[df["impl"] == "copy", "gbps"] = gbps
    assert plots.bandwidth(df).axes[0].get_title(loc="left").endswith(f"the copy reaches {said}")


def test_names_of_bars_have_room():
    df = frame(("reference", "numba", "mine"))
    df["impl"] = df["impl"].replace({"mine": "a_name_of_thirty_characters_12"})
    df.loc[df["impl"] == "numba", "median_us"] *= 1e-3
    df.loc[df["impl"].str.startswith("a_name"), "median_us"] *= 1e-3
    fig = plots.speedup(df, "reference")
    fig.settle()
    (ax,) = fig.axes
    assert max(text.get_window_extent().x1 for text in ax.texts) <= ax.bbox.x1 and ax.get_legend() is None


def test_the_section_of_a_row_is_not_in_the_title():
    df = frame(params=json.dumps({"H": 16, "section": "limit"}))
    assert "H=16" in plots.latency(df).get_suptitle() and "limit" not in plots.latency(df).get_suptitle()


@pytest.mark.parametrize("geometry", [Geometry(), Geometry.qwen2_vl()])
def test_window_partition_puts_every_unit_in_its_place(geometry):
    h, w, unit = 12, 20, 28
    image = np.repeat(np.arange(h // 2 * w // 2, dtype=np.uint8).reshape(h // 2, w // 2, 1), 3, axis=2)
    image = image.repeat(unit, axis=0).repeat(unit, axis=1)  # unit i of the photo is painted with the grey i
    fig = plots.window_partition(image, [1, h, w], geometry)
    above, below = fig.axes
    windows = window_index([[1, h, w]], geometry)
    shown = np.asarray(below.images[0].get_array())[::unit, ::unit, 0].reshape(-1)
    assert shown[: h * w // 4].tolist() == windows.index.tolist()
    numbers = [str(i) for i in range(len(windows.cu_seqlens) - 1)]
    assert [text.get_text() for text in above.texts] == [text.get_text() for text in below.texts] == numbers
    assert "merged units" in above.get_xlabel() and min(text.get_fontsize() for text in texts(fig)) >= 9
    with pytest.raises(ValueError, match="pixels are allowed"):
        plots.window_partition(image[1:], [1, h, w], geometry)


def test_a_notebook_shows_a_figure_once_without_pyplot():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    code = "from vitkit.lab.figure import Figure\nfig = Figure()\nfig.subplots().plot([1, 2])\nfig"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output["output_type"] == "execute_result" and "image/png" in output["data"]
