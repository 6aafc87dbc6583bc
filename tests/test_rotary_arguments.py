"""What the rotary embedding refuses, before anything is written, and who serves what the fast ways cannot."""

import inspect

import pytest
import torch
from test_rotary import FAST, IMPLS, close, randn, tables

import vitkit
from vitkit import Geometry, apply_rotary_qk, apply_rotary_qkv_, reference


def test_float64_is_served_by_eager_in_float64():
    q, k, (cos, sin) = randn(5, 2, 80).double(), randn(5, 2, 80).double(), tables(5, 80)
    out, _ = apply_rotary_qk(q, k, cos.double(), sin.double())
    exact = reference.apply_rotary(q, cos, sin)
    assert out.dtype == torch.float64 and (out - exact).norm() / exact.norm() < 1e-15
    for impl in FAST:
        with pytest.raises(ValueError, match=f"impl='{impl}'.*float64 is served by 'eager'"):
            apply_rotary_qk(q, k, cos, sin, impl=impl)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 2, 80, dtype=torch.int32)}, "q=torch.int32"),
        ({"k": torch.zeros(5, 2, 80, dtype=torch.float16)}, "k.dtype=torch.float16"),
        ({"q": torch.zeros(5, 2, 81), "k": torch.zeros(5, 2, 81)}, r"q.shape=\(5, 2, 81\).*even"),
        ({"q": torch.zeros(5, 2, 0), "k": torch.zeros(5, 2, 0)}, "even and at least 2"),
        ({"q": torch.zeros(5, 80)}, r"q.shape=\(5, 80\)"),
        ({"k": torch.zeros(4, 2, 80)}, r"k.shape=\(4, 2, 80\)"),
        ({"k": torch.zeros(5, 2, 64)}, r"k.shape=\(5, 2, 64\)"),
        ({"cos": torch.zeros(4, 40)}, r"cos.shape=\(4, 40\): \(5, 40\) or \(5, 80\)"),
        ({"sin": torch.zeros(5, 20)}, r"sin.shape=\(5, 20\)"),
        ({"sin": torch.zeros(5, 40, dtype=torch.int64)}, "sin=torch.int64"),
        ({"cos": None}, "cos=None"),
        ({"cos": torch.zeros(5, 40, device="meta")}, "cos lies on meta"),
        ({"q": torch.zeros(5, 80, 2).transpose(1, 2)}, "q.stride.*contiguous last axis"),
        ({"q": torch.zeros(5, 1, 80).expand(5, 2, 80)}, "q.stride.*inplace=True"),
        ({"k": torch.zeros(5, 1, 80).expand(5, 2, 80)}, "k.stride.*inplace=True"),
        ({"k": torch.zeros(600).as_strided((5, 2, 80), (80, 40, 1))}, "k.stride.*inplace=True"),
        ({"k": torch.ones(5, 2, 80).requires_grad_()}, "k is a leaf that requires grad"),
        ({"impl": []}, r"impl=\[\]"),
        ({"inplace": 1}, "inplace=1"),
        ({"impl": "cuda"}, "impl='cuda'.*'eager', 'triton_separate', 'triton', 'numba', 'auto'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_arguments_are_named_and_nothing_is_written(change, message):
    arguments = {
        "q": torch.ones(5, 2, 80),
        "k": torch.ones(5, 2, 80),
        "cos": torch.ones(5, 40),
        "sin": torch.ones(5, 40),
    }
    with pytest.raises(ValueError, match=message):
        apply_rotary_qk(**{"inplace": True, **arguments, **change})
    assert (arguments["q"] == 1).all() and (arguments["k"] == 1).all()


@pytest.mark.parametrize("bad", [torch.zeros(5, 2, 2, 80), torch.zeros(5, 3, 80), None])
def test_bad_packed_is_refused(bad):
    with pytest.raises(ValueError, match="qkv=.*S, 3, H, D"):
        apply_rotary_qkv_(bad, torch.zeros(5, 40), torch.zeros(5, 40))


def test_without_the_interpreter_triton_refuses_the_cpu(monkeypatch):
    from vitkit.indices import triton_kernels as indices
    from vitkit.rotary import triton_kernels as rotary

    monkeypatch.setattr(rotary, "INTERPRETED", False)
    monkeypatch.setattr(indices, "INTERPRETED", False)
    q, table = torch.zeros(5, 2, 80), torch.zeros(5, 40)
    with pytest.raises(ValueError, match="impl='triton'.*q lies on cpu.*'eager' or 'auto'"):
        apply_rotary_qk(q, q, table, table, impl="triton")
    with pytest.raises(ValueError, match="impl='triton' with device='cpu'"):
        vitkit.cu_seqlens([[1, 8, 8]], Geometry(), impl="triton")


def test_auto_does_without_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(vitkit.rotary.checks, "find_spec", lambda name: None)
    q, (cos, sin) = randn(5, 2, 80), tables(5, 80)
    close(apply_rotary_qk(q, q.clone(), cos, sin)[0], q, cos, sin, "eager")
    with pytest.raises(ValueError, match="numba is not installed; 'eager'"):
        apply_rotary_qk(q.cpu(), q.cpu(), cos.cpu(), sin.cpu(), impl="numba")


@pytest.mark.parametrize("impl", IMPLS)
def test_in_place_on_shared_memory_is_refused_before_anything_is_written(impl):
    memory, (cos, sin) = randn(64, 2, 80), tables(40, 80)
    before = memory.clone()
    for q, k in (
        (memory[:40], memory[:40]),
        (memory[:40], memory[8:48]),
        (memory[:40, :1], memory.view(-1, 1, 80)[:40]),
    ):
        with pytest.raises(ValueError, match="q and k share memory"):
            apply_rotary_qk(q, k, cos, sin, inplace=True, impl=impl)
    with pytest.raises(ValueError, match="cos shares memory"):
        apply_rotary_qk(memory[:40], randn(40, 2, 80), memory[:40, 0, :40], sin, inplace=True, impl=impl)
    with pytest.raises(ValueError, match="q and k share memory"):
        apply_rotary_qkv_(memory[:40, None].expand(40, 3, 2, 80), cos, sin, impl=impl)
    assert torch.equal(memory, before)
    for packed in (randn(40, 3, 2, 80), randn(2, 40, 3, 2, 80), randn(2, 3, 40, 2, 80).transpose(1, 2)):
        q, k = packed.unbind(-3)[:2]  # parts of a packed qkv interleave, and that is allowed
        apply_rotary_qk(q, k, cos, sin, inplace=True, impl=impl)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_in_place_is_noticed_by_autograd(impl):
    q, (cos, sin) = randn(5, 2, 8), tables(5, 8)
    w = torch.ones_like(q, requires_grad=True)
    y = (w * q).sum()
    apply_rotary_qk(q, q.clone(), cos, sin, inplace=True, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_packed_in_place_differentiates():
    cos, sin = (t.double() for t in tables(5, 8))
    qkv = randn(5, 3, 2, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply_rotary_qkv_(x * 1, cos, sin), (qkv,))


def test_inference_tensors_in_place():
    with torch.inference_mode():
        q, (cos, sin) = randn(5, 2, 8), tables(5, 8)
        apply_rotary_qk(q, q.clone(), cos, sin, inplace=True)
    with pytest.raises(ValueError, match="q is an inference tensor"):
        apply_rotary_qk(q, randn(5, 2, 8), *tables(5, 8), inplace=True)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_a_gradient_for_a_table_goes_to_eager(name):
    inputs = dict(zip(("q", "k", "cos", "sin"), (randn(5, 2, 8), randn(5, 2, 8), *tables(5, 8))))
    inputs[name].requires_grad_()
    assert all(x.requires_grad for x in apply_rotary_qk(**inputs))
    for impl in FAST:
        with pytest.raises(ValueError, match="requires grad"):
            apply_rotary_qk(**inputs, impl=impl)
        with torch.no_grad():  # nothing to record: served
            apply_rotary_qk(**inputs, impl=impl)


def test_tensors_without_memory_of_their_own_go_to_eager():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, (cos, sin) = randn(5, 2, 8), tables(5, 8)
    exact = reference.apply_rotary(q, cos, sin).float()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, q, cos, sin)]
        assert apply_rotary_qk(*fake)[0].shape == q.shape
    torch.testing.assert_close(apply_rotary_qk(torch._neg_view(-q), q, cos, sin)[0], exact)
    graph = make_fx(lambda x: apply_rotary_qk(x, x, cos, sin)[0])(q)
    torch.testing.assert_close(graph(q), exact)
    torch.testing.assert_close(torch.func.vmap(lambda x: apply_rotary_qk(x, x, cos, sin)[0])(q[None])[0], exact)
    for impl in FAST:
        with pytest.raises(ValueError, match="no plain tensor"):
            apply_rotary_qk(torch._neg_view(-q), q, cos, sin, impl=impl)


