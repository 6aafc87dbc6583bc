"""What notebook 5 times and compares: forwards of one tower as it comes from transformers, and with our parts.

A forward is right if its merged units differ from those of the same weights in float32, by transformers' own code, no
more than transformers' own do (within 2 %); where the tower is in float32 itself, by no more than FLOAT32_ERROR.
"""

from contextlib import contextmanager

import pandas as pd
import torch

from ..geometry import Geometry
from . import by_hand, cases, traffic, workloads
from .forward_arms import THEIRS, Arms
from .limits import Matmul
from .timing import Case
from .tower import merged, needs

OP = "accelerate"
MORE_ERROR, FLOAT32_ERROR = 1.02, 1e-5
CPU_PATCHES, GPU_PATCHES = 2**13, 2**16  # of a workload by hand
MIXED = [[1, 42, 36], [1, 36, 36], [1, 28, 42], [1, 22, 32], [1, 30, 46], [1, 62, 72], [1, 70, 70]]  # as photos are


def forward_grids(size) -> list[tuple]:
    """(name, grid, pixels or None) of the workloads: one image, a clip, ten images, and photos with their own pixels.

    pixels: float32 (N, channels * frames * patch_size^2), as transformers' processor gives them; None: random ones.
    Where no photo is at hand, a batch of images of such sizes.
    """
    one = [[1, 36, 36]]
    if size.name == "tiny":
        return [("1x8x8", [[1, 8, 8]], None)]
    photos = workloads.photos()
    if size.name == "cpu":
        return [("1x36x36", one, None), ("1x16x16, 10 times", [[1, 16, 16]] * 10, None), *_photo_batch(photos[:1])]
    plain = [("1x36x36", one, None), ("10x36x36", [[10, 36, 36]], None), ("1x36x36, 10 times", one * 10, None)]
    return plain + (_photo_batch(photos) or [("mixed images", MIXED, None)])


def _photo_batch(photos) -> list[tuple]:
    if not photos:
        return []
    values, grid = zip(*(workloads.process(photo) for photo in photos))
    name = f"{len(photos)} photos" if len(photos) > 1 else photos[0].name
    return [(name, list(grid), torch.cat([torch.from_numpy(x) for x in values]))]


def budget(size) -> dict:
    """For `measure`: a forward takes up to a second, and a case has up to seven."""
    if size.name == "gpu":
        return {"budget_s": 3.0, "n_min": 10, "n_max": 100}
    return {"budget_s": size.budget_s, "n_min": size.n_min, "n_max": size.n_max}


