"""The clock `kernel`: calls captured in CUDA graphs, over sets of inputs that together exceed the cache."""

import functools
import gc
import math
from contextlib import contextmanager

import torch

MIN_GRAPH_US = 200  # a CUDA event resolves 0.5 us, and the two around a graph cost about 1 us: together below 1 %
MAX_GRAPH_CALLS = 1024


def sampler(call, input_sets, device):
    """(() -> mean us of one call, whether the cache is cold): captures `call` over every set of inputs.

    A graph shorter than MIN_GRAPH_US is captured again with as many passes over the sets as it takes. A sample is the
    mean over the calls of one replay (so p20 and p80 are of such means). It contains the device's own pause from one
    kernel to the next, about 1 us, and it does not see work of the host: that is what the other clocks are for.
    Raises whatever a call that cannot be captured raises.
    """
    # The stream is named because a failed capture leaves its own as the current one.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        sets = len(input_sets)
        graph, touched = _capture(call, input_sets, 1, device)
        sample = _graph_sampler(graph, sets, device)
        sample()
        us = max(sample() * sets, 1.0)
        passes = min(math.ceil(MIN_GRAPH_US / us), max(1, MAX_GRAPH_CALLS // sets))
        if passes > 1:
            del graph, sample
            graph, _ = _capture(call, input_sets, passes, device)
            sample = _graph_sampler(graph, sets * passes, device)
            sample()  # an error of the replay is met here
    # Between two uses of a set all the others are touched: cold if that is more than the cache holds. Twice the cache,
    # because its replacement is not strictly least recently used.
    return sample, sets > 1 and touched > 2 * cache_bytes(device)


def _capture(call, input_sets, passes, device):
    """(CUDA graph of `call` on every set of inputs, `passes` times over; bytes of all inputs and outputs of a pass)."""
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # Compiles, loads and allocates what a capture must not: three calls, or one on each set if the call keeps
        # something for each (see `peers.Backward`).
        for i in range(max(3, len(input_sets) if getattr(call, "keeps", False) else 0)):
            call(*input_sets[i % len(input_sets)])
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph, outputs = torch.cuda.CUDAGraph(), []
    # thread_local: what other threads of the process (a notebook's kernel, NCCL) do must not break the capture.
    with no_collection(), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(passes):
            for inputs in input_sets:
                # Kept until the capture ends, so that every call has memory of its own: stores meet a cold cache too.
                outputs.append(call(*inputs))
    return graph, _storage_bytes([input_sets, outputs])


@functools.cache
def _side_stream(device):
    """One stream for all captures: memory that the allocator keeps for one stream is of no use to another."""
    return torch.cuda.Stream(device)


def _graph_sampler(graph, n_calls, device):
    def sample():
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # One replay that is not timed keeps the device busy while the timed one is being queued: otherwise the
            # start event fires on an idle device and the launch of the graph, about 10 us, is charged to the kernels.
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / n_calls

    return sample


def input_sets(make, bytes_per_set: int, device) -> list[tuple]:
    """Calls `make()`, which returns one tuple of inputs, once on the CPU; on a GPU as often as it takes for the sets
    (of `bytes_per_set`, inputs and outputs) to exceed 4 caches together, at least 2 and at most 512 times."""
    device = torch.device(device)
    if device.type == "cpu":
        return [make()]
    return [make() for _ in range(min(512, max(2, 4 * cache_bytes(device) // max(1, bytes_per_set) + 1)))]


def cache_bytes(device) -> int:
    """Size of the GPU's last cache, 64 MiB where torch does not report it. An MI300X has 256 MiB behind the L2 that
    ROCm reports, so at least that under ROCm."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
    return max(l2, 256 * 2**20) if torch.version.hip else l2


def _storage_bytes(tree) -> int:
    """Bytes of the distinct storages under nested lists, tuples, dicts and objects with attributes."""
    sizes, queue = {}, [tree]
    while queue:
        item = queue.pop()
        if isinstance(item, torch.Tensor):
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            queue.extend(item)
        elif hasattr(item, "__dict__") and not callable(item):
            queue.extend(vars(item).values())
        elif isinstance(item, dict):
            queue.extend(item.values())
    return sum(sizes.values())


@contextmanager
def no_collection():
    """Without Python's garbage collector. Collect before, once: with torch and pandas loaded it takes 0.1 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
