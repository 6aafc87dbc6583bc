"""Draws one figure of every kind from made-up rows, and prints the sha256 of its SVG and PNG; run by test_figure.py.

With the argument `shown` every figure is shown before it is saved, as a notebook does.
"""

import hashlib
import io
import sys

import numpy as np
import pandas as pd
import test_forward_plots
import test_parallel_lab
import test_plots
import torch

from vitkit import Geometry
from vitkit.lab import forward_plots, parallel_cases, parallel_plots, parallel_tables, plots, tour
from vitkit.lab.traffic import Event, Traffic, timeline
from vitkit.lab.workloads import Photo


def figures():
    from PIL import Image

    rows = test_plots.frame(("reference", "numba", "mine", "yours", "copy", "empty_launch"))
    yield "latency", plots.latency(rows)
    yield "bandwidth", plots.bandwidth(rows)
    yield "speedup", plots.speedup(rows, "reference")
    errors = [dict(dtype=t, D=d, impl=i, share=0.5) for t in ("a", "b") for i in ("mine", "numba") for d in (64, 80)]
    yield "accuracy", plots.accuracy(pd.DataFrame(errors))
    yield "shares", plots.shares(pd.DataFrame(errors[:4]))
    yield "waterfall", forward_plots.waterfall(test_forward_plots.frame())
    yield "layers", forward_plots.layers(test_forward_plots.errors())
    scaling = parallel_tables.scaling(test_parallel_lab.rows())
    yield "time", parallel_plots.time(scaling)
    yield "efficiency", parallel_plots.efficiency(scaling)
    yield "phases", parallel_plots.phases(parallel_tables.phases(test_parallel_lab.counts()))
    grids = [("a clip among images", "clip", [[1, 8, 8], [6, 8, 8]])]
    yield "balance", parallel_plots.balance(parallel_cases.balance(grids, 2, Geometry.qwen2_5_vl()))
    events = [Event("the call", "call", 0.0, 9.0, "host"), Event("k", "kernel", 3.0, 2.0, "7")]
    yield "timeline", timeline(Traffic({}, events), Traffic({}, events[:1]))
    pixels = np.random.default_rng(0).integers(0, 255, (8 * 14, 12 * 14, 3), np.uint8)
    yield "partition", plots.window_partition(pixels, [1, 8, 12], Geometry.qwen2_5_vl())
    photo = Photo("noise", Image.fromarray(pixels), "drawn")
    for draw in (tour.patches, tour.order, tour.sequence, tour.positions, tour.segments):
        yield f"tour, {draw.__name__}", draw(photo, t=1, h=8, w=12, window=2, merge=2, patch=30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, figure in figures():
        if "shown" in sys.argv:
            figure._repr_png_()
        for kind in ("svg", "png"):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=60, bbox_inches="tight")
            assert not any(word in file.getvalue() for word in (b"dc:date", b"Software", b"matplotlib.org"))
            print(f"{name}, {kind}: {hashlib.sha256(file.getvalue()).hexdigest()}")
