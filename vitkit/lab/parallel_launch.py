"""Starts parallel_bench on this machine under torchrun, and reads what its rank 0 wrote."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .env import resolve_device
from .parallel_cases import divided_threads, rank_counts
from .results import SHARE
from .timing import _said

LIMIT_S = 3600


def command(nproc: int, options) -> list[str]:
    """torchrun's, for one machine, with a free port of its own choice."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"),
        *("-m", "vitkit.lab.parallel_bench", *map(str, options)),
    ]


def environment() -> dict:
    """Every rank imports the library that this process runs, wherever another one may be installed."""
    here = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # torchrun's choice, without its warning
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
    }


def run(nproc: int, device="auto", size="auto", tower="both", threads=0, out="", quiet=False) -> int:
    """parallel_bench on `nproc` ranks; its exit status. ValueError, before anything starts, for fewer GPUs."""
    kind = resolve_device(device).type
    if kind == "cuda":
        if nproc > torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise ValueError(f"nproc={nproc}: up to {gpus} is allowed here, one rank a GPU (or --device cpu)")
    options = ["--device", kind, "--size", size, "--tower", tower, "--threads", threads]
    start = {"args": command(nproc, [*options, *(["--out", out] if out else [])]), "env": environment()}
    if not quiet:
        return subprocess.run(**start).returncode
    done = subprocess.run(**start, timeout=LIMIT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode and not (out and Path(out).is_file()):
        said = [line for line in done.stdout.splitlines() if "Error" in line]
        raise RuntimeError(f"{nproc} ranks on {kind} failed: {_said(Exception(said[0] if said else 'no message'))}")
    return done.returncode


def lines(nproc: int, **options) -> list[dict]:
    """{"row": ...} and {"count": ...} of a run on `nproc` ranks; RuntimeError where it ended before it was through."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        status = run(nproc, out=str(out), quiet=True, **options)
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if status and all(line["row"]["correct"] for line in found if "row" in line):
            raise RuntimeError(f"{nproc} ranks ended with status {status} after {len(found)} lines")
        return found


def measure(run, size, tower, threads) -> list[int]:
    """All of notebook 6 into a `results.Run`: on 1, 2, 4 and so on ranks, as many as there are GPUs, or on a CPU 2.

    Returns the numbers of ranks. With one GPU there is one rank; then two processes on the CPU are compared with one
    as well, at tiny sizes, and what they differ by is counted, without a time.
    """
    ranks = rank_counts(size, run.device, torch.cuda.device_count())
    threads = divided_threads(threads, max(ranks))  # the same for any number of ranks
    for nproc in ranks:
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
