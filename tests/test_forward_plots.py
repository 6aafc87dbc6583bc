import json

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from vitkit.lab import forward_plots
from vitkit.lab.styles import STYLES

MS = {"transformers": 40.0, "transformers_varlen": 20.0, "plan": 16.0, "accelerate": 10.0}
CASES = "qwen2_5_vl, 1x36x36", "qwen2_5_vl, 10x36x36"


def frame(**changed):
    params = json.dumps({"tower": "qwen2_5_vl", "layers": 32, "flop": 1, "threads": 1})
    rows = []
    for scale, case in zip((1, 10), CASES):
        for impl, ms in MS.items():
            us = 1000 * ms * scale
            row = dict(op="accelerate", impl=impl, direction="fwd", device="nvidia-h200", dtype="bfloat16", case=case)
            row |= dict(params=params, clock="e2e", cache="warm", n=20, median_us=us, p20_us=0.9 * us, p80_us=1.1 * us)
            rows.append(row | dict(correct=True, run_id="r1", env_id="e1", limit_us=2500.0 * scale) | changed)
    return pd.DataFrame(rows)


def test_waterfall_has_a_bar_a_version_its_gains_and_the_limit():
    fig = forward_plots.waterfall(frame())
    assert [ax.get_title(loc="left") for ax in fig.axes] == list(CASES)
    for scale, ax in zip((1, 10), fig.axes):
        bars = [bar for bar in ax.patches if bar.get_width() > 0]
        assert [bar.get_width() for bar in bars] == [ms * scale for ms in MS.values()]
        assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [STYLES[impl][0] for impl in MS]
        assert [label.get_text() for label in ax.get_yticklabels()] == list(MS)
        said = [text.get_text() for text in ax.texts]
        assert "×" not in said[0] and said[1].endswith("×2.00   ×2.00 in all")
        assert said[3] == f"{'10.0' if scale == 1 else '100'} ms   ×1.60   ×4.00 in all"
        (line,) = [line for line in ax.lines if line.get_label() == "arithmetic limit"]
        assert line.get_linestyle() == "--" and set(line.get_xdata()) == {2.5 * scale}
        assert said[4] == f"arithmetic limit {'2.50' if scale == 1 else '25.0'} ms"
        assert ax.get_xlim()[0] == 0 and ax.yaxis_inverted()
    assert fig.get_suptitle() == "Vision tower of qwen2_5_vl, 32 layers, bfloat16, nvidia-h200"
    assert "run r1" in fig.get_supxlabel() and "n=20" in fig.get_supxlabel()
    assert fig.axes[-1].get_xlabel() == "ms a forward (median, p20–p80), e2e clock"


def test_waterfall_without_a_limit():
    for df in (frame(limit_us=float("nan")), frame().drop(columns="limit_us")):
        fig = forward_plots.waterfall(df, title="mine")
        assert fig.get_suptitle() == "mine" and fig.axes[0].get_title(loc="left") == CASES[0]
        assert not any("limit" in text.get_text() for ax in fig.axes for text in ax.texts)


def test_a_red_version_has_no_bar_and_the_next_gains_on_the_one_before():
    df = frame()
    df.loc[df.impl.eq("plan"), "correct"] = False
    ax = forward_plots.waterfall(df).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["transformers", "transformers_varlen", "accelerate"]
    assert ax.texts[2].get_text().endswith("×2.00   ×4.00 in all")


def test_a_version_without_a_style_is_grey():
    df = frame()
    df["impl"] = df["impl"].replace({"plan": "somebody's"})
    forward_plots.waterfall(df).draw_without_rendering()


def test_waterfall_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="no row"):
        forward_plots.waterfall(frame().iloc[:0])
    with pytest.raises(ValueError, match="correct=True"):
        forward_plots.waterfall(frame(correct=False))
    with pytest.raises(ValueError, match="mixes dtype"):
        forward_plots.waterfall(pd.concat([frame(), frame(dtype="float32")]))
    with pytest.raises(ValueError, match="more than one row"):
        forward_plots.waterfall(pd.concat([frame(), frame()]))


def errors():
    rows = [
        (case, layer, version, 1e-3 * layer * (1 + (version == "accelerate")))
        for case in CASES
        for version in ("transformers", "accelerate")
        for layer in (1, 2, 3)
    ]
    return pd.DataFrame(rows, columns=["case", "layer", "version", "error"])


def test_layers_has_a_panel_a_case_and_a_line_a_version():
    fig = forward_plots.layers(errors(), title="mine")
    assert [ax.get_title(loc="left") for ax in fig.axes] == list(CASES) and fig.get_suptitle() == "mine"
    for ax in fig.axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert list(lines) == ["transformers", "accelerate"] and ax.get_xlabel() == "layer (number)"
        assert list(lines["accelerate"].get_xdata()) == [1, 2, 3]
        assert list(lines["accelerate"].get_ydata()) == pytest.approx([2e-3, 4e-3, 6e-3])
        assert all(line.get_color() == STYLES[name][0] for name, line in lines.items())
        assert len({line.get_linewidth() for line in lines.values()}) == 2  # one below the other can be seen
    assert [[text.get_text() for text in ax.texts] for ax in fig.axes] == [[], ["transformers", "accelerate"]]
    assert fig.axes[0].get_ylim() == pytest.approx((0, 6.6e-3))
    fig.draw_without_rendering()


def test_layers_of_no_error_at_all_and_refusals():
    df = errors()
    forward_plots.layers(df.assign(error=0.0)).draw_without_rendering()
    with pytest.raises(ValueError, match="no row"):
        forward_plots.layers(df.iloc[:0])
    with pytest.raises(ValueError, match="more than one row"):
        forward_plots.layers(pd.concat([df, df]))
