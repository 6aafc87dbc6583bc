"""What a Dask worker does with one run; it is sent there by value, and imports the standard library and distributed.

The notebook and the library come along as a zip: a worker's machine needs the requirements and no checkout. They run in
a process of their own (`cluster_child`), which ends with its worker: it sees the end of its standard input.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def run_notebook(bundle: bytes, key: str) -> dict:
    """Unpacks `bundle`, executes its job and returns {"error": a line or "", "zip": what was written, as bytes}."""
    from distributed import get_worker

    folder = Path(tempfile.mkdtemp(prefix="vitkit-"))
    try:
        zipfile.ZipFile(io.BytesIO(bundle)).extractall(folder)
        paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        with open(folder / "log", "w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "vitkit.lab.cluster_child", str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
            )
        _wait(child, lambda: _wanted(get_worker(), key))
        answer = folder / "answer.json"
        if answer.exists():
            error = json.loads(answer.read_text())["error"]
        else:
            last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
            error = f"its process ended with status {child.returncode}: {' '.join(last)}"
        return {"error": error, "zip": _pack(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def resources(dask_scheduler) -> list[dict]:
    """What each worker of the scheduler declares, such as {"GPU": 1}."""
    return [dict(worker.resources) for worker in dask_scheduler.workers.values()]


def _wait(child, wanted) -> None:
    """Until the child ends; one whose result nobody wants any more (Ctrl-C at home) is told to end."""
    while True:
        try:
            child.wait(0.3)
            return
        except subprocess.TimeoutExpired:
            if wanted():
                continue
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return


def _wanted(worker, key: str) -> bool:
    """Whether the scheduler still waits for the task `key`, as its worker knows it."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled"


def _pack(folder: Path) -> bytes:
    """out/ and the executed notebook, as far as there are any."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [folder / "executed.ipynb", *sorted((folder / "out").rglob("*"))]:
            if path.is_file() and path.suffix != ".part":
                archive.write(path, path.relative_to(folder).as_posix())
    return packed.getvalue()
