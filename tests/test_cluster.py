"""A batch on a Dask cluster of this machine: two workers, one killed in the middle, against the batch run locally."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("papermill")
pytest.importorskip("distributed")
from vitkit.lab import batch, cluster, results, runner
from vitkit.lab.cluster_child import device_lock
from vitkit.lab.rows import read_rows

REPOSITORY = Path(runner.__file__).resolve().parents[2]
PARAMETERS = 'device: str = "auto"\nout: str = ""\nscale: int = 1'
# Rows as fixed as can be, in two steps; the third run that a worker begins hangs between them.
MEASURE = """import os, time
from pathlib import Path
from vitkit.lab.results import Run
run = Run("{stem}", device, out)
start, worker = time.time(), os.environ.get("TEST_WORKER", "")
same = dict(op="toy", dtype="float32", clock="e2e", correct=True, n_tokens=8, params={{"scale": {scale}}})
run.add(dict(same, impl="fast", case="a", median_us=2.0 * {scale}))
marks = Path({marks!r})
(marks / f"{{worker}}-{stem}-{{{scale}}}").write_text(str(os.getpid()))
if worker and len(list(marks.glob("[ab]-*"))) == 3:
    time.sleep(300)
run.count("a", "fast", "launches", {scale})
run.add(dict(same, impl="transformers", case="a", median_us=9.0))
(marks / f"times-{{worker}}-{stem}-{{{scale}}}").write_text(f"{{start}} {{time.time()}}")
run.finish()"""


@pytest.fixture
def dask(tmp_path):
    """start(name, *arguments, **environment) starts a scheduler or a worker; all are ended with the test."""
    processes = []

    def start(kind, *arguments, **environment):
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DASK_DISTRIBUTED__ADMIN__LOG_LENGTH": "0", **environment}
        with open(tmp_path / f"{kind}{len(processes)}.log", "w") as log:
            command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments, "--no-dashboard"]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=tmp_path))
        return processes[-1]

    def scheduler():
        file = tmp_path / "scheduler.json"
        start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        wait_for(lambda: file.exists() and json.loads(file.read_text()), "the scheduler did not start")
        return json.loads(file.read_text())["address"]

    def worker(address, name, *arguments):
        folder = tmp_path / f"tmp-{name}"  # as if on a machine of its own, with its own locks
        folder.mkdir()
        arguments = (address, "--no-nanny", "--host", "127.0.0.1", "--local-directory", str(folder), *arguments)
        return start("worker", *arguments, TEST_WORKER=name, TMPDIR=str(folder))

    yield scheduler, worker, processes
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition, what, seconds=90):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if condition():
                return
        except ValueError:  # a file half written
            pass
        time.sleep(0.1)
    pytest.fail(what)


def measured(root):
    """The rows and counts of a tree, without what differs from run to run; and the number of runs."""
    found, ids = [], []
    for path in sorted(root.glob("data/results/*/*.csv")):
        df = read_rows(path)
        ids += list(df.run_id.unique())
        df = df.drop(columns=["run_id", "utc", "code_hash"])  # toys stand in no checkout: see the test of the bundle
        found += [(path.name, *map(str, row)) for row in df.itertuples(index=False)]
    return sorted(found), len(set(ids))


def test_two_workers_one_killed_against_a_local_run(toy, dask, tmp_path, capsys):
    marks = tmp_path / "marks"
    marks.mkdir()
    toy("1_a", MEASURE.format(stem="1_a", marks=str(marks), scale="scale"), parameters=PARAMETERS)
    toy("2_b", MEASURE.format(stem="2_b", marks=str(marks), scale=1), parameters=PARAMETERS.rpartition("\n")[0])
    away, local = tmp_path / "away", tmp_path / "local"

    def jobs(out):
        return batch.make_jobs([], [("out", str(out)), ("device", "cpu")], ["scale=1,2"], "", tmp_path / "notebooks")

    assert runner.run(jobs(local), tmp_path) == 0
    capsys.readouterr()
    for path in marks.iterdir():
        path.unlink()

    start_scheduler, start_worker, _ = dask
    address = start_scheduler()
    workers = {name: start_worker(address, name, "--nthreads", "2", "--resources", "GPU=1") for name in "ab"}
    begun = []

    def kill_in_the_middle():
        wait_for(lambda: len(list(marks.glob("[ab]-*"))) == 3, "no third run began")
        begun.extend(sorted(marks.glob("[ab]-*"), key=lambda path: path.stat().st_mtime_ns))
        os.kill(workers[begun[-1].name[0]].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_in_the_middle)
    thread.start()
    assert runner.run(jobs(away), tmp_path, scheduler=address) == 0
    thread.join()
    said = capsys.readouterr().out

    assert measured(away) == measured(local) and measured(local)[1] == 3 and len(measured(local)[0]) == 9
    hung = begun[-1]
    victim, other = hung.name[0], "ab".replace(hung.name[0], "")
    assert workers[victim].wait(5) == -signal.SIGKILL and not (marks / f"times-{hung.name}").exists()
    assert (marks / f"times-{other}{hung.name[1:]}").exists()  # taken over
    with pytest.raises(ProcessLookupError):  # its kernel is gone
        os.kill(int(hung.read_text()), 0)
    left = [path for path in tmp_path.glob("tmp-*/vitkit-*") if path.is_dir()]
    assert not left, "folders of runs are left"
    for name in "ab":  # two threads, one GPU: one run at a time
        times = sorted(tuple(map(float, path.read_text().split())) for path in marks.glob(f"times-{name}-*"))
        assert times and all(end <= start for (_, end), (start, _) in zip(times, times[1:]))
    assert said.count("2 rows, all correct") == 3 and "4.50x transformers" in said
    state = json.loads(max(tmp_path.glob("runs/*/state.json")).read_text())
    assert state["status"] == "finished" and len(state["finished"]) == 3 and state["running"] is None
    assert {path.stem for path in tmp_path.glob(f"runs/{state['utc']}/*.ipynb")} == {"1_a.1", "1_a.2", "2_b"}


def test_a_failure_there_and_an_interrupt_here(toy, dask, tmp_path, capsys):
    """What a failed run had measured comes home; Ctrl-C ends the runs that are under way, on their machines too."""
    marks = tmp_path / "marks"
    marks.mkdir()
    begin = MEASURE.format(stem="1_fails", marks=str(marks), scale=1).splitlines()[:7]
    toy("1_fails", "\n".join(begin), "raise KeyError('gone')", parameters=PARAMETERS)
    pid = tmp_path / "pid"
    hang = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(300)"
    toy("2_hangs", hang, parameters=PARAMETERS)
    start_scheduler, start_worker, _ = dask
    address = start_scheduler()
    start_worker(address, "a")  # declares nothing: a run for each worker

    def interrupt():
        wait_for(lambda: pid.exists() and pid.read_text(), "the second run did not begin")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    out = tmp_path / "out"
    jobs = batch.make_jobs([], [("out", str(out)), ("device", "cpu")], [], "", tmp_path / "notebooks")
    assert runner.run(jobs, tmp_path, scheduler=address) == runner.INTERRUPTED
    thread.join()
    errors = capsys.readouterr().err
    state = json.loads(max(tmp_path.glob("runs/*/state.json")).read_text())
    assert state["status"] == "interrupted" and state["running"] == "2_hangs" and not state["finished"]
    assert "KeyError: 'gone'; 1 rows measured before it are kept in" in state["failed"]["1_fails"]
    assert len(measured(out)[0]) == 1 and errors.endswith("run: interrupted at 2_hangs; finished: none\n")
    wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the kernel goes on", 20)
    wait_for(lambda: not [path for path in tmp_path.glob("tmp-a/vitkit-*") if path.is_dir()], "a folder is left", 20)


def test_a_lost_scheduler_is_told_in_a_line(toy, dask, tmp_path):
    toy("1_a", parameters=PARAMETERS)
    address = dask[0]()
    code = "import pathlib, sys\nfrom vitkit.lab import batch, runner\nroot = pathlib.Path(sys.argv[1])\n"
    code += "jobs = batch.make_jobs([], [], [], '', root / 'notebooks')\n"
    code += "sys.exit(runner.run(jobs, root, scheduler=sys.argv[2]))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), address], env=env, **pipes) as process:
        assert process.stdout.readline() == "no worker is there: waiting for one\n"
        dask[2][0].kill()
        _, errors = process.communicate()
    assert process.returncode == 1 and errors.startswith("vitkit run: stopped: the ") and errors.count("\n") == 1


def test_the_code_that_travels_is_the_code_here(tmp_path):
    root = REPOSITORY
    path = root / "notebooks" / "2_rot_pos_ids.ipynb"
    job = batch.Job(path.stem, path, {"out": "/here", "grids": str(tmp_path / "trace.csv"), "threads": 1})
    (tmp_path / "trace.csv").write_text("1,4,6\n")
    packed = cluster._bundle(cluster._common_files(root), job)
    there = tmp_path / "there"
    zipfile.ZipFile(io.BytesIO(packed)).extractall(there)
    assert results.code_hash(path.stem, there) == results.code_hash(path.stem, root)
    sent = json.loads((there / "job.json").read_text())
    assert sent == {"notebook": path.stem, "values": {"grids": "grids.csv", "threads": 1}}
    assert (there / "grids.csv").read_text() == "1,4,6\n" and (there / "data" / "workloads.json").is_file()


def test_one_at_a_time_on_a_device(tmp_path):
    """Also where two workers were started for one GPU, or a worker was given several threads."""
    inside = threading.Event()

    def second():
        with device_lock(torch.device("cpu"), tmp_path):
            inside.set()

    thread = threading.Thread(target=second)
    with device_lock(torch.device("cpu"), tmp_path):
        thread.start()
        assert not inside.wait(0.5)
    assert inside.wait(10)
    thread.join()


def test_what_cannot_come_home_is_refused(toy, tmp_path):
    toy("1_a")
    with pytest.raises(ValueError, match=r"1_a\.ipynb has no parameter out"):
        cluster.check_jobs(batch.make_jobs([], [], [], "", tmp_path / "notebooks"))
    toy("1_a", parameters=PARAMETERS + '\nrun_id: str = ""')
    with pytest.raises(ValueError, match="run_id is not allowed with --scheduler"):
        cluster.check_jobs(batch.make_jobs([], [("run_id", "x")], [], "", tmp_path / "notebooks"))
