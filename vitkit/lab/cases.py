"""How much a machine measures, and what notebooks 2 and 3 time: grids, the calls on them, and when a result is right.

The cases of notebook 1 are in rotary_cases.py.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from .. import indices
from ..geometry import Geometry
from . import by_hand, peers, workloads
from .limits import CopyLimit, EmptyLaunch
from .params import scratch
from .results import repo_root
from .timing import Case

CPU_TOKENS, GPU_TOKENS = 12_960, 262_144
MAX_THREADS = 1024  # torch takes any number, and a process dies of too many


@dataclass(frozen=True)
class Size:
    """How much to measure: seconds a case, bounds on the rounds, the longest sequence for the rotary."""

    name: str
    budget_s: float
    n_min: int
    n_max: int
    max_tokens: int


SIZES = {
    "tiny": Size("tiny", 0.02, 2, 3, 300),
    "cpu": Size("cpu", 1.5, 7, 200, CPU_TOKENS),
    "gpu": Size("gpu", 0.3, 20, 200, GPU_TOKENS),
}


def pick_size(size: str, device) -> Size:
    """The named size; "auto" takes the device's own."""
    name = torch.device(device).type.replace("cuda", "gpu") if size == "auto" else size
    if name not in SIZES:
        raise ValueError(f"size={size!r}: {', '.join(map(repr, ['auto', *SIZES]))} are allowed")
    return SIZES[name]


def out_folder(out: str, size: str) -> str:
    """`out`, or where a run of this size writes: tiny ones into runs/tiny, the others ("") into the repository."""
    return out or (str(repo_root() / scratch(size)) if scratch(size) else "")


def set_threads(threads: int) -> int:
    """torch's threads, which the numba rotary follows; 0 leaves them as they are. The number in force."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
        raise ValueError(f"threads={threads!r}: an integer from 0 to {MAX_THREADS} is allowed (0: torch's own number)")
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def tokens(grid) -> int:
    return sum(t * h * w for t, h, w in grid)


def index_grids(size: Size, grids=None, geometry=None) -> list[tuple[str, list]]:
    """(name, grid): the published workloads, photos and a clip, and the user's own, which come last."""
    own = workloads.read_grids(grids, geometry or Geometry())
    named = workloads.load_workloads()
    if size.name == "tiny":
        return named[:2] + own
    photos = workloads.photos()
    clip = [(f"clip of {photos[0].name}", [workloads.clip_grid(photos[0])])] if photos else []
    return named + workloads.photo_grids(photos) + clip + own


def index_case(op: str, name, grid, geometry, device, *, threads) -> Case:
    """One of `rot_pos_ids`, `window_index`, `cu_seqlens` on a grid, by every implementation and by transformers.

    Ours get the grid as a list; transformers gets its table on the device, where its towers have it.
    """
    device = torch.device(device)
    function, where = getattr(indices, op), str(device)
    needs = {"numba": find_spec("numba"), "triton": find_spec("triton") and device.type == "cuda"}
    ways = [way for way in indices.IMPLEMENTATIONS[op] if needs.get(way, True)]
    calls = {way: lambda grid, table, way=way: function(grid, geometry, device=where, impl=way) for way in ways}
    calls |= peers.index_peers(op, geometry)
    expected = _tensors(function(grid, geometry, impl="reference"))
    n_bytes = sum(4 * x.numel() for x in expected)  # each entry written once
    calls["copy"] = CopyLimit(n_bytes, 1, device)
    if needs["triton"]:
        calls["empty_launch"] = EmptyLaunch(device)
    return Case(
        op=op,
        case=name,
        calls=calls,
        inputs=[(grid, torch.tensor(grid, device=device))],
        check=lambda impl, outputs, inputs: _same(impl, _tensors(outputs), expected, device),
        grid_thw=grid,
        params={"m": geometry.spatial_merge_size, "ws": geometry.window, "threads": threads},
        dtype="int32",
        n_images=len(grid),
        n_tokens=tokens(grid),
        bytes=n_bytes,
    )


def one_workload(op: str, grid_thw, geometry, device):
    """`by_hand.table` of one of `rot_pos_ids`, `window_index`, `cu_seqlens` on a grid, with torch's present threads."""
    by_hand.check_choice("op", op, indices.IMPLEMENTATIONS)
    grid = by_hand.check_grid(grid_thw, geometry)
    return by_hand.timed(index_case(op, "by hand", grid, geometry, device, threads=torch.get_num_threads()), device)


def _tensors(outputs) -> list:
    """The tensors of an op's result, or of transformers', in one order: index, cu_seqlens and then the inverse."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, tuple):
        return list(outputs)
    if isinstance(outputs, indices.WindowIndex):
        return [outputs.index, outputs.cu_seqlens, outputs.reverse]
    return [outputs.cu_seqlens]


def _same(impl, outputs, expected, device):
    """Equal in value, shape, dtype and place. transformers has no inverse, int64 ids, and its index on the CPU."""
    theirs = impl in peers.PEERS
    if not theirs and len(outputs) != len(expected):
        return False, f"{len(outputs)} tensors instead of {len(expected)}"
    for x, right in zip(outputs, expected):
        if not theirs and (x.dtype != torch.int32 or x.device.type != device.type):
            return False, f"{x.dtype} on {x.device} instead of int32 on {device}"
        if x.shape != right.shape or not torch.equal(x.cpu().int(), right):
            return False, "differs from the reference"
    return True, ""
