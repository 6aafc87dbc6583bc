"""Starts parallel_bench on this machine under torchrun, and reads what its rank 0 wrote."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from . import parallel_bench
from .env import resolve_device
from .parallel_cases import divided_threads, rank_counts
from .progress import progress
from .results import SHARE
from .timing import _said

LIMIT_S = 3600


def command(nproc: int, options) -> list[str]:
    """torchrun's, for one machine, with a free port of its own choice."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"),
        *("-m", parallel_bench.__name__, *map(str, options)),
    ]


def environment() -> dict:
    """Every rank imports the library that this process runs, wherever another one may be installed."""
    here = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # torchrun's choice, without its warning
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
    }


def run(nproc: int, device="auto", size="auto", tower="both", threads=0, out="", said=None) -> int:
    """parallel_bench on `nproc` ranks; its exit status. said: None to print, or a list that gets the printed lines.

    ValueError, before anything starts, where there are fewer GPUs or `out` cannot be a file.
    """
    kind = resolve_device(device).type
    if kind == "cuda" and nproc > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise ValueError(f"nproc={nproc}: up to {gpus} is allowed here, one rank a GPU (or --device cpu)")
    if out and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise ValueError(f"out={str(out)!r}: a file is allowed, in a folder that is there")
    options = ["--device", kind, "--size", size, "--tower", tower, "--threads", threads]
    options += ["--out", out] if out else []
    streams = {} if said is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen(command(nproc, options), env=environment(), preexec_fn=_end_with_us, **streams)
    try:
        text, _ = started.communicate(timeout=LIMIT_S)
    except BaseException:  # an interrupt, or too late: torchrun ends its ranks when it is asked to
        started.terminate()
        started.wait()
        raise
    if said is not None:
        said += text.splitlines()
    return started.returncode


def _end_with_us():
    """In torchrun's process: it is asked to end when this one has died, as a notebook's kernel may (Linux)."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def lines(nproc: int, **options) -> list[dict]:
    """{"row": ...} and {"count": ...} of a run on `nproc` ranks; RuntimeError where it ended before it was through."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "lines.jsonl", []
        status = run(nproc, out=str(out), said=said, **options)
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.is_file() else []
        if status and all(line["row"]["correct"] for line in found if "row" in line):
            why = next((line for line in said if re.search(r"Error\b", line)), "it said no error")
            raise RuntimeError(
                f"{nproc} ranks ended with status {status} after {len(found)} lines: {_said(Exception(why))}"
            )
        return found


def measure(run, size, tower, threads) -> list[int]:
    """All of notebook 6 into a `results.Run`: on 1, 2, 4 and so on ranks, as many as there are GPUs, or on a CPU 2.

    Returns the numbers of ranks. With one GPU there is one rank; then two processes on the CPU are compared with one
    as well, at tiny sizes, and what they differ by is counted, without a time.
    """
    ranks = rank_counts(size, run.device, torch.cuda.device_count())
    threads = divided_threads(threads, max(ranks))  # the same for any number of ranks
    for nproc in progress(ranks, "numbers of ranks"):
        for line in lines(nproc, device=run.device.type, size=size.name, tower=tower, threads=threads):
            if "row" in line:
                run.add(line["row"])
            else:
                run.count(*line["count"])
    if max(ranks) == 1:
        print("one GPU, so one rank: nothing is shared out here; two gloo processes are compared on the CPU")
        for line in lines(2, device="cpu", size="tiny", tower=tower, threads=1):
            if "row" in line:
                row = line["row"]
                share = 0.0 if row["correct"] else float("inf")
                run.count(row["case"], f"{row['impl']}, ranks=2 on the CPU", SHARE, share, "1")
    return ranks
