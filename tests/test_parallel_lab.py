"""Notebook 6's tables and figures from rows made up here, and its launch of torchrun."""

import json
import sys

import pandas as pd
import pytest

from vitkit import Geometry
from vitkit.lab import parallel_cases, parallel_launch, parallel_plots, parallel_tables
from vitkit.lab.cases import SIZES

MS = {1: {"one_process": 80, "frames": 82}, 2: {"frames": 44, "whole_images": 60, "whole_images_padded": 70}}


def rows():
    found = []
    for tokens, case in ((500, "small"), (2000, "large")):
        for ranks, ways in MS.items():
            for impl, ms in ways.items():
                params = json.dumps({"tower": "qwen2_vl", "workload": "equal images", "ranks": ranks, "threads": 1})
                row = {"op": "encode", "impl": impl, "case": f"qwen2_vl, {case}", "n_tokens": tokens, "params": params}
                found.append(row | {"median_us": ms * tokens, "correct": True})
    return pd.DataFrame(found)


def counts():
    found = []
    for impl in ("frames", "whole_images"):
        label = {"case": "qwen2_vl, small", "version": f"{impl}, ranks=2"}
        for phase, us in zip(parallel_cases.PHASES, (1000, 2000, 5000, 1500, 500)):
            found.append(label | {"metric": f"{phase}, mean over the ranks", "value": us, "unit": "us"})
        found.append(label | {"metric": "largest load over the mean", "value": 1.5, "unit": "1"})
        found.append(label | {"metric": "bytes of features gathered", "value": 2e6, "unit": "bytes"})
    return pd.DataFrame(found)


def test_efficiency_is_against_one_process_on_all_ranks():
    table = parallel_tables.scaling(rows())
    ours = table[(table.impl == "frames") & (table.case == "qwen2_vl, large")].set_index("ranks")
    assert ours.efficiency[2] == pytest.approx(80 / 44 / 2) and ours.efficiency[1] == pytest.approx(80 / 82)
    gains = parallel_tables.gains(rows())
    assert gains["frames over whole_images"].dropna().tolist() == pytest.approx([60 / 44] * 2)
    assert gains["efficiency"].tolist() == pytest.approx([80 / 82, 80 / 88] * 2)
    red = rows()
    red.loc[red.impl.eq("frames") & red.params.str.contains('"ranks": 2'), "correct"] = False
    assert not ((parallel_tables.scaling(red).impl == "frames") & (parallel_tables.scaling(red).ranks == 2)).any()


def test_phases_and_what_moves():
    phases = parallel_tables.phases(counts())
    assert phases.gathering.tolist() == pytest.approx([0.2, 0.2]) and phases.forward.tolist() == [5, 5]
    moved = parallel_tables.moved(counts())
    assert (
        moved["MB of features gathered"].tolist() == [2, 2]
        and moved["largest load over the mean"].tolist() == [1.5] * 2
    )
    fig = parallel_plots.phases(phases)
    assert [text.get_text() for text in fig.axes[0].texts] == ["20.0%", "20.0%", "wait\n+ gather"]
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["qwen2_vl, small:  frames", "whole_images"]
    assert fig.axes[0].get_xlabel().endswith("(of 2)")


def test_figures_of_time_and_efficiency():
    table = parallel_tables.scaling(rows())
    (ax,) = parallel_plots.time(table).axes
    assert ax.get_title(loc="left") == "equal images" and ax.get_ylabel().startswith("qwen2_vl\n")
    assert [line.get_label() for line in ax.lines] == ["1 rank", "2 ranks", "one_process"]
    assert [text.get_text() for text in ax.texts] == ["1 rank", "2 ranks", "one_process"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["500", "2k"] and not ax.figure.legends
    assert list(ax.lines[1].get_ydata()) == [22, 88]
    (ax,) = parallel_plots.efficiency(table).axes
    ours = next(line for line in ax.lines if line.get_label() == "frames")
    assert list(ours.get_xdata()) == [1, 2] and list(ours.get_ydata()) == pytest.approx([80 / 82, 80 / 88])


def test_the_picture_of_the_balance_has_a_segment_a_frame():
    grids = [("a clip among images", "clip", [[1, 8, 8], [6, 8, 8]])]
    frame = parallel_cases.balance(grids, 2, Geometry.qwen2_5_vl())
    assert len(frame) == 14 and frame.groupby("version").load.sum().tolist() == pytest.approx([2, 2])
    fig = parallel_plots.balance(frame)
    assert [len(ax.patches) for ax in fig.axes] == [7, 7]
    assert fig.axes[1].get_title(loc="left") == "clip: whole_images, largest 1.71"
    assert [[text.get_text() for text in ax.texts] for ax in fig.axes] == [["mean"], ["mean"]]


@pytest.mark.parametrize("draw", [parallel_plots.balance, parallel_plots.phases])
def test_nothing_to_draw(draw):
    with pytest.raises(ValueError, match="no row"):
        draw(pd.DataFrame())


@pytest.mark.parametrize("size", SIZES.values(), ids=lambda size: f"size-{size.name}")
def test_the_batches_are_of_three_kinds(size):
    from vitkit.geometry import check_grid_thw

    grids = parallel_cases.parallel_grids(size)
    assert len({kind for kind, _, _ in grids}) == 3 and len({name for _, name, _ in grids}) == len(grids)
    assert all(check_grid_thw(grid, Geometry()) for _, _, grid in grids)
    assert parallel_cases.rank_counts(size, "cpu", 8) == [1, 2]
    assert [parallel_cases.rank_counts(size, "cuda", n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_a_launch_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(parallel_launch, "command", lambda *_: [sys.executable, "-c", "raise SystemError('no room')"])
    with pytest.raises(RuntimeError, match="2 ranks ended with status 1 after 0 lines: .*SystemError: no room"):
        parallel_launch.lines(2, device="cpu", size="tiny")


@pytest.mark.parametrize("out", ["nowhere/lines.jsonl", "."])
def test_an_output_that_cannot_be_a_file_is_refused_before_anything_starts(out, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel_launch, "command", lambda *_: pytest.fail("started"))
    with pytest.raises(ValueError, match=f"out='{out}': a file is allowed"):
        parallel_launch.run(2, device="cpu", size="tiny", out=out)


def test_one_gpu_has_one_rank_and_is_validated_on_the_cpu(monkeypatch, tmp_path, capsys):
    from vitkit.lab.results import SHARE, Run

    monkeypatch.setattr(parallel_launch, "rank_counts", lambda *_: [1])
    started = []

    def lines(nproc, **options):
        started.append((nproc, options["device"]))
        row = {"op": "encode", "impl": "frames", "case": "x", "correct": nproc == 1 or len(started) < 4}
        return [{"row": row}, {"count": ["x", "frames, ranks=1", "m", 1, "1"]}]

    monkeypatch.setattr(parallel_launch, "lines", lines)
    run = Run("6_encoder_data_parallel", "cpu", str(tmp_path))
    assert parallel_launch.measure(run, SIZES["tiny"], "both", 1) == [1]
    assert started == [(1, "cpu"), (2, "cpu")] and "one rank" in capsys.readouterr().out
    assert len(run.frame()) == 1  # no time of two processes on the CPU among a GPU's
    shares = run.count_frame().metric.eq(SHARE)
    assert run.count_frame().value[shares].tolist() == [0]

    parallel_launch.measure(run, SIZES["tiny"], "both", 1)
    assert run.count_frame().query(f"metric == {SHARE!r}").value.tolist() == [0, float("inf")]
