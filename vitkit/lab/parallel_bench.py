"""What every rank runs of notebook 6 and of `python -m vitkit parallel`: times `encode` on a ladder of batches.

    torchrun --standalone --nproc-per-node 2 -m vitkit.lab.parallel_bench --device cpu

Rank 0 appends JSON lines to --out, {"row": ...} or {"count": ...} as `results.Run` takes them, and prints a table. A
time is the slowest rank's, from a barrier until the features are ready on its device (clock e2e); the ways take turns.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..models import accelerate_
from . import cases
from . import parallel_cases as work
from .forward_cases import _in_float32, flops
from .overview import duration
from .timing import _said
from .tower import TOWERS, make_towers, merged

BUDGETS = {"tiny": (0.05, 2, 3), "cpu": (0.5, 5, 30), "gpu": (3.0, 10, 50)}  # seconds a case, rounds at least, at most
PHASE_ROUNDS = 5
TIMEOUT = timedelta(minutes=5)  # of an exchange; the first one waits for the reference on rank 0


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="vitkit.lab.parallel_bench", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--size", default="auto", choices=["auto", *BUDGETS])
    parser.add_argument("--tower", default="both", choices=["both", *TOWERS])
    parser.add_argument("--threads", type=int, default=0, help="of torch, a rank; 0 divides the cores among the ranks")
    parser.add_argument("--out", default="", help="file that JSON lines are appended to")
    args = parser.parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink does not start on every host
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = {"device_id": device} if on_gpu else {}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, **options)
    try:
        threads = work.divided_threads(args.threads, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        torch.set_num_threads(threads)
        bench = Bench(device, cases.pick_size(args.size, device), threads, args.out)
        for name in TOWERS if args.tower == "both" else [args.tower]:
            bench.tower(name)
        return 0 if bench.right else 1
    finally:
        dist.destroy_process_group()


class Bench:
    """One process's part; `right` is whether every result was."""

    def __init__(self, device, size, threads, out):
        self.device, self.size, self.threads, self.out = device, size, threads, out
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.right = True
        self._print(f"ranks: {self.world}, {dist.get_backend()}, {device.type}, {threads} CPU threads each\n")

    def tower(self, name):
        """Every workload on one tower, with the weights of rank 0."""
        torch.manual_seed(0)
        tower = make_towers(name, "", self.device)[name]
        for parameter in tower.parameters():
            dist.broadcast(parameter.data, 0)
        exact = deepcopy(tower).float() if self.rank == 0 else None
        accelerate_(tower)
        for kind, label, grid in work.parallel_grids(self.size):
            self.case(name, tower, exact, kind, label, grid)
        del tower, exact
        gc.collect()

    def case(self, name, tower, exact, kind, label, grid):
        pixels = self._pixels(tower, grid)
        calls = work.ways(tower, pixels, grid, self.world)
        right = self._reference(tower, exact, pixels, grid)
        dtype = tower.patch_embed.proj.weight.dtype
        params = {"tower": name, "layers": len(tower.blocks), "workload": kind, "ranks": self.world}
        params |= {"threads": self.threads, "flop": flops(tower, grid)}
        same = {"op": work.OP, "direction": "fwd", "dtype": str(dtype).removeprefix("torch."), "grid_thw": grid}
        same |= {"case": f"{name}, {label}", "params": params, "n_images": len(grid), "n_tokens": cases.tokens(grid)}
        rows = {impl: self._checked(impl, call, right) for impl, call in calls.items()}
        good = {impl: calls[impl] for impl, row in rows.items() if row["correct"]}
        for impl, times in self._rounds(good).items():
            p20, median, p80 = (round(float(np.percentile(times, p)), 3) for p in (20, 50, 80))
            rows[impl].update(n=len(times), median_us=median, p20_us=p20, p80_us=p80)
        for impl, row in rows.items():
            self._write(row=same | {"impl": impl, "clock": "e2e", "cache": "warm"} | row)
            took = duration(row["median_us"]) if "median_us" in row else row.get("error") or row["note"]
            self._print(f"{name:11} {label:24} {impl:20} {took:>9}")
        for impl in good:
            self._count(impl, same["case"], tower, pixels, grid, good[impl])

    def _pixels(self, tower, grid):
        """float32 on the CPU as an image processor gives them, the same on every rank; pinned where there is a GPU."""
        width = tower.patch_embed.proj.weight[0].numel()
        pixels = torch.randn(cases.tokens(grid), width, generator=torch.Generator().manual_seed(0))
        return pixels.pin_memory() if self.device.type == "cuda" else pixels

    def _reference(self, tower, exact, pixels, grid):
        """On rank 0 (what is right, the error allowed), from one process alone; else None."""
        if self.rank:
            return None
        x, table = pixels.to(self.device), torch.tensor(grid)
        with torch.no_grad():
            one = merged(tower(x, grid_thw=table))
        with _in_float32():
            return work.allowed(one.dtype, one, merged(exact(x, grid_thw=table.to(self.device))))

    def _checked(self, impl, call, right) -> dict:
        """The first call: right on rank 0, and the same bits on the others."""
        row = {"correct": False, "error": "", "note": ""}
        try:
            dist.barrier()
            start = time.perf_counter()
            out = call()
            self._sync()
            took = 1e6 * (time.perf_counter() - start)
        except Exception as error:  # encode raises on all ranks
            self.right = False
            return row | {"error": _said(error)}
        first = out.clone()
        dist.broadcast(first.view(torch.uint8), 0)
        same = torch.equal(first, out)
        if right:
            error = work.error_of(out, right[0])
            same = out.shape == right[0].shape and error <= right[1]
            row["note"] = f"error {error:.3g}, allowed {right[1]:.3g}"
        # one verdict, that of all ranks; and the slowest rank's time
        verdict = torch.tensor([-float(same), took], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MAX)
        row["correct"] = verdict[0].item() == -1
        row["first_call_us"] = round(verdict[1].item(), 3)
        self.right &= row["correct"]
        return row

    def _rounds(self, calls) -> dict:
        """{impl: times in us of the slowest rank}, the ways in an order shuffled anew in each round."""
        budget, least, most = BUDGETS[self.size.name]
        order, times = random.Random(0), {impl: [] for impl in calls}
        if not calls:
            return times
        for call in calls.values():  # a second warm-up, from which a CUDA graph may be captured
            call()
        spent = sum(self._timed(call) for call in calls.values())
        n = torch.tensor([min(most, max(least, int(budget * 1e6 / spent)))], device=self.device)
        dist.broadcast(n, 0)  # one number for all
        for _ in range(int(n)):
            for impl in order.sample(list(calls), len(calls)):
                times[impl].append(self._timed(calls[impl]))
        slowest = torch.tensor([times[impl] for impl in calls], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return dict(zip(calls, slowest.tolist()))

    def _timed(self, call) -> float:
        dist.barrier()
        self._sync()
        start = time.perf_counter()
        call()
        self._sync()
        return 1e6 * (time.perf_counter() - start)

    def _count(self, impl, case, tower, pixels, grid, call):
        """Loads, bytes, and for the ways through `encode` the time of each phase, the mean over the ranks."""
        version = f"{impl}, ranks={self.world}"
        for metric, value, unit in work.moved(impl, tower, pixels, grid, self.world) if self.world > 1 else ():
            self._write(count=[case, version, metric, value, unit])
        if impl not in ("frames", "whole_images"):
            return
        rounds = []
        for _ in range(PHASE_ROUNDS):
            stamps = []

            def after(phase, stamps=stamps):
                self._sync()
                stamps.append(time.perf_counter())

            dist.barrier()
            self._sync()
            start = time.perf_counter()
            call(after=after)
            rounds.append(np.diff([start, *stamps]))
        medians = [1e6 * statistics.median(times) for times in zip(*rounds)]
        mean = torch.tensor(medians, dtype=torch.float64, device=self.device) / self.world
        dist.all_reduce(mean)
        for phase, value in zip(work.PHASES, mean.tolist()):
            self._write(count=[case, version, f"{phase}, mean over the ranks", round(value, 3), "us"])

    def _sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def _write(self, **line):
        if self.rank == 0 and self.out:
            with Path(self.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
