"""Gradients: of every implementation those that autograd finds for the plain formula."""

import pytest
import torch
from test_rotary import DEVICE, DTYPES, FAST, GPU, IMPLS, randn, tables

from vitkit import (
    Geometry,
    apply_rotary_qk,
    apply_rotary_qk_from_pos,
    apply_rotary_qkv_,
    apply_rotary_qkv_from_pos_,
    rotary_table,
)
from vitkit.rotary import FROM_POS, IMPLEMENTATIONS, Rotate, RotatePacked

FROM = [i for i in FROM_POS if not (GPU and i == "numba")]


def near(x, right, dtype, impl):
    """fp32 within 1e-5; the 16-bit types within a step of the last place (the interpreter truncates bf16: two)."""
    step = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    step *= 2 if impl.startswith("triton") and not GPU else 1
    assert x.dtype == dtype and ((x.float() - right.float()).abs() <= step * right.float().abs() + step * 0.1).all()


def test_gradcheck_of_the_formula_in_float64():
    q, k = randn(4, 2, 8).double().requires_grad_(), randn(4, 3, 8).double().requires_grad_()
    cos, sin = (t.double() for t in tables(4, 8))
    assert torch.autograd.gradcheck(lambda q, k: apply_rotary_qk(q, k, cos, sin), (q, k))
    pos, table = torch.randint(0, 9, (4, 2), device=DEVICE), rotary_table(Geometry(head_dim=8), 9, DEVICE)
    assert torch.autograd.gradcheck(lambda q, k: apply_rotary_qk_from_pos(q, k, pos, table), (q, k))


def test_gradcheck_of_the_functions_that_serve_the_fast_ways():
    q, k = randn(4, 2, 8).double().requires_grad_(), randn(4, 3, 8).double().requires_grad_()
    cos, sin = (t.double() for t in tables(4, 8))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda q, k: Rotate.apply(q, k, cos, sin, IMPLEMENTATIONS, "eager", False), (q, k))
        qkv = randn(4, 3, 2, 8).double().requires_grad_()
        assert check(lambda x: RotatePacked.apply(x.clone(), cos, sin, IMPLEMENTATIONS, "eager", False), (qkv,))


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 72, 80])
def test_gradients_are_those_of_eager(impl, dtype, D):
    leaves = [randn(9, h, D, dtype=dtype) for h in (2, 3)]
    weights = [randn(9, h, D, dtype=dtype) for h in (2, 3)]
    cos, sin = tables(9, D)
    grads = {}
    for way in ("eager", impl):
        q, k = (x.clone().requires_grad_() for x in leaves)
        outs = apply_rotary_qk(q, k, cos, sin, impl=way)
        grads[way] = torch.autograd.grad(outs, (q, k), weights)
    for x, right in zip(grads[impl], grads["eager"]):
        near(x, right, dtype, impl)


