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