def test_torch_compile_gives_the_same_without_a_graph_break():
    q, k, (cos, sin) = randn(5, 2, 8), randn(5, 2, 8), tables(5, 8)
    compiled = torch.compile(lambda *x: apply_rotary_qk(*x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, cos, sin), apply_rotary_qk(q, k, cos, sin))


@pytest.mark.parametrize("impl", IMPLS)
def test_another_default_device_changes_nothing(impl):
    q, k, (cos, sin) = randn(5, 2, 8), randn(5, 2, 8), tables(5, 8)
    with torch.device("meta"):
        out = apply_rotary_qk(q, k, cos, sin, impl=impl)
    for x, y in zip(out, (q, k)):
        close(x, y, cos, sin, impl)


@pytest.mark.parametrize("which", ["q", "k", "cos", "sin"])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_the_width_of_an_access_divides_every_address(which, offset, monkeypatch):
    """The interpreter cannot tell a misaligned access: look at the width that the launch is given."""
    from vitkit.rotary import triton_kernels

    widths, names = [], list(inspect.signature(triton_kernels._kernel.fn).parameters)

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **options: widths.append(args[names.index("VEC")])

    monkeypatch.setattr(triton_kernels, "_kernel", Recorded())
    shapes = {"q": (4, 2, 128), "k": (4, 2, 128), "cos": (4, 64), "sin": (4, 64)}
    tensors = {name: randn(4 * 2 * 128 + offset, dtype=torch.bfloat16) for name in shapes}
    for name, shape in shapes.items():
        start = offset if name == which else 0
        tensors[name] = tensors[name][start : start + torch.Size(shape).numel()].view(shape)
    triton_kernels.rotary_qk(**tensors)
    rows = {n: x.new_empty(4, *x.shape[1:-1], x.shape[-1] + offset)[..., : x.shape[-1]] for n, x in tensors.items()}
    aligned = {n: x.new_zeros(x.shape) for n, x in tensors.items()}
    triton_kernels.rotary_qk(**{**aligned, which: rows[which]})
    assert widths == [min(offset, 8)] * 2


