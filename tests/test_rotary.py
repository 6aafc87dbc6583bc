"""Every implementation of the rotary embedding against float64, within what one rounding costs."""

import pytest
import torch

import vitkit
from vitkit import Geometry, apply_rotary_qk, apply_rotary_qkv_, reference
from vitkit.rotary import IMPLEMENTATIONS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"  # without a GPU, conftest has Triton's interpreter on
IMPLS = [i for i in IMPLEMENTATIONS if not (GPU and i == "numba")]
FAST = [i for i in IMPLS if i != "eager"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(S, D, dtype=torch.float32, doubled=False):
    angles = torch.rand(S, D // 2, device=DEVICE) * 6.3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if doubled else (cos, sin)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(out, x, cos, sin, impl):
    """fp32 below 1e-6; the 16-bit types no worse than rounding the float64 result once, within 2 %."""
    exact = reference.apply_rotary(x, cos, sin)
    error = (out.double() - exact).norm() / exact.norm() if x.numel() else 0
    limit = 1e-6
    if x.dtype in (torch.bfloat16, torch.float16) and x.numel():
        limit = 1.02 * (exact.to(x.dtype).double() - exact).norm() / exact.norm() + 1e-9
    if impl.startswith("triton") and not GPU and x.dtype == torch.bfloat16:
        # Triton's interpreter truncates fp32 to bf16: up to one step of 2^-7, entry by entry.
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
        limit = 2**-7
    assert out.dtype == x.dtype and out.shape == x.shape and out.device == x.device
    assert error <= limit, f"{impl}: error {error:.3g} above {limit:.3g}"


def check(q, k, cos, sin, impl):
    """Out of place: new and contiguous, inputs untouched. Then in place: the same bits, in q and k themselves."""
    before = q.clone(), k.clone()
    outs = apply_rotary_qk(q, k, cos, sin, impl=impl)
    for out, x, kept in zip(outs, (q, k), before):
        close(out, x, cos, sin, impl)
        assert out.is_contiguous() and torch.equal(x, kept)
    again = apply_rotary_qk(q, k, cos, sin, impl=impl, inplace=True)
    assert again[0] is q and again[1] is k
    assert torch.equal(q, outs[0]) and torch.equal(k, outs[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [2, 6, 64, 72, 80, 96, 128])
def test_dtypes_and_head_sizes(impl, dtype, D):
    S = 300 if GPU else 21
    q, k = randn(S, 3, D, dtype=dtype), randn(S, 3, D, dtype=dtype)
    check(q, k, *tables(S, D), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("cos_dtype", "sin_dtype"),
    [(d, d) for d in (*DTYPES, torch.float64)]
    + [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("doubled", [(False, False), (True, True), (True, False)])
def test_tables_of_other_dtypes_or_doubled(impl, dtype, cos_dtype, sin_dtype, doubled):
    q, k = randn(9, 2, 80, dtype=dtype), randn(9, 2, 80, dtype=dtype)
    cos, sin = tables(9, 80)
    cos, sin = cos.to(cos_dtype), sin.to(sin_dtype)  # of a doubled table the second half is not read
    cos = torch.cat([cos, cos * float("nan")], -1) if doubled[0] else cos
    sin = torch.cat([sin, sin * float("nan")], -1) if doubled[1] else sin
    check(q, k, cos, sin, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("hq", "hk"), [(4, 1), (1, 5), (3, 2), (2, 2), (0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_head_counts_and_batches(impl, hq, hk, batch):
    q, k = randn(*batch, 7, hq, 80, dtype=torch.float16), randn(*batch, 7, hk, 80, dtype=torch.float16)
    check(q, k, *tables(7, 80), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("D", [72, 80])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views(impl, D, dtype):
    S, H = 11, 3
    cos, sin = tables(S, D)

    packed = randn(S, 3, H, D, dtype=dtype)  # q and k out of packed qkv
    check(packed[:, 0], packed[:, 1], cos, sin, impl)
    offset = randn(2 * S * H * D + 1, dtype=dtype)[1:].reshape(2, S, H, D)  # a storage offset of one entry
    check(offset[0], offset[1], cos, sin, impl)
    odd = randn(S, H * D * 2 + 1, dtype=dtype)  # an odd row stride
    check(odd[:, : H * D].view(S, H, D), odd[:, H * D : 2 * H * D].view(S, H, D), cos, sin, impl)
    heads_first = randn(2, H, S, D, dtype=dtype).transpose(1, 2)  # (B, H, S, D) in memory
    check(heads_first, heads_first.clone(), cos, sin, impl)
    every_other = randn(2, 2 * S, H, D, dtype=dtype)[:, ::2]
    check(every_other[:1], every_other[1:], cos, sin, impl)
    slices = randn(
        S,
        2 * D,
        dtype=torch.float32,
    )[:, 3 : 3 + D // 2]  # tables may be views too
    x = randn(S, H, D, dtype=dtype)
    check(x, x.clone(), slices, slices, impl)
    columns = randn(D // 2, S).T  # even with a strided last axis, one of them or both
    check(x, x.clone(), columns, columns, impl)
    check(x, x.clone(), slices, columns, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_expanded_inputs_out_of_place(impl):
    q, k = randn(1, 1, 80).expand(6, 4, 80), randn(6, 1, 80).expand(6, 4, 80)
    cos, sin = tables(6, 80)
    for out, x in zip(apply_rotary_qk(q, k, cos, sin, impl=impl), (q, k)):
        close(out, x, cos, sin, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_in_place_leaves_v_alone(impl, dtype):
    qkv = randn(13, 3, 2, 80, dtype=dtype)
    before, (cos, sin) = qkv.clone(), tables(13, 80)
    assert apply_rotary_qkv_(qkv, cos, sin, impl=impl) is qkv
    assert torch.equal(qkv[:, 2], before[:, 2])
    q, k = apply_rotary_qk(before[:, 0], before[:, 1], cos, sin, impl=impl)
    assert torch.equal(qkv[:, 0], q) and torch.equal(qkv[:, 1], k)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 2, 80), (4, 0, 80), (0, 5, 2, 80), (2, 0, 2, 80)])
def test_empty(impl, shape):
    q, (cos, sin) = randn(*shape), tables(shape[-3], 80)
    for inplace in (False, True):
        out = apply_rotary_qk(q, q.clone(), cos, sin, impl=impl, inplace=inplace)
        assert out[0].shape == out[1].shape == torch.Size(shape)
    apply_rotary_qkv_(randn(0, 3, 2, 80), *tables(0, 80), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_entry_is_written(impl, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(float("nan")))
    q, k, (cos, sin) = randn(2, 9, 3, 72), randn(2, 9, 1, 72), tables(9, 72)
    for out, x in zip(apply_rotary_qk(q, k, cos, sin, impl=impl), (q, k)):
        close(out, x, cos, sin, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_inputs_give_the_same_bits(impl):
    q, k, (cos, sin) = randn(33, 4, 80, dtype=torch.bfloat16), randn(33, 4, 80, dtype=torch.bfloat16), tables(33, 80)
    first, second = (apply_rotary_qk(q, k, cos, sin, impl=impl) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_eager_equals_transformers_to_the_bit():
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    cos, sin = tables(50, 80)
    for dtype in DTYPES:
        q, k = randn(50, 4, 80, dtype=dtype), randn(50, 4, 80, dtype=dtype)
        theirs = modeling.apply_rotary_pos_emb_vision(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
        ours = apply_rotary_qk(q, k, cos, sin, impl="eager")
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_float64_is_served_by_eager_in_float64():
    q, k, (cos, sin) = randn(5, 2, 80).double(), randn(5, 2, 80).double(), tables(5, 80)
    out, _ = apply_rotary_qk(q, k, cos.double(), sin.double())
    exact = reference.apply_rotary(q, cos, sin)
    assert out.dtype == torch.float64 and (out - exact).norm() / exact.norm() < 1e-15
    for impl in FAST:
        with pytest.raises(ValueError, match=f"impl='{impl}'.*float64 is served by 'eager'"):
            apply_rotary_qk(q, k, cos, sin, impl=impl)


def test_gradients_go_through_eager():
    q, k = (randn(5, 2, 8).double().requires_grad_() for _ in range(2))
    cos, sin = (t.double() for t in tables(5, 8))
    assert torch.autograd.gradcheck(lambda q, k: apply_rotary_qk(q, k, cos, sin), (q, k))
    q = randn(5, 2, 8).requires_grad_()
    assert apply_rotary_qk(q, randn(5, 2, 8), *tables(5, 8))[0].requires_grad
    for impl in FAST:
        with pytest.raises(ValueError, match=f"impl='{impl}'.*requires grad.*'eager'"):
            apply_rotary_qk(q, randn(5, 2, 8), *tables(5, 8), impl=impl)
        with torch.no_grad():  # nothing to record: served
            apply_rotary_qk(q, randn(5, 2, 8), *tables(5, 8), impl=impl)


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
    monkeypatch.setattr(vitkit.rotary, "find_spec", lambda name: None)
    q, (cos, sin) = randn(5, 2, 80), tables(5, 80)
    close(apply_rotary_qk(q, q.clone(), cos, sin)[0], q, cos, sin, "eager")
    with pytest.raises(ValueError, match="numba is not installed; 'eager'"):
        apply_rotary_qk(q.cpu(), q.cpu(), cos.cpu(), sin.cpu(), impl="numba")


def test_cos_sin_of_large_positions():
    positions = torch.tensor([[0, 0], [1, 2], [4095, 8191], [8191, 17]], dtype=torch.int32, device=DEVICE)
    for geometry in (Geometry.qwen2_5_vl(), Geometry.qwen3_vl(), Geometry(head_dim=4)):
        cos, sin = vitkit.rotary_cos_sin(positions, geometry)
        n = geometry.head_dim // 4
        f = [geometry.rope_theta ** (-i / n) for i in range(n)]
        angles = torch.tensor(
            [[row * a for a in f] + [col * a for a in f] for row, col in positions.tolist()], dtype=torch.float64
        )
        assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (4, geometry.head_dim // 2)
        assert (cos.cpu() - angles.cos()).abs().max() < 1e-7 and (sin.cpu() - angles.sin()).abs().max() < 1e-7


def test_cos_sin_agree_with_transformers_at_small_positions():
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    if hasattr(modeling, "Qwen2_5_VLVisionRotaryEmbedding"):
        config = modeling.Qwen2_5_VLVisionConfig(hidden_size=1280)
        inv_freq = modeling.Qwen2_5_VLVisionRotaryEmbedding(config).inv_freq
    else:  # transformers before the class took a config
        inv_freq = modeling.Qwen2_5_VisionRotaryEmbedding(40).inv_freq
    ids = vitkit.rot_pos_ids([[1, 36, 36]], Geometry())
    angles = (ids.unsqueeze(-1).float() * inv_freq.flatten()).flatten(1)
    cos, sin = vitkit.rotary_cos_sin(ids, Geometry())
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=5e-6)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("bad", [torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.int32), [[0, 0]], None])
def test_cos_sin_refuse_other_positions(bad):
    with pytest.raises(ValueError, match="pos_ids"):
        vitkit.rotary_cos_sin(bad, Geometry())


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu():
    S = 600_000  # 600,000 * 3 * 16 * 80 entries, above 2^31
    qkv = torch.randn(S, 3, 16, 80, device="cuda", dtype=torch.bfloat16)
    cos, sin = tables(S, 80)
    rows = torch.tensor([0, 1, 559_240, 559_241, S - 1], device="cuda")
    q, k = apply_rotary_qk(qkv[:, 0], qkv[:, 1], cos, sin, impl="triton")
    for out, x in ((q, qkv[:, 0]), (k, qkv[:, 1])):
        close(out[rows], x[rows], cos[rows], sin[rows], "triton")
    expected = q[-1000:].clone(), k[-1000:].clone()
    del q, k
    apply_rotary_qkv_(qkv, cos, sin, impl="triton")
    assert torch.equal(qkv[-1000:, 0], expected[0]) and torch.equal(qkv[-1000:, 1], expected[1])


@pytest.mark.gpu
def test_twenty_sizes_compile_once_on_a_gpu():
    from vitkit.rotary import triton_kernels

    cache = triton_kernels._kernel.device_caches[torch.cuda.current_device()][0]
    q, table = randn(64, 16, 80, dtype=torch.bfloat16), tables(64, 80)
    apply_rotary_qk(q, q.clone(), *table, impl="triton")
    compiled = len(cache)
    for S in range(65, 1345, 64):
        q, table = randn(S, 16, 80, dtype=torch.bfloat16), tables(S, 80)
        apply_rotary_qk(q, q.clone(), *table, impl="triton")
    assert len(cache) == compiled


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_tensors_on_a_gpu_that_is_not_current():
    with torch.device("cuda:1"):
        q, cos, sin = torch.randn(9, 2, 80), torch.randn(9, 40), torch.randn(9, 40)
    close(apply_rotary_qk(q, q.clone(), cos, sin, impl="triton")[0], q, cos, sin, "triton")
    same = vitkit.window_index([[2, 6, 10]], Geometry(), device="cuda:1", impl="triton").index
    assert same.device == torch.device("cuda:1") and torch.cuda.current_device() == 0


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


@pytest.mark.parametrize("name", ["q", "k", "cos", "sin"])
def test_a_gradient_for_any_input_goes_to_eager(name):
    inputs = dict(zip(("q", "k", "cos", "sin"), (randn(5, 2, 8), randn(5, 2, 8), *tables(5, 8))))
    inputs[name].requires_grad_()
    assert any(x.requires_grad for x in apply_rotary_qk(**inputs))
    for impl in FAST:
        with pytest.raises(ValueError, match="requires grad"):
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

    widths = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **options: widths.append(options["VEC"])

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
