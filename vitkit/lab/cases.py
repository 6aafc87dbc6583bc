"""What notebooks 1 to 3 time: which grids at which size of machine, the calls on them, and when a result is right."""

from dataclasses import dataclass
from importlib.util import find_spec

import pandas as pd
import torch

from .. import indices, reference, rotary
from ..geometry import Geometry
from . import peers, workloads
from .graphs import input_sets
from .limits import CopyLimit, EmptyLaunch
from .params import scratch
from .results import repo_root
from .timing import Case

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
CPU_TOKENS, GPU_TOKENS = 12_960, 262_144


@dataclass(frozen=True)
class Size:
    """How much to measure: seconds a case, bounds on the rounds, the longest sequence for the rotary, head sizes."""

    name: str
    budget_s: float
    n_min: int
    n_max: int
    max_tokens: int


SIZES = {
    "tiny": Size("tiny", 0.02, 2, 3, 300),
    "cpu": Size("cpu", 1.5, 7, 200, CPU_TOKENS),
    "gpu": Size("gpu", 0.5, 20, 200, GPU_TOKENS),
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
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
        raise ValueError(f"threads={threads!r}: an integer of at least 0 is allowed (0: torch's own number)")
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _tokens(grid) -> int:
    return sum(t * h * w for t, h, w in grid)


# ---- rotary -----------------------------------------------------------------------------------------------------


def rotary_grids(size: Size) -> list[tuple[str, list]]:
    """(name, grid) by rising tokens: the published workloads, some photos, and larger single images for a GPU."""
    named = workloads.load_workloads()[:4]
    if size.name != "tiny":
        named += workloads.photo_grids(scales=(1,), repeats=(1,))[::3]
    named += [(f"1x{h}x{w}", [[1, h, w]]) for h, w in ((128, 128), (128, 256), (256, 256), (256, 512), (512, 512))]
    seen = {}
    for name, grid in named:
        if _tokens(grid) <= size.max_tokens:
            seen.setdefault(_tokens(grid), (name, grid))
    return [seen[n] for n in sorted(seen)]


def rotary_geometry(num_heads: int, head_dim: int) -> Geometry:
    return Geometry(num_heads=num_heads, head_dim=head_dim)


def rotary_inputs(grid, geometry, device, dtype, batch=None, seed=0):
    """Random q and k at the grid's real positions: (S, H, D), or (batch, S, H, D)."""
    ids = indices.rot_pos_ids(grid, geometry, impl="torch", device=device)
    shape = (*([batch] if batch else []), len(ids), geometry.num_heads, geometry.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    q, k = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    return (peers.RotaryInputs.of(q, k, *rotary.rotary_cos_sin(ids, geometry)),)


def rotary_impls(device) -> list[str]:
    """The library's own ways that serve the device."""
    package, fast = (
        ("numba", ["numba"]) if torch.device(device).type == "cpu" else ("triton", ["triton_separate", "triton"])
    )
    return ["eager", *(fast if find_spec(package) else [])]


def rotary_case(name, grid, geometry, device, dtype: str, *, threads, batch=None, limits=True) -> Case:
    """`apply_rotary_qk` on q and k of the grid's tokens, by every implementation and peer, with the limits."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: {', '.join(map(repr, DTYPES))} are allowed")
    calls = {
        impl: lambda r, impl=impl: rotary.apply_rotary_qk(r.q, r.k, r.cos, r.sin, impl=impl)
        for impl in rotary_impls(device)
    }
    calls |= peers.rotary_peers(device, batched=bool(batch))
    tokens, heads, dim = _tokens(grid), geometry.num_heads, geometry.head_dim
    # q and k read once and written once. What the tables add is an implementation's own affair.
    n_bytes = 4 * (batch or 1) * tokens * heads * dim * DTYPES[dtype].itemsize
    seeds = iter(range(10_000))
    sets = input_sets(lambda: rotary_inputs(grid, geometry, device, DTYPES[dtype], batch, next(seeds)), n_bytes, device)
    if limits:
        # On the CPU two outputs, as the ops allocate them. On a GPU one copy, since a second would be another launch;
        # but none above 512 MiB: from 640 MiB on, the driver of an H200 takes 1.5 times as long for each byte.
        parts = 2 if torch.device(device).type == "cpu" else -(-n_bytes // 2**30)
        calls["copy"] = CopyLimit(n_bytes, len(sets), device, parts)
        if torch.device(device).type == "cuda" and find_spec("triton"):
            calls["empty_launch"] = EmptyLaunch(device)
    return Case(
        op="apply_rotary_qk",
        case=name,
        calls=calls,
        inputs=sets,
        check=lambda impl, outputs, _: _rotary_check(impl, outputs, sets[0][0]),
        fresh=lambda: (peers.RotaryInputs(*(x.clone() for x in sets[0][0])),),  # liger rotates float32 in place
        grid_thw=grid,
        params={"B": batch or 1, "H": heads, "D": dim, "layout": "q and k apart", "threads": threads},
        dtype=dtype,
        n_images=len(grid),
        n_tokens=tokens * (batch or 1),
        bytes=n_bytes,
    )


def rotary_error(impl, outputs, r) -> tuple[float, float]:
    """(relative error, share of the error allowed) of q or k, whichever is worse, against float64.

    The relative error is norm(out - exact) / norm(exact). Allowed: 1e-6 in float32; in the 16-bit types 1.02 times
    what rounding the float64 result once costs; and for every single entry what one rounding may cost it. flash-attn
    is held to the rounded tables that it is given.
    """
    tables = (r.cos_low, r.sin_low) if impl.startswith("flash_attn") else (r.cos, r.sin)
    worst = (0.0, 0.0)
    for x, out in zip((r.q, r.k), outputs):
        if out.dtype != x.dtype or out.shape != x.shape or out.device != x.device:
            raise ValueError(f"{out.dtype} {tuple(out.shape)} on {out.device}, not {x.dtype} {tuple(x.shape)}")
        exact = reference.apply_rotary(x, *tables)
        norm = exact.norm().item()
        once = (exact.to(x.dtype).double() - exact).norm().item() / norm
        # A norm over millions of entries hides a few wrong ones: each is held to half a last place and fp32's error.
        allowed = exact.abs().mul_(0.51 * torch.finfo(x.dtype).eps).add_(2e-6 * x.abs().max().item())
        difference = exact.sub_(out)
        error = difference.norm().item() / norm
        share = error / (1e-6 if x.dtype == torch.float32 else 1.02 * once)
        entry = difference.abs_().div_(allowed).max().item()
        share = max(share, entry) if entry == entry else float("nan")
        worst = max(worst, (error, share) if share == share else (float("nan"), float("inf")), key=lambda e: e[1])
    return worst


def _rotary_check(impl, outputs, r):
    share = rotary_error(impl, outputs, r)[1]
    return share <= 1, f"{share:.3f} of the error allowed"


def rotary_accuracy(device, size: Size, num_heads: int, head_dims=(64, 72, 80, 96, 128)):
    """A row an implementation, dtype and head size: relative error and share of the error allowed, on [[1, 18, 18]].

    torch_compile is left to the timed cases, where it is checked as well: it would compile anew for each dtype here.
    """
    rows = []
    for dtype in DTYPES:
        for dim in head_dims:
            grid, geometry = [[1, 18, 18]], rotary_geometry(num_heads, dim)
            case = rotary_case("", grid, geometry, device, dtype, threads=0, limits=False)
            for impl, call in case.calls.items():
                if impl != "torch_compile":
                    try:
                        error, share = rotary_error(impl, call(*case.fresh()), case.inputs[0][0])
                    except Exception:
                        if impl in peers.PEERS:
                            continue  # a peer that fails is left out
                        raise
                    rows.append({"dtype": dtype, "D": dim, "impl": impl, "relative error": error, "share": share})
    return pd.DataFrame(rows)


# ---- index tensors ----------------------------------------------------------------------------------------------


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
        n_tokens=_tokens(grid),
        bytes=n_bytes,
    )


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
