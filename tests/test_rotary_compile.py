"""Under torch.compile and torch.export the rotation is one operator; in a CUDA graph it is one launch."""

import shutil

import pytest
import torch
from test_rotary import DEVICE, GPU, randn, tables
from torch._dynamo.testing import CompileCounterWithBackend

from vitkit import (
    Geometry,
    apply_rotary_qk,
    apply_rotary_qk_from_pos,
    apply_rotary_qkv_,
    apply_rotary_qkv_from_pos_,
    rotary_table,
)

TABLE = rotary_table(Geometry(), 63, DEVICE)
CALLS = {
    "rows": lambda x, pos, cos, sin: apply_rotary_qk(x[:, 0], x[:, 1], cos, sin),
    "rows in place": lambda x, pos, cos, sin: apply_rotary_qk(x[:, 0], x[:, 1], cos, sin, inplace=True),
    "packed": lambda x, pos, cos, sin: (apply_rotary_qkv_(x, cos, sin),),
    "positions": lambda x, pos, cos, sin: apply_rotary_qk_from_pos(x[:, 0], x[:, 1], pos, TABLE, max_position=63),
    "packed positions": lambda x, pos, cos, sin: (apply_rotary_qkv_from_pos_(x, pos, TABLE),),
}


def arguments(S):
    pos = torch.randint(0, 64, (S, 2), device=DEVICE)
    return randn(S, 3, 2, 80), pos, *tables(S, 80)


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CALLS)
def test_twenty_image_sizes_make_at_most_two_graphs_and_no_break(name):
    call = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, *rest: tuple(y + 1 for y in call(x, *rest)), backend=counter, fullgraph=True)
    for S in range(64, 1344, 64):
        x, *rest = arguments(S if GPU else S // 16)
        mine = x.clone()
        outs = compiled(mine, *rest)
        for out, right in zip(outs, call(x, *rest)):
            torch.testing.assert_close(out, right + 1)
        torch.testing.assert_close(mine, x)  # what is written in place is written by the compiled program too
    assert counter.frame_count <= 2


@pytest.mark.skipif(not GPU and not shutil.which("g++"), reason="no compiler here")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_inductor_writes_with_dynamic_shapes(name, inference):
    compiled = torch.compile(CALLS[name], dynamic=True, fullgraph=True)
    for S in (9, 20):
        with torch.inference_mode(inference):
            x, *rest = arguments(S)
            mine = x.clone()
            for out, right in zip(compiled(mine, *rest), CALLS[name](x, *rest)):
                torch.testing.assert_close(out, right)
            torch.testing.assert_close(mine, x)


@pytest.mark.parametrize("name", ["rows", "packed"])
def test_training_through_torch_compile(name):
    x, *rest = arguments(30)

    def loss(x):
        return sum((y**3).sum() for y in CALLS[name](x * 1, *rest))

    grads = []
    for function in (torch.compile(loss, backend="aot_eager", fullgraph=True), loss):
        leaf = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(function(leaf), leaf)[0])
    torch.testing.assert_close(*grads)


def test_transforms_inside_a_compiled_function():
    """An operator has no rule for them, forward mode gave zeros without a word: the plain formula is traced instead."""
    q, (cos, sin) = randn(5, 2, 8), tables(5, 8)

    def rotate(x):
        return apply_rotary_qk(x, x, cos, sin)[0]

    for function in (
        lambda x: torch.func.jvp(rotate, (x,), (x,))[1],
        lambda x: torch.func.grad(lambda y: rotate(y).pow(3).sum())(x),
        lambda x: torch.func.vmap(rotate)(x[None])[0],
    ):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="aot_eager")(q), function(q))


@pytest.mark.parametrize("name", ["rows", "positions"])
def test_an_exported_program_keeps_one_operator(name):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return CALLS[name](*args)

    S = torch.export.Dim("S", min=2, max=100_000)
    program = torch.export.export(Module(), arguments(20), dynamic_shapes=(({0: S},) * 4,))
    named = [n.target for n in program.graph.nodes if "vitkit" in str(n.target)]
    assert named == [torch.ops.vitkit.rotary_qk.default]
    other = arguments(33)
    for out, right in zip(program.module()(*other), CALLS[name](*other)):
        torch.testing.assert_close(out, right)


def test_the_operators_declare_what_they_do():
    qkv, pos, cos, sin = arguments(20)
    q, k = qkv[:, 0], qkv[:, 1]
    torch.library.opcheck(torch.ops.vitkit.rotary_qk.default, (q, k, cos, sin, False, "auto", False))
    torch.library.opcheck(torch.ops.vitkit.rotary_qk.default, (q, k, pos, TABLE, True, "auto", True))
    torch.library.opcheck(torch.ops.vitkit.rotary_qkv_.default, (qkv, cos, sin, False, "auto"))
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    torch.library.opcheck(torch.ops.vitkit.rotary_qk.default, (*leaves, cos, sin, False, "auto", False))


@pytest.mark.parametrize("name", CALLS)
def test_what_no_operator_serves_is_traced(name):
    x, pos, cos, sin = arguments(9)
    x, cos, sin = x.double(), cos.double(), sin.double()
    mine = x.clone()
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    for out, right in zip(compiled(mine, pos, cos, sin), CALLS[name](x, pos, cos, sin)):
        torch.testing.assert_close(out, right)
    torch.testing.assert_close(mine, x)


@pytest.mark.parametrize("cos", [torch.zeros(4, 40), torch.zeros(5, 20)])
def test_a_bad_argument_is_refused_while_compiling(cos):
    q = torch.ones(5, 2, 80)
    with pytest.raises(Exception, match="cos.shape"):
        torch.compile(lambda q, cos: apply_rotary_qk(q, q, cos, cos), backend="eager", fullgraph=True)(q, cos)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_capturable_after_one_call_and_never_waiting(name, dtype):
    x, *rest = arguments(324)
    x, call = x.to(dtype), CALLS[name]
    expected = [y.clone() for y in call(x.clone(), *rest)]
    mine = x.clone()
    graph = torch.cuda.CUDAGraph()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            outs = call(mine, *rest)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    mine.copy_(x)
    graph.replay()
    assert all(map(torch.equal, outs, expected))


@pytest.mark.gpu
def test_nothing_but_the_outputs_is_allocated():
    x, pos, cos, sin = arguments(1296)
    outs = CALLS["rows"](x, pos, cos, sin)
    del outs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outs = CALLS["rows"](x, pos, cos, sin)
    n_bytes = sum(y.numel() * y.element_size() for y in outs)
    assert torch.cuda.max_memory_allocated() - before <= n_bytes + 2 * 512  # a block is rounded up to 512 bytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    CALLS["packed"](x, pos, cos, sin)
    assert torch.cuda.max_memory_allocated() == before
