"""The published rotary benchmark: q and k in two launches ("1c") against one launch ("2c").

Shapes and options are the published ones. On the CPU the same form compares `numba` (one pass) with `eager` and, where
it is installed, transformers' function. Nothing is timed before it has been compared with float64 on the same inputs.
"""

import functools
import statistics
import time
from contextlib import nullcontext

import torch

from vitkit.lab.peers import RotaryInputs, rotary_peers
from vitkit.lab.rotary_cases import DTYPES, rotary_error
from vitkit.rotary import apply_rotary_qk


def run(config, say=print) -> int:
    """Runs and prints the benchmark; returns 0, or 1 if an implementation is not correct (then nothing is timed).

    config: batch_size, seq_len, num_heads, head_size, dtype (a name), device (a torch.device), warmup_iter and
    benchmark_iter (iterations; each calls every implementation once, with outputs allocated inside the call).
    """
    inputs = make_inputs(config)
    calls = implementations(config.device)
    for name in ("batch_size", "seq_len", "num_heads", "head_size", "dtype", "device", "warmup_iter", "benchmark_iter"):
        say(f"{name:<15} {getattr(config, name)}")
    if config.device.type == "cpu":
        say(f"{'threads':<15} {torch.get_num_threads()}")
        clock = "host clock around each call"
    else:
        say(f"{'gpu':<15} {torch.cuda.get_device_name(config.device)}")
        clock = "GPU events around each call, with a cold cache: the GPU's time, gaps between launches included"
    for label, call in calls.items():
        error, share = rotary_error(label, call(inputs), inputs)
        if share > 1:
            say(f"{label}: NOT correct, nothing is timed: relative error {error:.3g}, {share:.3g} of what is allowed")
            return 1
    on_device = nullcontext() if config.device.type == "cpu" else torch.cuda.device(config.device)
    with on_device:  # events are recorded on the current device
        times = time_calls(calls, inputs, config)
    say(f"all equal to float64 within the rounding of {config.dtype}; {clock}\n")
    say(f"{'':<34}{'mean (ms)':>12}{'median (ms)':>14}")
    mean = {label: statistics.fmean(ms) for label, ms in times.items()}
    median = {label: statistics.median(ms) for label, ms in times.items()}
    for label in calls:
        say(f"{label:<34}{mean[label]:>12.4f}{median[label]:>14.4f}")
    one = list(calls)[-1]  # the single pass comes last
    for label in list(calls)[:-1]:
        name = "fusion speedup" if config.device.type != "cpu" else f"speedup over {label.split()[0]}"
        say(f"{name:<34}{mean[label] / mean[one]:>11.3f}x{median[label] / median[one]:>13.3f}x")
    return 0


def make_inputs(config) -> RotaryInputs:
    """q and k (B, S, H, D), cos and sin (S, D/2) in float32: position s turns pair i by s * 10000^(-2i/D)."""
    B, S, H, D = config.batch_size, config.seq_len, config.num_heads, config.head_size
    generator = torch.Generator(config.device).manual_seed(0)
    like = {"dtype": DTYPES[config.dtype], "device": config.device}
    q, k = (torch.empty(B, S, H, D, **like).normal_(generator=generator) for _ in range(2))
    positions = torch.arange(S, dtype=torch.float64, device=config.device)
    pairs = torch.arange(0, D, 2, dtype=torch.float64, device=config.device)
    angles = positions.unsqueeze(1) * 10000.0 ** (-pairs / D)
    return RotaryInputs.of(q, k, angles.cos().float(), angles.sin().float())


def implementations(device) -> dict:
    """{label: callable(RotaryInputs)}, the single pass last."""

    def ours(impl):
        return lambda r: apply_rotary_qk(r.q, r.k, r.cos, r.sin, impl=impl)

    if device.type != "cpu":
        return {
            "1c  two launches (triton_separate)": ours("triton_separate"),
            "2c  one launch (triton)": ours("triton"),
        }
    theirs = {name: call for name, call in rotary_peers(device).items() if name == "transformers"}
    return theirs | {"eager (plain torch)": ours("eager"), "numba (one pass)": ours("numba")}


def time_calls(calls, inputs, config) -> dict[str, list[float]]:
    """{label: milliseconds of every iteration}; one iteration calls every implementation once, in turn."""
    clock = _host_ms if config.device.type == "cpu" else _event_ms
    for _ in range(config.warmup_iter):
        for call in calls.values():
            call(inputs)
    times = {label: [] for label in calls}
    for _ in range(config.benchmark_iter):
        for label, call in calls.items():
            times[label].append(clock(call, inputs))
    return {label: [read() for read in reads] for label, reads in times.items()}


def _host_ms(call, inputs):
    start = time.perf_counter()
    outputs = call(inputs)
    ms = (time.perf_counter() - start) * 1e3
    del outputs  # freed outside the time
    return lambda: ms


@functools.cache
def _filler() -> torch.Tensor:
    """2 GiB to fill before each call, or a quarter of what is free."""
    return torch.empty(min(2**31, torch.cuda.mem_get_info()[0] // 4), dtype=torch.uint8, device="cuda")


def _event_ms(call, inputs):
    """Filling memory takes the GPU longer than the host takes to queue the call: it never waits for the host between
    the two events, which are read when all iterations are queued. It also empties the cache."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _filler().zero_()
    start.record()
    call(inputs)
    end.record()

    def read():
        end.synchronize()
        return start.elapsed_time(end)

    return read
