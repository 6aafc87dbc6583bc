"""How chunks are given to lanes: the layouts, and the width of the accesses they compile to."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from test_rotary import randn, tables

from vitkit.rotary import triton_kernels
from vitkit.rotary.triton_kernels import Layout, layout_for

LAYOUTS = [
    None,
    Layout(False, 1, 30, 6, 4),
    Layout(False, 1, 20, 4, 4),
    Layout(False, 2, 27, 5, 2),
    Layout(True, 1, 20, 4, 1),
    Layout(True, 1, 32, 6, 4),
    Layout(True, 4, 24, 8, 1),
]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bits(layout, inplace):
    (q, k), (cos, sin) = (randn(13, 3, 80, dtype=torch.bfloat16) for _ in range(2)), tables(13, 80)
    right = triton_kernels.rotary_qk(q, k, cos, sin)
    outs = triton_kernels.rotary_qk(q, k, cos, sin, inplace, layout=layout)
    assert all(map(torch.equal, outs, right))
    back = triton_kernels.rotary_qk(*outs, cos, sin, inplace, backward=True, layout=layout)
    forth = triton_kernels.rotary_qk(*right, cos, -sin)
    assert all(map(torch.equal, back, forth))


def test_a_layout_without_room_is_refused():
    q, k, (cos, sin) = randn(13, 3, 80), randn(13, 3, 80), tables(13, 80)
    for layout in (
        Layout(False, 1, 30, 6, 4),
        Layout(True, 1, 30, 3, 4),
    ):  # 10 chunks a head; 3, 2 heads
        with pytest.raises(ValueError, match="layout=.*heads of 10 chunks"):
            triton_kernels.rotary_qk(q, k if layout.heads == 6 else k[:, :2], cos, sin, layout=layout)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_group_holds_whole_heads(itemsize):
    choices = product(range(1, 140), (False, True), (0, 2, 4), (False, True), (100, 10**6))
    for half, inplace, table, equal, tokens in choices:
        vec = min(half & -half, 16 // itemsize)
        layout = layout_for(half, vec, itemsize, equal, inplace, table, tokens)
        assert 1 <= layout.heads * (half // vec) <= layout.rows * layout.lanes and layout.lanes <= 32
        assert layout.rows & (layout.rows - 1) == 0 and (equal or not layout.pair)


def test_no_lane_idles_for_being_padded_to_a_power_of_two():
    """Busy lanes of all, from positions: at D = 72 a head's half is 9 chunks, in a power of two it would be 9 of 16.

    Elsewhere whole cache lines may be worth more than lanes: a layout with fewer is one that was measured.
    """
    for D in (64, 72, 80, 96, 104, 112, 120, 128):
        vec = min((D // 2) & -(D // 2), 8)
        layout = layout_for(D // 2, vec, 2, True, False, 0, 10**6)
        assert layout.heads * (D // 2 // vec) / (32 * layout.rows) >= 0.8


COMPILE = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vitkit.rotary.triton_kernels import _kernel, layout_for
backend, arch, warp = sys.argv[1:]
names = _kernel.arg_names
seen = set()
for D, vec, table, tokens in ((64, 8, 8, 9000), (72, 4, 2, 9000), (72, 4, 2, 90), (80, 8, 4, 9000), (80, 8, 4, 90)):
    for from_pos in (False, True):
        for inplace in (False, True):
            layout = layout_for(D // 2, vec, 2, True, inplace, 0 if from_pos else 4, tokens)
            if (D, from_pos, inplace, layout) in seen:
                continue
            seen.add((D, from_pos, inplace, layout))
            constants = dict(HQ=16, HK=16, HALF=D // 2, VEC=vec, TABLE_VEC=table if from_pos else vec, BATCHED=False)
            constants |= dict(FROM_POS=from_pos, INPLACE=inplace, BACKWARD=False)
            constants |= dict(zip(("PAIR", "ROWS", "LANES", "HEADS", "WARPS"), layout))
            types = dict.fromkeys(names[:4], "*bf16") | dict.fromkeys(names[4:6], "*fp32")
            types |= {names[6]: "*i32" if from_pos else "*fp32"}
            signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in names}
            aligned = names[:4] if from_pos else names[:7]
            attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
            source = ASTSource(_kernel, signature, constexprs=constants, attrs=attrs)
            options = {"num_warps": layout.warps}
            asm = triton.compile(source, target=GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp)),
                                 options=options).asm
            if backend == "cuda":
                loads, stores = (re.findall(rf"{op}\\.global\\S*", asm["ptx"]) for op in ("ld", "st"))
                wide = f".v{min(vec // 2, 4)}."  # entries of bf16, by twos in a 32-bit register
                assert stores and all(wide in s for s in stores), (D, from_pos, inplace, stores)
                scalar = [x for x in loads if ".v" not in x]
                positions = 2 * layout.rows if from_pos else 0  # row and column, one load of 4 bytes each
                assert len(scalar) == positions, (D, from_pos, inplace, loads)
            else:
                assert asm["amdgcn"]
print("compiled")
"""


@pytest.mark.parametrize("target", [("cuda", "90", "32"), ("hip", "gfx942", "64")], ids=" ".join)
def test_every_access_is_as_wide_as_the_layout_allows(target, tmp_path):
    """Compiled for a GPU that need not be here: on NVIDIA's no load or store of q, k or a table is an entry wide."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE, *target], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-2000:]
