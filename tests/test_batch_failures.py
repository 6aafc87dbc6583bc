"""What goes wrong on the way: a line each, a status, and every row that was measured still whole on the disk."""

import json
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

pytest.importorskip("papermill")
from vitkit import cli
from vitkit.lab import runner
from vitkit.lab.batch import Job, check_outputs
from vitkit.lab.env import device_slug
from vitkit.lab.rows import read_rows

BEGIN = """from vitkit.lab.results import Run
run = Run("{stem}", "cpu", out)
row = dict(op="toy", impl="fast", dtype="float32", case="a", n_tokens=8, clock="e2e", correct=True, median_us=2.0)
run.add(row)"""
OUT = 'out: str = ""\ndevice: str = "cpu"'


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) mounts a small file system in memory and returns its folder."""
    folders = []

    def mount(options):
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no mounting here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def rows_of(root, stem):
    """The rows of a CSV, without a torn line in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_rows(root / "data" / "results" / device_slug("cpu") / f"{stem}.csv")


def run(root, *paths, **how):
    return runner.run([Job(path.stem, path, {"out": str(root / "out")}) for path in paths], root, **how)


def state_of(root):
    return json.loads(max(root.glob("runs/*/state.json")).read_text())


def test_a_killed_kernel_then_stop_then_resume(toy, tmp_path, capsys, caplog):
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    dead = toy("1_dead", BEGIN.format(stem="1_dead"), kill, parameters=OUT)
    good = toy("2_good", BEGIN.format(stem="2_good"), parameters=OUT)
    assert run(tmp_path, dead, good, stop=True) == 1
    (said, errors), state = capsys.readouterr(), state_of(tmp_path)
    assert list(state["failed"]) == ["1_dead"] and not state["finished"] and state["status"] == "failed"
    assert state["failed"]["1_dead"].startswith("DeadKernelError: the kernel died of SIGKILL (killed by someone,")
    assert "1 rows measured before it are kept in" in state["failed"]["1_dead"]
    assert errors == f"vitkit run: 1_dead failed: {state['failed']['1_dead']}\n"
    assert not [said for said in caplog.messages if "Kernel died" in said]  # which would be another line on stderr
    assert [line.split()[:2] for line in said.splitlines()[-2:]] == [["1_dead", "failed"], ["2_good", "not"]]
    assert len(rows_of(tmp_path / "out", "1_dead")) == 1

    toy("1_dead", BEGIN.format(stem="1_dead"), parameters=OUT)  # mended
    from vitkit.lab import batch, states

    earlier = states.load(tmp_path / "runs")
    jobs = batch.missing_jobs(earlier[1], tmp_path / "notebooks")
    assert runner.run(jobs, tmp_path, earlier=earlier) == 0
    state = state_of(tmp_path)
    assert list(state["finished"]) == ["1_dead", "2_good"] and not state["failed"] and state["status"] == "finished"
    assert len(list(tmp_path.glob("runs/*/state.json"))) == 1
    assert [len(rows_of(tmp_path / "out", stem)) for stem in ("1_dead", "2_good")] == [2, 1]


FILL = """import os
with open(os.path.join({0!r}, "ballast"), "wb", buffering=0) as file:
    try:
        while file.write(bytes(512)):
            pass
    except OSError:
        pass"""


def test_a_full_disk_under_the_results(toy, mounted, tmp_path, capsys):
    out = mounted("size=256k")
    add = 'run.add([dict(row, note="x" * 5000)] * 9)'
    full = toy("1_full", BEGIN.format(stem="1_full"), FILL.format(str(out)), add, parameters=OUT)
    good = toy("2_good", BEGIN.format(stem="2_good"), parameters=OUT)
    jobs = [Job("1_full", full, {"out": str(out)}), Job("2_good", good, {"out": str(tmp_path / "out")})]
    assert runner.run(jobs, tmp_path) == 1
    errors, state = capsys.readouterr().err, state_of(tmp_path)
    assert "o space left" in state["failed"]["1_full"] and "\n" not in state["failed"]["1_full"]
    assert "1 rows measured before it are kept in" in state["failed"]["1_full"]
    assert list(state["finished"]) == ["2_good"] and errors.startswith("vitkit run: 1_full failed: cell [")
    assert errors.count("\n") == 1
    assert len(rows_of(out, "1_full")) == 1 and len(rows_of(tmp_path / "out", "2_good")) == 1


def test_a_full_disk_under_the_state(toy, mounted, tmp_path, capsys):
    root = mounted("size=256k")
    (root / "notebooks").mkdir()
    paths = []
    for stem in ("1_a", "2_fills", "3_c"):
        cells = [BEGIN.format(stem=stem)] + [FILL.format(str(root))] * (stem == "2_fills")
        paths.append(Path(shutil.copy(toy(stem, *cells, parameters=OUT), root / "notebooks")))
    jobs = [Job(path.stem, path, {"out": str(tmp_path / "out")}) for path in paths]
    assert runner.run(jobs, root) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vitkit run: stopped: ")
    assert "state.json: cannot be written (No space left on device)" in line and "finished: 1_a (1 rows" in line
    assert state_of(root)["finished"].keys() == {"1_a"} and not list(root.glob("runs/*/.state.json.*"))
    assert [len(rows_of(tmp_path / "out", stem)) for stem in ("1_a", "2_fills")] == [1, 1]


@pytest.fixture
def status(tmp_path, monkeypatch, capsys):
    """The exit status of a command line in a checkout with toys, and the line on stderr."""
    monkeypatch.setattr("vitkit.lab.results.repo_root", lambda: tmp_path)
    monkeypatch.setattr("papermill.execute_notebook", lambda *args, **kwargs: pytest.fail("a kernel was started"))

    def call(*argv):
        number = cli.main(["run", *argv])
        out, err = capsys.readouterr()
        assert not out and err.startswith("vitkit run: ") and err.count("\n") == 1
        return number, err

    return call


def test_an_output_that_cannot_be_written(toy, mounted, tmp_path, status):
    toy("1_a", parameters=OUT)
    (tmp_path / "file").touch()
    number, said = status("-p", "out", str(tmp_path / "file" / "below"))
    assert number == 2 and f"{tmp_path / 'file'} is no folder; a writable folder is allowed" in said
    readonly = mounted("ro,size=64k")
    number, said = status("-p", "out", str(readonly / "below"))
    assert number == 2 and "is on a read-only file system; a writable folder is allowed" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mount0", "notebooks"]
    (tmp_path / "runs").touch()
    number, said = status()
    assert number == 2 and f"cannot write in {tmp_path / 'runs'}: File exists" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="no permission to write"):
        check_outputs([Job("1_a", tmp_path / "1_a.ipynb", {"out": str(tmp_path / "x")})], tmp_path)


def test_refused_with_a_line(toy, tmp_path, status):
    toy("1_a", parameters=OUT + "\nthreads: int = 1")
    assert status("--scheduler", "tcp://127.0.0.1:1")[0] == 2
    assert status("--scheduler", "nonsense") == (
        2,
        "vitkit run: --scheduler nonsense: an address such as tcp://host:8786 is allowed\n",
    )
    assert status("-p", "device", "cuda:77")[1].startswith("vitkit run: device='cuda:77': ")
    assert "threads='x': an integer is allowed" in status("--sweep", "threads=1,x")[1]
    path = toy("2_b")
    path.write_text(path.read_text().replace('"parameters"', '"other"'))
    number, said = status()
    assert number == 2 and said.startswith("vitkit run: 2_b.ipynb has no cell tagged parameters: ")
