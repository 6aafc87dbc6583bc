"""The encoder data-parallel: every rank holds the whole tower and encodes a part of the batch, cut between frames.

`features = vitkit.parallel.encode(tower, pixel_values, grid_thw)` on every rank, under torchrun.
"""

from .balance import assign, loads, whole_images
from .costs import FrameCosts

__all__ = ["FrameCosts", "assign", "loads", "whole_images"]