@contextmanager
def _in_float32():
    """Products and convolutions of float32 in float32, not in TF32."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        with torch.no_grad():
            yield
    finally:
        for place, value in zip(places, before):
            place.allow_tf32 = value


def _error(out, exact) -> float:
    return float((out.float() - exact).norm() / exact.norm())


def forward_case(name, grid, arms: Arms, *, threads, values=None) -> Case:
    """A forward of the tower on a grid by every version of `arms`. values: the pixels, None for random ones."""
    x = arms.pixels(grid, values)
    with _in_float32():
        exact = merged(arms.exact(x.float(), grid_thw=torch.tensor(grid, device=arms.device)))
    calls = {version: arms.forward(version, grid) for version in arms.towers}
    allowed = _allowed(_error(calls["transformers"](x), exact), arms.dtype)
    return Case(
        op=OP,
        case=f"{arms.name}, {name}",
        calls=calls,
        inputs=[(x,)],
        check=lambda impl, outputs, inputs: _close(calls[impl], outputs, inputs[0], exact, allowed, impl in THEIRS),
        grid_thw=grid,
        params={
            "tower": arms.name,
            "layers": len(arms.towers["transformers"].blocks),
            "flop": flops(arms.towers["transformers"], grid),
            "threads": threads,
        },
        dtype=str(arms.dtype).removeprefix("torch."),
        n_images=len(grid),
        n_tokens=cases.tokens(grid),
    )


def one_workload(grid_thw, arms: Arms):
    """`by_hand.table` of a forward of random pixels on a grid by every version; ours is `accelerate`."""
    most = GPU_PATCHES if arms.device.type == "cuda" else CPU_PATCHES
    grid = by_hand.check_grid(grid_thw, arms.geometry, most)
    case = forward_case("by hand", grid, arms, threads=torch.get_num_threads())
    return by_hand.timed(case, arms.device, ours=OP)


def _allowed(theirs, dtype) -> float:
    return FLOAT32_ERROR if dtype == torch.float32 else MORE_ERROR * theirs


def _close(call, outputs, x, exact, allowed, theirs):
    """The error of the first call, and of ours also the later ones', which may be replays of a captured graph: after
    another batch of the same size, and from pixels that lie elsewhere in memory."""
    if outputs.shape != exact.shape or outputs.dtype != x.dtype:
        right = f"{x.dtype} {tuple(exact.shape)}"
        return False, f"{outputs.dtype} {tuple(outputs.shape)} instead of {right}"
    errors = [_error(outputs, exact)]
    if not theirs:
        call(x.flip(0))
        errors += [_error(call(x.clone()), exact) for _ in range(2)]
    worst = max(errors, key=lambda error: error if error == error else float("inf"))
    return worst <= allowed, f"error {worst:.3g}, allowed {allowed:.3g}"


def flops(tower, grid) -> int:
    """Floating-point operations of a forward's matrix products, at the widths that the weights have: 2 for each entry
    of a weight and each row that meets it, and 4 L^2 H D for an attention segment of L patches."""
    geometry = Geometry.from_config(tower.config)
    patches = cases.tokens(grid)
    units = patches // geometry.spatial_merge_size**2
    per_patch = tower.patch_embed.proj.weight.numel() + _entries(tower.blocks)
    width = 4 * geometry.num_heads * geometry.head_dim
    full = getattr(tower, "fullatt_block_indexes", range(len(tower.blocks)))
    pairs = sum(_pairs(grid, geometry, i not in full) for i in range(len(tower.blocks)))
    return 2 * patches * per_patch + 2 * units * _entries(tower.merger) + width * pairs


def _entries(module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))


def _pairs(grid, geometry, windows) -> int:
    """The sum of L^2 over the segments, which are windows or frames."""
    side = geometry.window * geometry.spatial_merge_size  # of a window, in patches

    def squares(n):
        return (n // side) * side**2 + (n % side) ** 2 if windows else n**2

    return sum(t * squares(h) * squares(w) for t, h, w in grid)


def matmul_case(device, dtype, *, threads) -> Case:
    """A large matrix product in the tower's dtype: the speed that the limit of a forward is drawn from."""
    n = 8192 if torch.device(device).type == "cuda" else 1024
    limit = Matmul(n, dtype, device)
    return Case(
        op="matmul",
        case=f"{n} x {n} x {n}",
        calls={"matmul": limit},
        inputs=[()],
        check=lambda *_: True,  # the limit checks itself
        params={"flop": limit.flop, "threads": threads},
        dtype=str(dtype).removeprefix("torch."),
    )


def accuracy_rows(name, grid, arms: Arms, values=None) -> pd.DataFrame:
    """The relative error of every block's output against float32: columns case, layer (from 1), version, error.

    Versions: transformers, and accelerate without its graph, since a captured block is called once and never again.
    Hidden states are in window order in both, so they compare as they are.
    """
    x, table, exact, rows = arms.pixels(grid, values), torch.tensor(grid, device=arms.device), [], []
    with _in_float32(), _hooked(arms.exact, lambda i, out: exact.append(out)):
        arms.exact(x.float(), grid_thw=table)
    for version, tower in (("transformers", "transformers"), ("accelerate", arms.without_graph())):
        module = arms.towers[tower]
        if isinstance(module, Exception):
            continue  # its row says why

        def add(i, out, version=version):  # at once: a later block may write into what an earlier one returned
            rows.append((f"{arms.name}, {name}", i + 1, version, _error(out, exact[i])))

        with _hooked(module, add):
            arms.forward(tower, grid)(x)
    return pd.DataFrame(rows, columns=["case", "layer", "version", "error"])


@contextmanager
def _hooked(tower, see):
    """see(i, output) is called for every block of a forward."""
    handles = [
        block.register_forward_hook(lambda _, __, out, i=i: see(i, out[0] if isinstance(out, tuple) else out))
        for i, block in enumerate(tower.blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def traffic_rows(name, grid, arms: Arms, values=None):
    """Yields (case, version, metric, value, unit): the traffic of a forward of transformers, on a GPU with varlen
    attention, and of ours after enough calls to be the replay of a graph where there is one."""
    x, need = arms.pixels(grid, values), needs(grid, arms.geometry, arms.device)
    theirs = "transformers_varlen" if arms.device.type == "cuda" else "transformers"
    for version, whose in ((theirs, "transformers"), ("accelerate", "plan")):
        call = arms.forward(version, grid)
        label = f"{arms.name}, {name}", f"forward: {version}"
        rows, _ = traffic.counted(*label, lambda call=call: call(x), arms.device, needs=need[whose], warmup=3)
        yield from rows
