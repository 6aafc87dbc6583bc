"""The ways to rotate q and k that notebook 1 compares: a case of them on one grid, and when a result is right."""

from importlib.util import find_spec

import pandas as pd
import torch

from .. import indices, reference, rotary
from ..geometry import Geometry
from . import peers
from .cases import tokens
from .graphs import input_sets
from .limits import CopyLimit, EmptyLaunch
from .timing import Case

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
HEAD_DIMS = (64, 72, 80, 96, 128)


# ---- the ways -----------------------------------------------------------------------------------------------------


def _tables(impl, low=False):
    if low:
        return lambda r: rotary.apply_rotary_qk(r.q, r.k, r.cos_low, r.sin_low, impl=impl)
    return lambda r: rotary.apply_rotary_qk(r.q, r.k, r.cos, r.sin, impl=impl)


def _from_pos(impl):
    return lambda r: rotary.apply_rotary_qk_from_pos(r.q, r.k, r.pos_ids, r.table, impl=impl)


def _in_place(impl, from_pos=False, low=False):
    """On the packed qkv; on q and k where they lie apart."""

    def call(r):
        a, b = (r.pos_ids, r.table) if from_pos else (r.cos_low, r.sin_low) if low else (r.cos, r.sin)
        if r.qkv is None:
            function = rotary.apply_rotary_qk_from_pos if from_pos else rotary.apply_rotary_qk
            return function(r.q, r.k, a, b, inplace=True, impl=impl)
        function = rotary.apply_rotary_qkv_from_pos_ if from_pos else rotary.apply_rotary_qkv_
        function(r.qkv, a, b, impl=impl)
        return r.q, r.k

    return call


# {name: callable(RotaryInputs) -> (q, k)}; `low`: tables in the dtype of q.
WAYS = {
    "eager": _tables("eager"),
    "numba": _tables("numba"),
    "numba_in_place": _in_place("numba"),
    "numba_from_pos": _from_pos("numba"),
    "triton_separate": _tables("triton_separate"),
    "triton": _tables("triton"),
    "triton_low": _tables("triton", low=True),
    "triton_from_pos": _from_pos("triton"),
    "triton_in_place": _in_place("triton"),
    "triton_low_in_place": _in_place("triton", low=True),
    "triton_from_pos_in_place": _in_place("triton", from_pos=True),
}
CPU_WAYS = ("eager", "numba", "numba_in_place", "numba_from_pos")
GPU_WAYS = ("eager", "triton_separate", "triton", "triton_in_place", "triton_from_pos", "triton_from_pos_in_place")
BACKWARD_WAYS = ("eager", "numba", "numba_from_pos", "triton", "triton_from_pos")  # in place there is no backward
LIMIT_WAYS = tuple(name for name in WAYS if name.startswith("triton") and name != "triton_separate")


def rotary_ways(device) -> list[str]:
    """The library's own ways that serve the device."""
    package, ways = ("numba", CPU_WAYS) if torch.device(device).type == "cpu" else ("triton", GPU_WAYS)
    return [name for name in ways if name == "eager" or find_spec(package)]


# ---- one case -----------------------------------------------------------------------------------------------------


def rotary_geometry(num_heads: int, head_dim: int) -> Geometry:
    return Geometry(num_heads=num_heads, head_dim=head_dim)


def rotary_inputs(grid, geometry, device, dtype, batch=None, seed=0, backward=False, packed=True):
    """Random q and k at the grid's real positions: parts of a packed (S, 3, H, D); or apart, with or without a batch.

    A batch (batch, S, H, D) is always apart.
    """
    ids = indices.rot_pos_ids(grid, geometry, impl="torch", device=device)
    generator = torch.Generator(device).manual_seed(seed)
    heads = geometry.num_heads, geometry.head_dim

    def random(*shape):
        return torch.randn(*shape, *heads, device=device, generator=generator).to(dtype)

    more = {"pos_ids": ids, "table": rotary.rotary_table(geometry, max(max(row[1:]) for row in grid) - 1, device)}
    if batch or not packed:
        q, k = (random(*([batch] if batch else []), len(ids)) for _ in range(2))
    else:
        more["qkv"] = random(len(ids), 3)
        q, k = more["qkv"][:, 0], more["qkv"][:, 1]
    if backward:
        more |= {"grad_q": random(*q.shape[:-2]), "grad_k": random(*k.shape[:-2])}
    return (peers.RotaryInputs.of(q, k, *rotary.rotary_cos_sin(ids, geometry), **more),)


