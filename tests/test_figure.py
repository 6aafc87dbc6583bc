import io
import os
import subprocess
import sys
from pathlib import Path

from vitkit.lab.figure import Figure

KINDS = 18  # of figures, in every_figure.py


def test_equal_rows_are_equal_bytes_in_every_process_however_often_shown():
    started = []
    for seed, shown in (("0", []), ("1", ["shown"])):  # other orders of sets in each
        command = [sys.executable, str(Path(__file__).with_name("every_figure.py")), *shown]
        path = os.pathsep.join(map(str, (Path(__file__).resolve().parents[1], os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (process.communicate(timeout=300)[0].splitlines() for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert len(first) == 2 * KINDS and first == second


def test_it_is_laid_out_once_and_places_after_that():
    figure, placed = Figure(layout="constrained"), []
    ax = figure.subplots()
    figure.placing.append(lambda: placed.append(ax.get_position().width))
    figure.savefig(io.BytesIO(), format="svg")
    first = ax.get_position().bounds
    ax.set_ylabel("a name\nof three\nlines")  # would have moved the axes
    figure.savefig(io.BytesIO(), format="png")
    assert placed == [first[2]] and ax.get_position().bounds == first


def test_metadata_that_is_asked_for_is_kept():
    file = io.BytesIO()
    Figure().savefig(file, format="svg", metadata={"Title": "mine"})
    assert b"<dc:title>mine" in file.getvalue() and b"dc:date" not in file.getvalue()
