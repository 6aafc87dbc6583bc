"""The sections of notebook 1: their grids and cases, each case made when the one before has been measured."""

import os
from importlib.util import find_spec

import torch

from . import by_hand, workloads
from .cases import CPU_TOKENS, Size, tokens
from .progress import Sized
from .rotary_cases import DTYPES, HEAD_DIMS, LIMIT_WAYS, rotary_case, rotary_geometry
from .timing import Case

BACKWARD_TOKENS = (324, 1296, 12_960, 32_768, 65_536)
LIMIT_TOKENS = (12_960, 32_768, 65_536)
TRIES_TOKENS = 32_768
CPU_ENTRIES, GPU_ENTRIES = 2**25, 2**29  # of q, for a workload by hand
# Where torch.compile is timed beside the first head size's forward: it takes seconds for each shape (tiny: nowhere).
COMPILED_TOKENS = (1296, 12_960, 32_768)
# Layouts of the kernel for heads of 9 chunks, as (pair, rows, lanes, heads, warps); None is the library's choice.
LAYOUTS = (
    None,
    (False, 1, 27, 3, 4),
    (False, 2, 32, 7, 4),
    (False, 2, 27, 6, 4),
    (True, 1, 27, 3, 4),
    (True, 2, 32, 7, 4),
    (True, 4, 24, 8, 4),
)


def rotary_grids(size: Size) -> list[tuple[str, list]]:
    """(name, grid) by rising tokens: the published workloads, and for a GPU single images, for a CPU some photos."""
    named = workloads.load_workloads()[:4]
    if size.name == "cpu":
        named += workloads.photo_grids(scales=(1,), repeats=(1,))[::3]
    if size.name == "gpu":
        squares = ((18, 18), (64, 64), (128, 256), (256, 256), (512, 512))
        named += [(f"1x{h}x{w}", [[1, h, w]]) for h, w in squares]
    seen = {}
    for name, grid in named:
        if tokens(grid) <= size.max_tokens:
            seen.setdefault(tokens(grid), (name, grid))
    return [seen[n] for n in sorted(seen)]


def _grids(size, wanted):
    """The grids of as many tokens as one of `wanted`; the first of all where none is."""
    grids = rotary_grids(size)
    return [(name, grid) for name, grid in grids if tokens(grid) in wanted] or grids[:1]


def missing(device, part: str, of: str, only: str = "") -> str:
    """One line that says why a section of `part` "forward", "backward" or "limit" is empty; only: "CPU" or "GPU"."""
    kind = "CPU" if torch.device(device).type == "cpu" else "GPU"
    if only and only != kind:
        return f"needs a {only}: skipped on a {kind}"
    if part not in ("all", of):
        return f"skipped: it is of part={of!r}, and part={part!r} was asked for"
    return "skipped: no rows of it with these parameters"


def _cases(todo, device, dtype, num_heads, threads) -> Sized:
    """The cases of [(name, grid, head_dim, more options of rotary_case)], each made when it is asked for."""
    return Sized(
        len(todo),
        (
            rotary_case(name, grid, rotary_geometry(num_heads, dim), device, dtype, threads=threads, **options)
            for name, grid, dim, options in todo
        ),
    )


def forward_cases(size, device, dtype, num_heads, head_dims, threads):
    """The forward for each of `head_dims` (on a CPU the first alone) at every size, and last the published shape."""
    device, todo = torch.device(device), []
    for dim in head_dims[: 1 if device.type == "cpu" else None]:
        for name, grid in rotary_grids(size):
            compiled = size.name != "tiny" and (dim == head_dims[0] or tokens(grid) in COMPILED_TOKENS)
            todo.append((name, grid, dim, {"compiled": compiled}))
    if device.type == "cuda" and size.name != "tiny":
        todo.append(("2 x 16384", [[1, 128, 128]], head_dims[0], {"batch": 2, "section": "published"}))
    return _cases(todo, device, dtype, num_heads, threads)


def forward_clocks(case: Case, device) -> tuple[str, ...]:
    """On a GPU the device's own time, and for a case of few tokens the host's too."""
    if torch.device(device).type == "cpu":
        return ("e2e",)
    return ("kernel", "host") if case.n_tokens <= CPU_TOKENS else ("kernel",)


def backward_cases(size, device, dtype, num_heads, head_dims, threads):
    """The backward for each of `head_dims` (on a CPU the first alone) at some sizes."""
    todo = []
    for dim in head_dims[: 1 if torch.device(device).type == "cpu" else None]:
        for name, grid in _grids(size, BACKWARD_TOKENS):
            compiled = dim == head_dims[0] and tokens(grid) in COMPILED_TOKENS
            todo.append((name, grid, dim, {"backward": True, "compiled": compiled}))
    return _cases(todo, device, dtype, num_heads, threads)