def rotary_case(
    name, grid, geometry, device, dtype: str, *, threads, batch=None, limits=True, backward=False, compiled=True,
    packed=True, ways=None, calls=None, section="",
) -> Case:  # fmt: skip
    """`apply_rotary_qk` on q and k of the grid's tokens, by every implementation and peer, with the limits.

    backward: their backwards instead. compiled: with torch_compile. packed: as `rotary_inputs` takes it. ways: names to
    keep, of WAYS and of the peers. calls: {name: call} instead of all these. section: goes into the rows' params.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: {', '.join(map(repr, DTYPES))} are allowed")
    if calls is None:
        calls = {way: WAYS[way] for way in ways or rotary_ways(device) if way in WAYS}
        if backward:
            calls = {way: peers.Backward(call) for way, call in calls.items() if way in BACKWARD_WAYS}
        theirs = peers.rotary_peers(device, bool(batch), compiled, backward)
        calls |= {peer: call for peer, call in theirs.items() if ways is None or peer in ways}
    heads, dim = geometry.num_heads, geometry.head_dim
    # q and k read once and written once. What the tables add is an implementation's own affair.
    n_bytes = 4 * (batch or 1) * tokens(grid) * heads * dim * DTYPES[dtype].itemsize
    seeds = iter(range(10_000))
    sets = input_sets(
        lambda: rotary_inputs(grid, geometry, device, DTYPES[dtype], batch, next(seeds), backward, packed),
        n_bytes,
        device,
    )
    if limits:
        calls = calls | {"copy": CopyLimit(n_bytes, len(sets), device, parts=2)}  # two outputs, as the ops allocate
        if torch.device(device).type == "cuda" and find_spec("triton"):
            calls["empty_launch"] = EmptyLaunch(device)
    params = {
        "B": batch or 1,
        "H": heads,
        "D": dim,
        "layout": "packed qkv" if sets[0][0].qkv is not None else "q and k apart",
    }
    return Case(
        op="apply_rotary_qk",
        case=name,
        calls=calls,
        inputs=sets,
        check=lambda impl, outputs, _: _rotary_check(impl, outputs, sets[0][0], backward),
        fresh=lambda: (sets[0][0].fresh(),),  # some rotate in place, liger in float32 too
        grid_thw=grid,
        params=params | {"threads": threads} | ({"section": section} if section else {}),
        dtype=dtype,
        n_images=len(grid),
        n_tokens=tokens(grid) * (batch or 1),
        bytes=n_bytes,
        direction="bwd" if backward else "fwd",
    )


def rotary_error(impl, outputs, r, backward=False) -> tuple[float, float]:
    """(relative error, share of the error allowed) of q or k, whichever is worse, against float64.

    The relative error is norm(out - exact) / norm(exact). Allowed: 1e-6 in float32; in the 16-bit types 1.02 times
    what rounding the float64 result once costs; and for every single entry what one rounding may cost it. flash-attn,
    and ours where `low` is in the name, are held to the rounded tables that they are given. backward: the outputs are
    the gradients of q and k, which is `grad_q` and `grad_k` rotated by the negative angle.
    """
    cos, sin = (r.cos_low, r.sin_low) if impl.startswith("flash_attn") or "_low" in impl else (r.cos, r.sin)
    worst = (0.0, 0.0)
    for x, out in zip((r.grad_q, r.grad_k) if backward else (r.q, r.k), outputs):
        if out.dtype != x.dtype or out.shape != x.shape or out.device != x.device:
            raise ValueError(f"{out.dtype} {tuple(out.shape)} on {out.device}, not {x.dtype} {tuple(x.shape)}")
        exact = reference.apply_rotary(x, cos, -sin if backward else sin)
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


def _rotary_check(impl, outputs, r, backward):
    share = rotary_error(impl, outputs, r, backward)[1]
    return share <= 1, f"{share:.3f} of the error allowed"


def rotary_accuracy(device, num_heads: int, head_dims=HEAD_DIMS):
    """A row an implementation, dtype and head size: relative error and share of the error allowed, on [[1, 18, 18]].

    torch_compile is left to the timed cases, where it is checked as well: it would compile anew for each dtype here.
    """
    rows = []
    for dtype in DTYPES:
        for dim in head_dims:
            grid, geometry = [[1, 18, 18]], rotary_geometry(num_heads, dim)
            case = rotary_case("", grid, geometry, device, dtype, threads=0, limits=False, compiled=False)
            for impl, call in case.calls.items():
                try:
                    error, share = rotary_error(impl, call(*case.fresh()), case.inputs[0][0])
                except Exception:
                    if impl in peers.PEERS:
                        continue  # a peer that fails is left out
                    raise
                rows.append({"dtype": dtype, "D": dim, "impl": impl, "relative error": error, "share": share})
    return pd.DataFrame(rows)
