"""The encoder data-parallel: every rank holds the whole tower and encodes a part of the batch, cut between frames.

`features = vitkit.parallel.encode(tower, pixel_values, grid_thw)` on every rank, under torchrun.
"""

from .balance import assign, loads, whole_images
from .costs import FrameCosts
from .encoder import encode
from .exchange import RankError

__all__ = ["FrameCosts", "RankError", "assign", "encode", "loads", "whole_images"]
