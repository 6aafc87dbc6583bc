"""Forward passes captured in CUDA graphs, one for each budget of tokens: for sizes at which launches cost the most.

A budget is a number of patches rounded up; its graph refills the index tensors of a `VisionPlan.for_budget` and runs
the tower on them. A batch brings its pixels by a copy on the device and a table of 20 bytes an image by one upload.
Rows beyond the batch belong to no segment, and no other row depends on them.
"""

import threading
import warnings

import torch

from ..plan import VisionPlan, host
from .attention import varlen_serves

MAX_TOKENS = 4096  # patches; beyond, the GPU is busy for longer than the host takes to launch
STEP = 128  # patches: the rows of a tile of a matrix product, so that rounding up costs little
FROM_USE = 2  # a budget is captured when it is met for this time; before, the tower runs as usual


_capturing = threading.Lock()  # one at a time in a process


class Graphs:
    """The captured forwards of one tower; called with a batch it returns what the tower does, or None.

    run: callable(pixels, plan) -> (hidden states, merged units). All graphs share one memory pool and one buffer of
    pixels: they run one after another, and what they return is copied out of it. A graph reads the weights where they
    lay when it was captured: it keeps that memory, and is thrown away when a parameter has moved.
    """

    def __init__(self, run):
        self.run, self.lock = run, threading.RLock()
        self.clear()

    def clear(self):
        with self.lock:
            if getattr(self, "stream", None) is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)  # what goes is in use there
            self._forget()

    def _forget(self):
        self.by_budget, self.uses, self.weights = {}, {}, None
        self.pixels = self.pool = self.stream = self.capture_stream = None
        self.hooked = self.failed = False

    def __getstate__(self):  # for a deep copy: graphs belong to the tower that they were captured from
        return {"run": self.run}

    def __setstate__(self, state):
        self.__init__(state["run"])

    def __call__(self, pixels, grid_thw, geometry, tower):
        weight = tower.patch_embed.proj.weight
        if not varlen_serves(weight.device, weight.dtype, geometry.head_dim):
            return None
        if torch.is_autocast_enabled(weight.device.type) or torch.cuda.is_current_stream_capturing():
            return None
        grid, counts = host.read_grid(grid_thw, geometry)
        tokens = counts[0]
        if pixels.numel() != tokens * weight[0].numel():
            return None  # for the tower to refuse
        budget = -(-tokens // STEP) * STEP
        images, windows = _entries(budget)
        room = counts[1] <= images and (counts[2] <= windows or not geometry.window)
        if self.failed or not room or not 0 < budget <= MAX_TOKENS:
            return None
        with self.lock, torch.cuda.device(weight.device):
            if self.hooked and self._changed(tower):
                return None
            graph = self.by_budget.get(budget)
            if graph is None:
                self.uses[budget] = self.uses.get(budget, 0) + 1
                if self.uses[budget] < FROM_USE or self._changed(tower):
                    return None
                graph = self._capture(budget, geometry, tower)
                if graph is None:
                    return None
                self.by_budget[budget] = graph
            return self._replay(graph, pixels, grid, tokens, geometry, tower)

    def _capture(self, budget, geometry, tower):
        """(graph, plan, outputs), or None where it cannot be captured, with a warning; it is not tried again."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._captured(budget, geometry, tower)
        except RuntimeError as error:  # no memory, or an operation that a graph cannot hold
            self.clear()
            self.failed = True
            warnings.warn(f"no CUDA graph of this tower, which runs without: {error}", stacklevel=6)
            return None

    def _captured(self, budget, geometry, tower):
        weight = tower.patch_embed.proj.weight
        if self.pixels is None:
            self.pixels = weight.new_zeros(MAX_TOKENS, weight[0].numel())
            self.pool = torch.cuda.graph_pool_handle()
            self.capture_stream = torch.cuda.Stream()  # on this device: torch's own is on the first that captured
        images, windows = _entries(budget)
        sizes = {"tokens": budget, "images": images, "frames": images, "windows": windows if geometry.window else None}
        plan = VisionPlan.for_budget(geometry, **sizes, device=weight.device)
        pixels, graph = self.pixels[:budget], torch.cuda.CUDAGraph()
        self.run(pixels, plan)  # compiles, and lets libraries allocate what they keep
        self.weights = [p.data for p in tower.parameters()]
        torch.cuda.synchronize()
        options = {"pool": self.pool, "stream": self.capture_stream, "capture_error_mode": "thread_local"}
        with _capturing, torch.cuda.graph(graph, **options):
            plan.replay()
            outputs = self.run(pixels, plan)
        return graph, plan, outputs

    def _replay(self, captured, pixels, grid, tokens, geometry, tower):
        graph, plan, (hidden, merged) = captured
        stream = torch.cuda.current_stream()
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)  # the buffers are in use there
        plan.update(grid)
        self.pixels[:tokens].copy_(pixels.view(tokens, -1), non_blocking=True)
        graph.replay()
        self.stream = stream
        if self._changed(tower):  # looked at while the GPU works
            return None
        units = tokens // geometry.spatial_merge_size**2
        return hidden[:tokens].clone(), merged[:units].clone()

    def _changed(self, tower):
        """Whether a replay would not do what the tower does: parameters have moved, a module has a hook, or one is
        neither torch's nor transformers' (an adapter, say, which can be switched off)."""
        if self.weights is not None:
            now = list(tower.parameters())
            if len(now) != len(self.weights) or any(a.data_ptr() != b.data_ptr() for a, b in zip(now, self.weights)):
                self.clear()
                return True
        self.hooked = any(has_hooks(m) or not _known(m) for m in tower.modules() if m is not tower)
        return self.hooked


def _entries(budget) -> tuple[int, int]:
    """(images and frames, windows) that a budget of patches has room for; smaller ones run without a graph."""
    return max(8, budget // STEP), max(32, budget // 16)


def _known(module) -> bool:
    return type(module).__module__.split(".")[0] in ("torch", "transformers")


def wait_once(device):
    """After something that all streams will read was made on the current one."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def has_hooks(module) -> bool:
    """Whether a module has hooks on its forward, but for those by which transformers collects outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)
