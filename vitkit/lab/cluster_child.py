"""The process that executes one notebook on a worker's machine: python -m vitkit.lab.cluster_child FOLDER.

FOLDER holds job.json, notebooks/ and this library; out/, executed.ipynb and answer.json are written there. The end of
standard input means that the worker is gone or wants no result: then the kernel is killed and FOLDER removed.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vitkit.lab import execute

_gone = threading.Event()  # the worker


def main(folder: Path) -> None:
    threading.Thread(target=_end_with_the_worker, args=[folder], daemon=True).start()
    job = json.loads((folder / "job.json").read_text())
    path, values = folder / "notebooks" / f"{job['notebook']}.ipynb", {**job["values"], "out": str(folder / "out")}
    if isinstance(values.get("grids"), str):
        values["grids"] = str(folder / values["grids"])
    error = ""
    try:
        from vitkit.lab.env import resolve_device

        with device_lock(resolve_device(values.get("device", "auto"))):
            execute.execute(path, values, folder / "executed.ipynb")
    except Exception as raised:
        error = execute.describe(raised)
    if _gone.is_set():
        threading.Event().wait()  # the other thread ends this process, once it has tidied up
    part = folder / "answer.json.part"
    part.write_text(json.dumps({"error": error}))
    part.replace(folder / "answer.json")


@contextmanager
def device_lock(device, folder=None):
    """Held by one process of this machine at a time, for each GPU that it sees, or for the CPU: timed work is alone.

    It waits for the others. folder: where the lock files lie (default: the system's for temporary files).
    """
    import torch

    names = ["cpu"]
    if device.type == "cuda":  # all that are visible: a notebook may use several
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = sorted(str(getattr(gpu, "uuid", i)) for i, gpu in enumerate(gpus))  # in one order: no deadlock
    with ExitStack() as held:
        for name in names:
            path = Path(folder or tempfile.gettempdir()) / f"vitkit-{name}.lock"
            if not path.exists():
                path.touch()
            file = held.enter_context(open(path))  # for reading: it may be another user's
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _end_with_the_worker(folder: Path) -> None:
    sys.stdin.buffer.read()
    _gone.set()
    for _ in range(20):  # a kernel may just be starting
        execute.kill_kernels()
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
