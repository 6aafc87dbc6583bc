"""Executing notebooks: what counts as finished, what stays after a failure or an interrupt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("papermill")
from vitkit.lab import runner, states
from vitkit.lab.batch import Job
from vitkit.lab.env import device_slug

RUN = """from vitkit.lab.results import Run
run = Run("{0}", device="cpu", out="..")
same = dict(op="toy", dtype="float32", case="a", n_tokens=10, clock="e2e", correct=True)
run.add([dict(same, impl="fast", median_us=2.0), dict(same, impl="transformers", median_us=9.0)])
run.finish()"""
DRAW = """from matplotlib.figure import Figure
from vitkit.lab.results import Run
run = Run("{0}", device="cpu", out="..")
run.save_figure(Figure(), "empty")"""
REPOSITORY = Path(runner.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def kernels_find_vitkit(monkeypatch):
    """Also where the tests run without an install."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def states_of(root):
    return [json.loads(path.read_text()) for path in sorted(root.glob("runs/*/state.json"))]


def csv_of(root, stem):
    return root / "data" / "results" / device_slug("cpu") / f"{stem}.csv"


def test_failures_do_not_stop_the_others(toy, tmp_path, capsys, monkeypatch):
    """Also: the kernel is this interpreter, although Jupyter's search path has another python3 first."""
    shadow = tmp_path / "jupyter" / "kernels" / "python3"
    shadow.mkdir(parents=True)
    (shadow / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    here = (
        f"import os, sys\nassert (sys.executable, os.path.split(os.getcwd())[1]) == ({sys.executable!r}, 'notebooks')"
    )
    paths = [
        toy("1_raises", "x = 1", RUN.format("1_raises"), "raise KeyError('gone')"),
        toy("2_dies", "import os\nos._exit(0)", "y = 2"),
        toy("3_writes_nothing", "z = 3"),
        toy("3_draws", DRAW.format("3_draws")),
        toy("4_works", here, RUN.format("4_works").replace('"a"', '"own line 1"'), "assert size == 'cpu'"),
    ]
    jobs = [Job(path.stem, path, {"size": "cpu"} if path.stem == "4_works" else {}) for path in paths]
    assert runner.run(jobs, tmp_path) == 1
    said, errors = capsys.readouterr()
    (state,) = states_of(tmp_path)
    assert errors.splitlines() == [f"vitkit run: {key} failed: {why}" for key, why in state["failed"].items()]
    assert state["status"] == "failed" and list(state["finished"]) == ["3_draws", "4_works"], state
    assert state["finished"]["4_works"]["rows"] == 2
    assert state["parameters"]["4_works"] == {"size": "cpu"}
    assert "KeyError: 'gone'" in state["failed"]["1_raises"] and "raise KeyError" in state["failed"]["1_raises"]
    assert "2 rows measured before it are kept in" in state["failed"]["1_raises"]
    assert state["failed"]["2_dies"] == "DeadKernelError: the kernel died with exit status 0"
    assert "no row was written" in state["failed"]["3_writes_nothing"]
    folder = f"runs/{state['utc']}"
    assert "3_draws: figures, no rows" in said and f"figures/{device_slug('cpu')}/3_draws-empty.svg" in said
    assert "[5/5] 4_works" in said and f"{folder}/1_raises.ipynb" in said
    assert "4_works: 2 rows, all correct" in said and "4.50x transformers" in said
    assert "your own grids: 2 rows" in said and f"\n  run {state['finished']['4_works']['run_ids'][0]}\n" in said
    assert f"data/results/{device_slug('cpu')}/4_works.csv" in said and "data/env/" in said
    assert (tmp_path / folder / "4_works.ipynb").exists()

    assert runner.run([jobs[2]], tmp_path) == 1  # rows of an earlier run are none of this one
    said = capsys.readouterr().out
    assert f"the previous run ({state['utc']}) failed at 1_raises, 2_dies, 3_writes_nothing" in said
    assert ", 4_works (2 rows in data/results/" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_had_finished(toy, tmp_path, capsys, number):
    toy("1_first", RUN.format("1_first"))
    started = tmp_path / "started"
    slow = f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(120)"
    toy("2_slow", slow)
    code = (
        "import pathlib, sys\nfrom vitkit.lab import batch, runner\n"
        f"root = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(runner.run(batch.make_jobs([], [], [], '', root / 'notebooks'), root))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (started.exists() and started.read_text()) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert err.startswith("vitkit run: interrupted at 2_slow; finished: 1_first (2 rows in data/results/")
    assert err.count("\n") == 1, err
    with pytest.raises(ProcessLookupError):  # the kernel is gone too
        os.kill(int(started.read_text()), 0)
    (state,) = states_of(tmp_path)
    assert state["status"] == "interrupted" and state["running"] == "2_slow" and list(state["finished"]) == ["1_first"]
    assert len(csv_of(tmp_path, "1_first").read_text().splitlines()) == 3

    assert runner.run([], tmp_path) == 0
    assert f"the previous run ({state['utc']}) was interrupted at 2_slow; finished: 1_first" in capsys.readouterr().out


def test_a_killed_run_is_told_too(tmp_path, capsys):
    """SIGKILL leaves a state that says "running", and no lock."""
    (tmp_path / "runs").mkdir()
    folder, state = states.new_run(tmp_path / "runs", [Job("1_a", Path("1_a.ipynb"), {})])
    states.note(folder, state, running="1_a")
    assert runner.run([], tmp_path) == 0
    assert "was interrupted at 1_a; finished: none" in capsys.readouterr().out