@pytest.mark.parametrize("impl", FROM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_from_positions(impl, dtype):
    qkv, weight = randn(9, 3, 2, 80, dtype=dtype), randn(9, 2, 80, dtype=dtype)
    pos, table = torch.randint(0, 9, (9, 2), device=DEVICE), rotary_table(Geometry(), 9, DEVICE)
    grads = {}
    for way in ("eager", impl):
        x = qkv.clone().requires_grad_()
        outs = apply_rotary_qk_from_pos(x[:, 0], x[:, 1], pos, table, impl=way)
        (grads[way],) = torch.autograd.grad(outs, x, (weight, weight))
        assert (grads[way][:, 2] == 0).all()
    near(grads[impl], grads["eager"], dtype, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_a_packed_qkv_in_place(impl):
    qkv, weight, (cos, sin) = randn(9, 3, 2, 80), randn(9, 3, 2, 80), tables(9, 80)
    pos, table = torch.randint(0, 9, (9, 2), device=DEVICE), rotary_table(Geometry(), 9, DEVICE)
    for call, a, b in ((apply_rotary_qkv_, cos, sin), (apply_rotary_qkv_from_pos_, pos, table)):
        if impl == "triton_separate" and call is apply_rotary_qkv_from_pos_:
            continue
        grads = {}
        for way in ("eager", impl):
            x = qkv.clone().requires_grad_()
            y = (2 * x).view(9, 3, 2, 80)  # a view, as of a projection's output
            out = call(y, a, b, impl=way)
            assert out is y
            (grads[way],) = torch.autograd.grad(y**3, x, weight)
        torch.testing.assert_close(grads[impl], grads["eager"], rtol=1e-4, atol=1e-4)
    x = qkv.clone().requires_grad_()
    with pytest.raises(ValueError, match="qkv is a leaf that requires grad"):
        apply_rotary_qkv_(x, cos, sin, impl=impl)
    with torch.no_grad():
        apply_rotary_qkv_(x, cos, sin, impl=impl)


@pytest.mark.parametrize("impl", FAST)
def test_what_autograd_may_hand_to_a_backward(impl):
    """An expanded gradient, one that is None, and one that is asked for its own gradient."""
    q, k, (cos, sin) = randn(5, 2, 80).requires_grad_(), randn(5, 2, 80), tables(5, 80)
    (grad,) = torch.autograd.grad(apply_rotary_qk(q, k, cos, sin, impl=impl)[0].sum(), q)
    (right,) = torch.autograd.grad(apply_rotary_qk(q, k, cos, sin, impl="eager")[0].sum(), q)
    torch.testing.assert_close(grad, right)
    out = apply_rotary_qk(q, k, cos, sin, impl=impl)[0]
    (first,) = torch.autograd.grad((out**3).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    torch.testing.assert_close(second, _second(q, k, cos, sin), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not apply_rotary_qk(q, k, cos, sin, impl=impl)[0].requires_grad


def _second(q, k, cos, sin):
    out = apply_rotary_qk(q, k, cos, sin, impl="eager")[0]
    (first,) = torch.autograd.grad((out**3).sum(), q, create_graph=True)
    return torch.autograd.grad(first.sum(), q)[0]


@pytest.mark.parametrize("impl", FAST)
def test_in_place_where_gradients_are_recorded(impl):
    x, (cos, sin) = randn(5, 2, 80).requires_grad_(), tables(5, 80)
    q, k = x * 1, x * 2
    assert apply_rotary_qk(q, k, cos, sin, inplace=True, impl=impl)[0] is q
    (grad,) = torch.autograd.grad((q * k).sum(), x)
    q, k = apply_rotary_qk(x * 1, x * 2, cos, sin, impl="eager")
    torch.testing.assert_close(grad, torch.autograd.grad((q * k).sum(), x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", FAST)
def test_only_what_asks_for_a_gradient_is_in_the_graph(impl):
    (cos, sin), k = tables(5, 80), randn(5, 2, 80)
    y_q, y_k = apply_rotary_qk(randn(5, 2, 80).requires_grad_(), k, cos, sin, impl=impl)
    assert y_q.requires_grad and not y_k.requires_grad
    apply_rotary_qk(randn(5, 2, 80).requires_grad_() * 1, k, cos, sin, inplace=True, impl=impl)
    assert not k.requires_grad and k.grad_fn is None


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_without_memory_of_their_own(impl):
    """Lazily negated, implied zeros, batched."""
    q, k, (cos, sin), g = randn(5, 2, 80).requires_grad_(), randn(5, 2, 80), tables(5, 80), randn(5, 2, 80)
    y = apply_rotary_qk(q, k, cos, sin, impl=impl)[0]
    right = torch.autograd.grad(y, q, -g, retain_graph=True)[0]
    got = torch.autograd.grad(y, q, torch._neg_view(g), retain_graph=True)[0]
    torch.testing.assert_close(got, right)
    zero = torch.autograd.grad(y, q, torch._efficientzerotensor(5, 2, 80, device=DEVICE), retain_graph=True)[0]
    assert (zero == 0).all()
    batch = torch.autograd.grad(y, q, torch.stack([-g, g]), is_grads_batched=True)[0]
    torch.testing.assert_close(batch, torch.stack([right, -right]))


@pytest.mark.parametrize("impl", IMPLS)
def test_what_autograd_would_refuse_is_refused_before_it_is_written(impl):
    (cos, sin), leaf = tables(5, 80), randn(5, 3 * 2 * 80).requires_grad_()
    qkv, parts = leaf.view(5, 3, 2, 80), (leaf * 1).view(5, 3, 2, 80)
    split = torch.stack([leaf, leaf]).unbind(0)[0]
    before = leaf.detach().clone(), split.detach().clone()
    for call in (
        lambda: apply_rotary_qkv_(qkv, cos, sin, impl=impl),
        lambda: apply_rotary_qkv_(split.view(5, 3, 2, 80), cos, sin, impl=impl),
        lambda: apply_rotary_qk(parts[:, 0], qkv[:, 1], cos, sin, inplace=True, impl=impl),
        lambda: apply_rotary_qk(*parts.unbind(1)[:2], cos, sin, inplace=True, impl=impl),
    ):
        with pytest.raises(ValueError, match="^(q|k|qkv) is "):
            call()
    assert torch.equal(leaf, before[0]) and torch.equal(split, before[1]) and torch.equal(parts.flatten(1), leaf)
