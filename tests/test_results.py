"""Rows survive interrupts, read back as what they were, and a wrong one becomes an exit code."""

import json
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from vitkit.lab import results
from vitkit.lab.results import SHARE, Run
from vitkit.lab.rows import COLUMNS, COUNT_COLUMNS, newest, read_rows

ROW = {"op": "rot_pos_ids", "impl": "numba", "case": "one", "correct": True, "grid_thw": [[1, 4, 6]], "n_tokens": 24}


@pytest.fixture
def run(tmp_path):
    return Run("2_rot_pos_ids", "cpu", tmp_path)


def test_a_row_reads_back_as_it_was(run):
    params = {"B": 1, "layout": 'pa"cked, 3'}
    run.add({**ROW, "params": params, "median_us": np.float64(1.5), "p20_us": float("nan"), "note": "two\nlines"})
    run.add([{**ROW, "correct": None, "n": np.int64(7)}, {**ROW, "correct": np.bool_(False)}])
    df = read_rows(run.results)
    assert list(df.columns) == COLUMNS and len(df) == 3 and df.equals(run.frame())
    assert json.loads(df.params[0]) == params and json.loads(df.grid_thw[0]) == [[1, 4, 6]]
    assert df.correct.tolist() == [True, pd.NA, False] and df.n.tolist() == [pd.NA, 7, pd.NA]
    assert df.median_us[0] == 1.5 and np.isnan(df.p20_us[0]) and df.note[0] == "two lines" and df.error[0] == ""
    assert df.dtypes[["n", "median_us", "correct"]].astype(str).tolist() == ["Int64", "float64", "boolean"]
    assert set(df.run_id) == {run.run_id} and set(df.device) == {run.slug} and set(df.env_id) == {run.env_id}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", df.utc[0])
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", run.run_id)
    assert run.results == run.root / "data" / "results" / run.slug / "2_rot_pos_ids.csv"


def test_unknown_columns_and_rows_without_an_op_are_refused(run):
    for row in ({**ROW, "speed": 1}, {"impl": "numba"}):
        with pytest.raises(ValueError, match="allowed"):
            run.add([ROW, row])
    assert not run.results.exists() and run.frame().empty and list(run.frame().columns) == COLUMNS


def test_counts_have_their_own_file(run):
    run.count("one", "before", "uploads", 5, "copies")
    df = read_rows(run.counts)
    assert list(df.columns) == COUNT_COLUMNS and df.value.tolist() == [5.0] and df.equals(run.count_frame())
    assert run.counts.name == "2_rot_pos_ids-counts.csv" and not run.results.exists()


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_torn_last_line_is_skipped_and_the_next_row_is_whole(run, keep):
    run.add([ROW, {**ROW, "note": 'a "quoted", note'}])
    whole = run.results.read_bytes()
    lines = whole.splitlines(keepends=True)
    run.results.write_bytes(b"".join(lines[:-1]) + lines[-1][: int(len(lines[-1]) * keep)])
    with pytest.warns(UserWarning, match=r"torn lines \[3\]"):
        assert len(read_rows(run.results)) == 1
    run.add({**ROW, "impl": "torch"})
    with pytest.warns(UserWarning, match=r"torn lines \[3\]"):
        assert read_rows(run.results).impl.tolist() == ["numba", "torch"]


