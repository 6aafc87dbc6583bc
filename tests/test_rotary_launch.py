"""Launches that were prepared: what they need not look at again, and what they must."""

import copy
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