def thread_cases(size, device, num_heads, head_dim):
    """On a CPU alone: bfloat16 and float32 by one thread and by two, where the machine has them.

    q and k lie apart, as in the copy that they are compared with.
    """
    if torch.device(device).type != "cpu":
        return []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counts = (1, 2)[:cores]
    return Sized(2 * len(counts), _by_threads(counts, size, device, num_heads, head_dim))


def _by_threads(counts, size, device, num_heads, head_dim):
    before = torch.get_num_threads()
    name, grid = _grids(size, (CPU_TOKENS,))[-1]
    ways, geometry = ("numba", "numba_in_place", "transformers", "torch_compile"), rotary_geometry(num_heads, head_dim)
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            for dtype in ("bfloat16", "float32"):
                options = {"threads": threads, "packed": False, "ways": ways, "section": "threads"}
                yield rotary_case(name, grid, geometry, device, dtype, compiled=size.name != "tiny", **options)
    finally:
        torch.set_num_threads(before)


def limit_cases(size, device, dtype, num_heads, threads):
    """On a GPU alone: the kernel's ways from packed qkv and the copy, at every head size."""
    if torch.device(device).type == "cpu":
        return []
    options = {"compiled": False, "ways": LIMIT_WAYS, "section": "limit"}
    todo = [(name, grid, dim, options) for dim in HEAD_DIMS for name, grid in _grids(size, LIMIT_TOKENS)]
    return _cases(todo, device, dtype, num_heads, threads)


def tries_cases(size, device, dtype, num_heads, threads, head_dim=72):
    """On a GPU alone: rotating in place by several layouts of the kernel, and the limit of working in place."""
    if torch.device(device).type == "cpu" or not find_spec("triton"):
        return []
    return Sized(1, _tries_case(size, device, dtype, num_heads, threads, head_dim))


def _tries_case(size, device, dtype, num_heads, threads, head_dim):
    from .negate import InPlaceNegate

    name, grid = _grids(size, (TRIES_TOKENS,))[0]
    options = {"threads": threads, "section": "tries", "calls": tries()}
    case = rotary_case(name, grid, rotary_geometry(num_heads, head_dim), device, dtype, **options)
    qkv = case.inputs[0][0].qkv
    case.calls["in_place_negate"] = InPlaceNegate(qkv.shape, qkv.dtype, len(case.inputs), device)
    yield case


def one_workload(*, tokens, num_heads, head_dim, dtype, device):
    """`by_hand.table` of the forward on one image of so many tokens, without torch_compile, which takes seconds.

    On a GPU with the clock `kernel`, on a CPU `e2e`. ValueError that names the argument and what is allowed.
    """
    device, geometry = torch.device(device), rotary_geometry(num_heads, head_dim)
    most = (GPU_ENTRIES if device.type == "cuda" else CPU_ENTRIES) // (geometry.num_heads * geometry.head_dim)
    if type(tokens) is not int or tokens % 4 or not 4 <= tokens <= most:
        raise ValueError(f"tokens={tokens!r}: a multiple of 4 from 4 to {most} is allowed with these heads")
    by_hand.check_choice("dtype", dtype, DTYPES)
    side = max(n for n in range(2, int(tokens**0.5) + 1, 2) if tokens % (2 * n) == 0)  # as square as can be
    options = {"threads": torch.get_num_threads(), "compiled": False}
    case = rotary_case("by hand", [[1, side, tokens // side]], geometry, device, dtype, **options)
    return by_hand.timed(case, device, "kernel" if device.type == "cuda" else "e2e")


def tries() -> dict:
    """{name: callable(RotaryInputs)}: the kernel in place by every layout, with tables and from positions."""
    from vitkit.rotary import triton_kernels

    def call(from_pos, layout):
        rotate = triton_kernels.rotary_qk_from_pos if from_pos else triton_kernels.rotary_qk
        layout = layout and triton_kernels.Layout(*layout)
        if from_pos:
            return lambda r: rotate(r.q, r.k, r.pos_ids, r.table, inplace=True, layout=layout)
        return lambda r: rotate(r.q, r.k, r.cos, r.sin, inplace=True, layout=layout)

    return {
        f"{'from_pos' if from_pos else 'tables'}: {_layout_name(layout)}": call(from_pos, layout)
        for from_pos in (False, True)
        for layout in LAYOUTS
    }


def _layout_name(layout) -> str:
    if layout is None:
        return "the library's layout"
    pair, rows, lanes, heads, warps = layout
    return f"{rows} row{'s' * (rows > 1)} of {lanes} lanes, {heads} heads{' of q and k' if pair else ''}, {warps} warps"