def test_a_killed_process_leaves_whole_rows(tmp_path):
    code = (
        "import sys; from vitkit.lab.results import Run; run = Run('kill', 'cpu', sys.argv[1]); i = 0\n"
        "while True:\n    run.add({'op': 'a', 'impl': 'b', 'n_tokens': i}); i += 1; print(i, flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=results.repo_root()
    )
    try:
        said = [int(child.stdout.readline()) for _ in range(20)][-1]
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    (path,) = (tmp_path / "data" / "results").rglob("kill.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a last line torn by the kill may be there; finished rows may not be lost
        assert read_rows(path).n_tokens.tolist()[:said] == list(range(said))


def test_another_layout_or_a_closed_folder_is_refused_before_measuring(run, tmp_path):
    run.results.write_text("op,impl,median_ms\n")
    with pytest.raises(ValueError, match=r"2_rot_pos_ids\.csv.*another layout"):
        Run("2_rot_pos_ids", "cpu", tmp_path)
    with pytest.raises(ValueError, match="not the header"):
        read_rows(run.results)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out=.*a writable folder is allowed"):
        Run("2_rot_pos_ids", "cpu", tmp_path / "file")
    with pytest.raises(ValueError, match="notebook="):
        Run("../up", "cpu", tmp_path)
    with pytest.raises(ValueError, match="device="):
        Run("2_rot_pos_ids", "tpu", tmp_path)


def test_newest_goes_by_time_then_id():
    df = pd.DataFrame({"utc": ["2026-01-02", "2026-01-03", "2026-01-03"], "run_id": ["c", "a", "b"], "x": [1, 2, 3]})
    assert newest(df).x.tolist() == [3] and newest(df[:2]).x.tolist() == [2] and newest(df[:0]).empty


def test_two_runs_share_a_file(run, tmp_path):
    run.add(ROW)
    again = Run("2_rot_pos_ids", "cpu", tmp_path)
    again.add([ROW, ROW])
    assert len(run.frame()) == 1 and len(again.frame()) == 2 and len(read_rows(run.results)) == 3
    assert again.env_id == run.env_id and again.code_hash == run.code_hash


def test_a_run_goes_on(run, tmp_path, monkeypatch):
    run.add(ROW)
    again = Run("2_rot_pos_ids", "cpu", tmp_path, run.run_id)
    again.add({**ROW, "case": "later"})
    assert run.frame().case.tolist() == again.frame().case.tolist() == [ROW["case"], "later"]
    before = run.results.read_bytes()
    with pytest.raises(ValueError, match="run_id='nobody'.*no such run"):
        Run("2_rot_pos_ids", "cpu", tmp_path, "nobody")
    monkeypatch.setattr("vitkit.lab.results.code_hash", lambda notebook: "other")
    with pytest.raises(ValueError, match="has code_hash=.*'other', is allowed"):
        Run("2_rot_pos_ids", "cpu", tmp_path, run.run_id)
    assert run.results.read_bytes() == before


def test_finish_says_what_was_written_and_what_is_wrong(run, capsys):
    good = {**ROW, "correct": True, "median_us": 1.0}
    run.add([good, {**ROW, "impl": "liger", "error": "not capturable: it reads the device"}])
    run.count("D = 80", "liger", SHARE, 3.0)
    run.count("D = 80", "numba", SHARE, 0.98)
    run.finish()
    said = capsys.readouterr().out.splitlines()
    data = f"{run.root.resolve()}/data"  # whole, for it lies outside the repository
    csv = f"{data}/results/{run.slug}/2_rot_pos_ids"
    assert said[:3] == [f"wrote {data}/env/{run.env_id}.json", f"wrote {csv}.csv", f"wrote {csv}-counts.csv"]
    assert len(said) == 5 and all(line.startswith("a peer is left out: ") and "liger" in line for line in said[3:])
    assert all((run.root / path).is_file() and not path.is_absolute() for path in run.paths())
    run.add(
        [{**ROW, "impl": "bad", "correct": False, "note": "3 differ"}, {**ROW, "impl": "ill", "error": "OSError: x"}]
    )
    run.add({**good, "impl": "ours", "error": "not capturable: illegal memory access"})
    run.add({**good, "impl": "untimed", "median_us": None})
    run.count("D = 64", "numba", SHARE, 1.2)
    with pytest.raises(RuntimeError, match="5 results are wrong or failed") as error:
        run.finish()
    for what in (
        "bad, one): 3 differ",
        "ill, one): OSError: x",
        "ours, one): not cap",
        "untimed, one)",
        "numba, D = 64): 1.2",
    ):
        assert what in str(error.value)
    assert "/data/results" in capsys.readouterr().out


def test_figures_are_the_same_bytes_every_time(run):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().plot([1, 2], [3, 4])
    run.save_figure(figure, "latency")
    svg = run.figures / "2_rot_pos_ids-latency.svg"
    first = svg.read_bytes()
    run.save_figure(figure, "latency")
    assert svg.read_bytes() == first and svg.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in run.paths()][-2:] == ["2_rot_pos_ids-latency.svg", "2_rot_pos_ids-latency.png"]
    assert sorted(path.suffix for path in run.figures.iterdir()) == [".png", ".svg"]


def test_tables_are_markdown(run):
    run.save_table(pd.DataFrame({"case": ["one"], "median": [1.5]}), "summary")
    text = (run.figures / "2_rot_pos_ids-summary.md").read_text()
    assert "| one" in text and text.endswith("|\n")


def test_the_code_hash_follows_sources_only(tmp_path):
    (tmp_path / "vitkit" / "lab").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    module, notebook = tmp_path / "vitkit" / "lab" / "a.py", tmp_path / "notebooks" / "1_a.ipynb"
    a, b = "from vitkit.lab import a\n", "b = 2"

    def write(code, source, outputs=()):
        module.write_text(code)
        cell = {"cell_type": "code", "source": source, "outputs": list(outputs), "metadata": {"n": len(outputs)}}
        notebook.write_text(json.dumps({"cells": [cell], "metadata": {}}))
        return results.code_hash("1_a", tmp_path)

    first = write("x = 1", [a, b])
    (tmp_path / "vitkit" / "__pycache__").mkdir()
    (tmp_path / "vitkit" / "__pycache__" / "a.pyc").write_text("")
    assert first == write("x = 1", a + b, ["output"]) and len(first) == 64
    assert len({first, write("x = 2", a + b), write("x = 1", a + "c = 2"), results.code_hash("none", tmp_path)}) == 4
