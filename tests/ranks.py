"""Runs a function on several processes that form a gloo group on this machine, and leaves none of them behind; and what
the tests of `vitkit.parallel` run there."""

import datetime
import multiprocessing
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import tower_models

# Imported once, in the process that the ranks are forked from; it has started no thread.
PRELOAD = ["torch.distributed", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "vitkit.parallel"]
PRELOAD += ["transformers.models.qwen2_vl.modeling_qwen2_vl"]

CLIP = [[1, 6, 4], [40, 4, 4], [1, 8, 8], [1, 2, 2]]


def pixels_of(grid, tower, seed=0):
    return tower_models.batch(grid or torch.zeros(0, 3, dtype=int), tower, seed)[0]


def alone(tower, pixels, grid):
    """What one process computes: (U, 48)."""
    if not grid:
        return pixels.new_zeros(0, 48)
    with torch.no_grad():
        return tower(pixels, grid_thw=torch.tensor(grid)).pooler_output


def run(world, function, *args, folder, backend="gloo", group_timeout=60, limit=240, start="forkserver") -> list:
    """What `function(rank, *args)` returned on every rank, an `Ended` where a process ended without an answer, or the
    exception that it raised. TimeoutError if one is still there after `limit` seconds; it is killed. start="spawn" for
    ranks on GPUs: an import that asks for the number of GPUs bars forks of that process from using them.
    """
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    meeting = Path(folder) / f"meeting-{time.monotonic_ns()}"
    ranks = []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, world, str(meeting), backend, group_timeout, function, args)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    deadline, answers = time.monotonic() + limit, []
    try:
        for process, mine in ranks:
            if not mine.poll(max(0, deadline - time.monotonic())):
                raise TimeoutError(f"a rank of {world} has not answered within {limit} s")
            try:
                answers.append(mine.recv())
            except EOFError:
                process.join(10)
                answers.append(Ended(process.exitcode))
        for process, _ in ranks:
            process.join(max(1, min(60, deadline - time.monotonic())))
            if process.is_alive():
                raise TimeoutError("a rank has answered and does not end")
        return answers
    finally:
        for process, mine in ranks:
            mine.close()
            if process.is_alive():
                process.kill()
                process.join()


class Ended(Exception):
    """A process that ended without an answer; args[0] is its exit code."""


def _rank(answer, rank, world, meeting, backend, group_timeout, function, args):
    torch.set_num_threads(1)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    timeout = datetime.timedelta(seconds=group_timeout)
    options = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world, "timeout": timeout}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(backend, **options)
        answer.send(function(rank, *args))
    except Exception as error:
        try:
            answer.send(error)
        except Exception:  # one that cannot be sent
            answer.send(RuntimeError(f"{type(error).__name__}: {error}"))
    answer.close()
