"""How the kernel is launched: layouts, the width of its accesses, and launches that were prepared."""

import copy
import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from test_rotary import close, randn, tables

from vitkit import (
    Geometry,
    apply_rotary_qk,
    apply_rotary_qk_from_pos,
    apply_rotary_qkv_,
    apply_rotary_qkv_from_pos_,
    rotary_table,
)
from vitkit.rotary import prepared, triton_kernels
from vitkit.rotary.triton_kernels import Layout, layout_for

LAYOUTS = [
    None,
    Layout(False, 1, 30, 6, 4),
    Layout(False, 1, 20, 4, 4),
    Layout(False, 2, 27, 5, 2),
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
    for half, inplace, table, equal in product(range(1, 140), (False, True), (0, 2, 4), (False, True)):
        vec = min(half & -half, 16 // itemsize)
        layout = layout_for(half, vec, itemsize, equal, inplace, table)
        assert 1 <= layout.heads * (half // vec) <= layout.rows * layout.lanes and layout.lanes <= 32
        assert layout.rows & (layout.rows - 1) == 0 and (equal or not layout.pair)


def test_no_lane_idles_for_being_padded_to_a_power_of_two():
    """Busy lanes of all, out of place: at D = 72 a head's half is 9 chunks, in a power of two it would be 9 of 16."""
    for D in (64, 72, 80, 96, 104, 112, 120, 128):
        vec = min((D // 2) & -(D // 2), 8)
        layout = layout_for(D // 2, vec, 2, True, False, 4)
        assert layout.heads * (D // 2 // vec) / (32 * layout.rows) >= 0.8


COMPILE = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vitkit.rotary.triton_kernels import _kernel, layout_for
backend, arch, warp = sys.argv[1:]
names = _kernel.arg_names
for D, vec, table in ((64, 8, 8), (72, 4, 2), (80, 8, 4), (128, 8, 8)):
    for from_pos in (False, True):
        for inplace in (False, True):
            layout = layout_for(D // 2, vec, 2, True, inplace, 0 if from_pos else 4)
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


# ---- prepared launches --------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """A plan on the CPU whose launches are written down: (plan(q, k, a, b), launches, tensors)."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    launches = []
    compiled = SimpleNamespace(run=lambda *args: launches.append(args), function="f", packed_metadata="m")

    def make(q, k, a, b, inplace=False, from_pos=False):
        plan = prepared._Plan(q, k, a, b, inplace, from_pos, (compiled, 5, ("S", "D")))
        plan.index = 0  # a CPU's device has none
        return plan

    return make, launches


def aligned(*shape):
    memory = torch.empty(torch.Size(shape).numel() + 16)
    first = -memory.data_ptr() % 64 // 4
    return memory[first : first + torch.Size(shape).numel()].view(shape)


def test_a_plan_launches_with_the_addresses_of_the_call(recorded):
    make, launches = recorded
    qkv, cos, sin = aligned(8, 3, 2, 80), aligned(8, 40), aligned(8, 40)
    q, k = qkv[:, 0], qkv[:, 1]
    y_q, y_k = make(q, k, cos, sin)(q, k, cos, sin)
    pointers = [x.data_ptr() for x in (q, k, y_q, y_k, cos, sin, cos)]
    assert launches[0] == (5, 1, 1, 7, "f", "m", None, None, None, *pointers, "S", "D")
    assert y_q.is_contiguous() and y_q.shape == q.shape and y_q.data_ptr() != q.data_ptr()
    pos, table = torch.zeros(8, 2, dtype=torch.int32), aligned(2, 12, 20)
    make(q, k, pos, table, from_pos=True)(q, k, pos, table)
    assert launches[1][13:16] == (table[0].data_ptr(), table[1].data_ptr(), pos.data_ptr())


def test_a_plan_refuses_what_it_was_not_prepared_for(recorded):
    make, launches = recorded
    qkv, cos, sin = aligned(8, 3, 2, 80), aligned(8, 40), aligned(8, 40)
    q, k = qkv[:, 0], qkv[:, 1]
    odd = aligned(8 * 80 * 2 + 1)[1:].view(8, 2, 80)
    plan = make(q, k, cos, sin)
    assert plan(odd, k, cos, sin) is plan(q, odd, cos, sin) is None  # 4 bytes off
    plan = make(q, k, cos, sin, inplace=True)
    assert plan(q, k, cos, sin)[0] is q
    assert plan(q, q, cos, sin) is None and plan(k, q, cos, sin) is None  # elsewhere to each other
    assert plan(q, k, qkv.view(-1)[: 8 * 40].view(8, 40), sin) is None  # a table within q and k
    other = aligned(8, 40)
    assert plan(q, k, other, sin) is not None
    plan.current_device = lambda: 1
    assert plan(q, k, cos, sin) is None
    assert len(launches) == 2


def test_a_plan_for_qkv_takes_its_views_from_it(recorded, monkeypatch):
    make, launches = recorded
    monkeypatch.setattr(prepared, "_plans", {})
    qkv, cos, sin = aligned(8, 3, 2, 80), aligned(8, 40), aligned(8, 40)
    plan = copy.copy(make(qkv[:, 0], qkv[:, 1], cos, sin, inplace=True))
    plan.packed = True
    assert plan(qkv, qkv, cos, sin)[0] is qkv
    pointers = [x.data_ptr() for x in (qkv[:, 0], qkv[:, 1], qkv[:, 0], qkv[:, 1])]
    assert list(launches[0][9:13]) == pointers
    assert plan(qkv, qkv, qkv.view(-1)[400:720].view(8, 40), sin) is None  # a table within k


@pytest.mark.parametrize("inside", [False, True])
def test_a_plan_in_place_writes_inference_tensors_in_inference_mode_alone(inside, recorded):
    make, launches = recorded
    with torch.inference_mode():
        qkv, cos, sin = aligned(8, 3, 2, 80), aligned(8, 40), aligned(8, 40)
    with torch.inference_mode(inside):
        out = make(qkv[:, 0], qkv[:, 1], cos, sin, inplace=True)(qkv[:, 0], qkv[:, 1], cos, sin)
    assert (out is not None) == inside == bool(launches)


def test_a_plan_in_place_tells_autograd(recorded):
    make, _ = recorded
    qkv, cos, sin = aligned(8, 3, 2, 80), aligned(8, 40), aligned(8, 40)
    q, k = qkv[:, 0], qkv[:, 1]
    version = qkv._version
    make(q, k, cos, sin, inplace=True)(q, k, cos, sin)
    assert qkv._version > version


def test_the_oldest_plan_goes(monkeypatch):
    monkeypatch.setattr(prepared, "_plans", {})
    for i in range(prepared.MAX_PLANS + 3):
        prepared._keep(i, None)
    assert list(prepared._plans) == list(range(3, prepared.MAX_PLANS + 3))


@pytest.fixture
def spied(monkeypatch):
    """Counts ordinary launches."""
    count = []
    launch = triton_kernels.launch
    monkeypatch.setattr(triton_kernels, "launch", lambda *a, **k: count.append(1) or launch(*a, **k))
    monkeypatch.setattr(prepared, "_plans", {})
    return count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 72, 80, 96, 128])
def test_the_second_call_is_prepared_and_gives_the_same_bits(D, dtype, spied):
    geometry, table = Geometry(head_dim=D), rotary_table(Geometry(head_dim=D), 63, "cuda")
    cos, sin = tables(324, D)
    pos = torch.randint(0, 64, (324, 2), device="cuda", dtype=torch.int32)
    for call in (
        lambda x: apply_rotary_qk(x[:, 0], x[:, 1], cos, sin),
        lambda x: apply_rotary_qk_from_pos(x[:, 0], x[:, 1], pos, table, max_position=63),
        lambda x: apply_rotary_qkv_(x, cos, sin)[:, :2].unbind(1),
        lambda x: apply_rotary_qkv_from_pos_(x, pos, table, max_position=63)[:, :2].unbind(1),
        lambda x: apply_rotary_qk(x[:, 0], x[:, 1], cos, sin, inplace=True),
    ):
        xs = [randn(324, 3, geometry.num_heads, D, dtype=dtype) for _ in range(4)]
        before = [x.clone() for x in xs]
        prepared._plans.clear()
        spied.clear()
        outs = [[y.clone() for y in call(x)] for x in xs]
        assert len(spied) == 1
        for out, x in zip(outs, before):
            prepared._plans.clear()
            assert all(map(torch.equal, out, call(x)))  # ordinary


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["q", "k", "cos", "sin"])
def test_alignment_is_not_assumed_from_an_earlier_call(which, spied):
    shapes = {"q": (40, 2, 80), "k": (40, 2, 80), "cos": (40, 40), "sin": (40, 40)}
    for offset in (0, 0, 1, 2, 4, 0):
        tensors = {}
        for name, shape in shapes.items():
            n, start = torch.Size(shape).numel(), offset if name == which else 0
            tensors[name] = randn(n + start, dtype=torch.bfloat16)[start:].view(shape)
        q, k = apply_rotary_qk(**tensors)
        close(q, tensors["q"], tensors["cos"], tensors["sin"], "triton")
        close(k, tensors["k"], tensors["cos"], tensors["sin"], "triton")
    assert len(spied) == 4  # the first, and each that lay off 16 bytes


@pytest.mark.gpu
def test_what_a_prepared_call_must_still_see(spied):
    q, k, (cos, sin) = randn(40, 2, 80), randn(40, 2, 80), tables(40, 80)
    for _ in range(2):
        apply_rotary_qk(q, k, cos, sin)
    leaf = q.clone().requires_grad_()
    assert apply_rotary_qk(leaf, k, cos, sin)[0].requires_grad
    with pytest.raises(ValueError, match="cos.shape"):
        apply_rotary_qk(q, k, cos[:5], sin)
    with pytest.raises(ValueError, match="impl="):
        apply_rotary_qk(q, k, cos, sin, impl="nothing")
    memory = randn(80, 2, 80)
    for _ in range(2):
        apply_rotary_qk(memory[:40], memory[40:], cos, sin, inplace=True)
    with pytest.raises(ValueError, match="share memory"):
        apply_rotary_qk(memory[:40], memory[8:48], cos, sin, inplace=True)
    with pytest.raises(ValueError, match="cos shares memory"):
        apply_rotary_qk(memory[:40], memory[40:], memory.view(-1)[:1600].view(40, 40), sin, inplace=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = apply_rotary_qk(q, k, cos, sin)[0]
    torch.cuda.current_stream().wait_stream(side)
    close(out, q, cos, sin, "triton")


@pytest.mark.gpu
def test_a_packed_qkv_takes_no_plan_of_another_pair(spied):
    x, (cos, sin) = randn(40, 3, 2, 80), tables(40, 80)
    apply_rotary_qk(x[:, 0], x[:, 2], cos, sin, inplace=True)  # the strides of q and k, but twice as far apart
    for impl in ("eager", "triton_separate", "auto", "auto"):
        qkv = randn(40, 3, 2, 80)
        before = qkv.clone()
        apply_rotary_qkv_(qkv, cos, sin, impl=impl)
        for i in (0, 1):
            close(qkv[:, i], before[:, i], cos, sin, "triton")
        assert torch.equal(qkv[:, 2], before[:, 2])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_a_prepared_call_on_a_gpu_that_is_not_current():
    with torch.device("cuda:1"):
        q, cos, sin = torch.randn(9, 2, 80), torch.randn(9, 40), torch.randn(9, 40)
    for _ in range(3):
        close(apply_rotary_qk(q, q.clone(), cos, sin)[0], q, cos, sin, "triton")
    assert torch.cuda.current_device() == 0
