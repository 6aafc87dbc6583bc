"""The versions of a vision tower that notebook 5 compares: transformers', and ours with one part more at every step."""

import gc
from copy import deepcopy

import torch

from ..geometry import Geometry
from ..models import accelerate_
from .tower import merged, pixels, set_attention, tower_name

# The parts of every version, each with one more than the one before. On a GPU all of ours have varlen attention.
GPU_PARTS = {
    "plan": ("plan", "attention"),
    "plan+rotary": ("plan", "attention", "rotary"),
    "+embed": ("plan", "attention", "rotary", "embed"),
    "+mlp": ("plan", "attention", "rotary", "embed", "mlp"),
    "+norms": ("plan", "attention", "rotary", "embed", "mlp", "norms"),
    "+windows": ("plan", "attention", "rotary", "embed", "mlp", "norms", "windows"),
    "accelerate": "auto",  # and graph
}
CPU_PARTS = {
    "plan": ("plan",),
    "plan+rotary": ("plan", "rotary"),
    "+embed": ("plan", "rotary", "embed"),
    "accelerate": "auto",  # and attention
}
THEIRS = ("transformers", "transformers_varlen")


class Arms:
    """The versions of one tower, each a copy of its own, made once for all grids; `close` lets go of them.

    A copy keeps its captured graphs and its packed weights from call to call, as a served model does. With the
    published dimensions in bfloat16 a copy takes 1.3 GB, the one in float32 twice that.
    towers: {version: module, or the exception that making it raised}, "transformers" being the tower itself.
    """

    def __init__(self, tower):
        self.name, self.geometry = tower_name(tower), Geometry.from_config(tower.config)
        weight = tower.patch_embed.proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        on_gpu = self.device.type == "cuda"
        self.parts = GPU_PARTS if on_gpu else CPU_PARTS
        self.towers = {"transformers": tower}
        if on_gpu:
            self.towers["transformers_varlen"] = _copy(tower, set_attention, "varlen")
        for version, parts in self.parts.items():
            self.towers[version] = _copy(tower, accelerate_, parts)
        self.exact = deepcopy(tower).float()

    def forward(self, version, grid):
        """callable(pixels) -> merged units (U, width); raises what making the version raised.

        transformers gets the grid on the device, ours on the CPU, as an image processor returns it.
        """
        tower, table = self.towers[version], torch.tensor(grid)
        if version in THEIRS:
            table = table.to(self.device)

        @torch.no_grad()
        def call(x):
            if isinstance(tower, Exception):
                raise tower
            return merged(tower(x, grid_thw=table))

        return call

    def pixels(self, grid, values=None) -> torch.Tensor:
        """`values` (N, channels * frames * patch_size^2), or random ones, in the tower's dtype on its device."""
        if values is None:
            return pixels(grid, self.towers["transformers"])
        return values.to(device=self.device, dtype=self.dtype)

    def without_graph(self) -> str:
        """The version with the most parts that calls every block as a module."""
        return list(self.parts)[-2] if self.device.type == "cuda" else "accelerate"

    def close(self):
        self.towers, self.exact = {}, None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _copy(tower, change, *arguments):
    try:
        copy = deepcopy(tower)
        change(copy, *arguments)
        return copy
    except Exception as error:  # no memory, or a version of torch or transformers without what is needed
        return error
