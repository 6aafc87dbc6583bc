"""How a time is taken. Read this before believing a number.

Three clocks, and a row always says which:
  host    until the call returns. On a GPU that is the cost of launching; the device is idle when the call begins.
  e2e     until the result is ready on the device (synchronised inside the time). On the CPU the only clock.
  kernel  the device's own time: calls captured in a CUDA graph, so that neither Python nor the launches count.

Every implementation is first called on the inputs about to be timed and its outputs are compared with the reference;
one that fails is not timed. The others are warmed up and then timed in one process in rounds: every implementation
once a round, in an order shuffled anew with a fixed seed, so that drifting clocks and noisy neighbours fall on all
alike. Outputs are allocated inside every timed call and freed outside the time.
"""

import gc
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from vitkit.lab import graphs
from vitkit.lab.graphs import no_collection
from vitkit.lab.limits import Limit

CLOCKS = {"cpu": ("e2e",), "cuda": ("host", "e2e", "kernel")}


@dataclass
class Case:
    """One op on one workload, and what computes it.

    calls: {impl: callable(*inputs) -> outputs}. A `Limit` (such as `CopyLimit`) may stand among them.
    inputs: one tuple, or several of equal shapes: the kernel clock goes through all, host and e2e use the first.
    check: callable(impl, outputs, inputs) -> bool or (bool, note), with the inputs that gave these outputs.
    fresh: callable() -> a new copy of inputs[0] for the first, checked call of each implementation, so that a call
        that works in place cannot spoil the check of the next. (By then the copy that `check` is given is changed as
        well: an in-place op's check compares with a result computed beforehand.) The timed calls use `inputs` as
        they are and change them again and again, which for a rotation costs the same and overflows nothing.
    bytes: the fewest bytes that the op must read and write; 0 where that says nothing, and then there is no gbps.
    """

    op: str
    case: str
    calls: dict[str, Callable]
    inputs: list[tuple]
    check: Callable
    fresh: Callable | None = None
    grid_thw: list | None = None
    params: dict = field(default_factory=dict)
    dtype: str = ""
    n_images: int = 0
    n_tokens: int = 0
    bytes: int = 0
    direction: str = "fwd"


def measure(
    case: Case, clock: str, *, device, n=None, budget_s=2.0, n_min=5, n_max=200, warmup=3, on_rows=None
) -> list[dict]:
    """One row an implementation, in the order of `case.calls`.

    n rounds; without n, as many as fit into `budget_s` seconds going by the last warm-up round, within n_min and
    n_max. first_call_us is the first call in this measurement, ready on the device: it holds JIT compilation where
    nothing had compiled it yet. An implementation that raises has `error`; one that is wrong has correct=False and a
    note; neither has any time. `on_rows(rows)` is called when the case is done, to save it before the next begins.
    """
    device = torch.device(device)
    if clock not in CLOCKS.get(device.type, ()):
        raise ValueError(f"clock={clock!r} on {device}: one of {', '.join(CLOCKS.get(device.type, ()))} is allowed")
    if not case.inputs or not case.calls:
        raise ValueError(f"case={case.case!r}: at least one call and one set of inputs is allowed")
    gc.collect()
    rows = {impl: _first_call(case, impl, device) for impl in case.calls}
    samplers = {}
    for impl, row in rows.items():
        row.update(clock=clock, cache="warm")
        if row["correct"]:
            if clock == "kernel":
                try:
                    samplers[impl], cold = graphs.sampler(case.calls[impl], case.inputs, device)
                    row["cache"] = "cold" if cold else "warm"
                except Exception as error:
                    row["error"] = f"not capturable: {_said(error)}"
            else:
                samplers[impl] = _call_sampler(case.calls[impl], case.inputs[0], device, clock)
    for impl, times in _rounds(samplers, n, budget_s, n_min, n_max, warmup).items():
        if isinstance(times, Exception):  # out of memory in a later call, say
            rows[impl]["error"] = _said(times)
        else:
            n_bytes = getattr(case.calls[impl], "bytes", case.bytes)
            _add_statistics(rows[impl], times, 0 if clock == "host" else n_bytes)  # the host moves no bytes
    samplers.clear()  # lets go of the graphs and of the memory of their outputs
    rows = list(rows.values())
    if on_rows:
        on_rows(rows)
    return rows


def _first_call(case, impl, device) -> dict:
    """Calls and checks `impl` once; the row without its times."""
    row = {"op": case.op, "impl": impl, "direction": case.direction, "dtype": case.dtype, "case": case.case}
    row.update(grid_thw=case.grid_thw, params=case.params, n_images=case.n_images, n_tokens=case.n_tokens)
    row.update(correct=None, error="", note="")
    call = case.calls[impl]
    try:
        inputs = case.fresh() if case.fresh else case.inputs[0]
        _sync(device)
        start = time.perf_counter_ns()
        outputs = call(*inputs)
        _sync(device)
        first_call_us = (time.perf_counter_ns() - start) / 1e3
        if isinstance(call, Limit):  # a limit computes something else than the op: it checks itself
            verdict = call.check(outputs)
        else:
            verdict = case.check(impl, outputs, inputs)
        correct, note = verdict if isinstance(verdict, tuple) else (verdict, "")
        row.update(correct=bool(correct), note=str(note))
        if correct:
            row["first_call_us"] = round(first_call_us, 3)
    except Exception as error:
        row["error"] = _said(error)
    return row


def _rounds(samplers, n, budget_s, n_min, n_max, warmup) -> dict:
    """{impl: times of one call in us}, interleaved; an implementation that raises drops out, with its exception."""
    times = {impl: [] for impl in samplers}
    order, shuffle = list(samplers), random.Random(0).shuffle

    def one_round(keep):
        for impl in list(order):
            try:
                us = samplers[impl]()
            except Exception as error:
                times[impl] = error
                order.remove(impl)
            else:
                if keep:
                    times[impl].append(us)

    with no_collection():  # one that falls into a call would be charged to it
        round_s = 0.0
        for _ in range(warmup):
            start = time.perf_counter()
            one_round(keep=False)
            round_s = time.perf_counter() - start
        if n is None:
            n = max(n_min, min(n_max, int(budget_s / round_s) if round_s else n_max))
        for _ in range(n):
            shuffle(order)
            one_round(keep=True)
    return times


def _call_sampler(call, inputs, device, clock):
    """For the clocks host and e2e: () -> us of one call."""

    def sample():
        _sync(device)  # an idle device: the call neither waits behind earlier work nor for a full queue
        start = time.perf_counter_ns()
        outputs = call(*inputs)
        if clock == "e2e":
            _sync(device)
        elapsed = time.perf_counter_ns() - start
        del outputs  # freed outside the time
        return elapsed / 1e3

    return sample


def _add_statistics(row, times, n_bytes):
    median, p20, p80 = np.percentile(times, [50, 20, 80]).tolist()
    row.update(n=len(times), median_us=round(median, 3), p20_us=round(p20, 3), p80_us=round(p80, 3))
    if n_bytes:
        row.update(bytes=int(n_bytes), gbps=round(n_bytes / median / 1e3, 3))


def _sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _said(error) -> str:
    """One line without paths: it ends up in files that people publish."""
    text = re.sub(r"(~|[A-Za-z]:)?(/[\w.+@~-]+)+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:200]