@pytest.mark.parametrize("impl", IMPLS)
def test_a_parameter_shares_memory_like_any_tensor(impl):
    q, (cos, sin) = torch.nn.Parameter(randn(40, 2, 80), requires_grad=False), tables(40, 80)
    with pytest.raises(ValueError, match="q and k share memory"):
        apply_rotary_qk(q, q.data, cos, sin, inplace=True, impl=impl)
    table = torch.nn.Parameter(q.data.view(-1)[:1600].view(40, 40), requires_grad=False)
    with pytest.raises(ValueError, match="cos shares memory"):
        apply_rotary_qk(q.data, randn(40, 2, 80), table, sin, inplace=True, impl=impl)


def test_in_place_under_vmap_and_traced_calls_go_to_eager():
    x, (cos, sin) = randn(3, 5, 3, 2, 80), tables(5, 80)
    right = torch.stack([apply_rotary_qkv_(y.clone(), cos, sin) for y in x])
    torch.testing.assert_close(torch.func.vmap(lambda y: apply_rotary_qkv_(y, cos, sin))(x.clone()), right)
    q, k = x[0, :, 0], x[0, :, 1]
    traced = torch.jit.trace(lambda q, k: apply_rotary_qk(q, k, cos, sin), (q, k))
    torch.testing.assert_close(traced(2 * q, k), apply_rotary_qk(2 * q, k, cos, sin))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("D", [2, 80])
def test_outputs_are_contiguous_from_a_transposed_batch(impl, D):
    q, (cos, sin) = randn(2, 3, 5, D).transpose(1, 2), tables(5, D)
    assert all(y.is_contiguous() for y in apply_rotary_qk(q, q, cos, sin, impl=impl))


@pytest.mark.parametrize("name", ["q", "cos"])
def test_sparse_and_nested_tensors_are_named(name):
    inputs = dict(zip(("q", "k", "cos", "sin"), (randn(5, 2, 80), randn(5, 2, 80), *tables(5, 80))))
    with pytest.raises(ValueError, match=f"{name}="):
        apply_rotary_qk(**{**inputs, name: inputs[name].to_sparse()})
