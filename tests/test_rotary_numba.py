"""The CPU kernel against the eager form, to the bit: formats, layouts, threads and forks."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vitkit.rotary import numba_heads, numba_kernels
from vitkit.rotary.numba_kernels import rotary_qk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOST_FP16 = numba_kernels.KINDS[torch.float16]


@pytest.fixture(params=["integers", "f16c"])
def fp16(request, monkeypatch):
    """Both ways to convert fp16: the project's on integers, and the CPU's where it has one."""
    if request.param == "f16c" and HOST_FP16 != numba_heads.FLOAT16_F16C:
        pytest.skip("this CPU does not convert fp16 by itself")
    kind = numba_heads.FLOAT16 if request.param == "integers" else HOST_FP16
    monkeypatch.setitem(numba_kernels.KINDS, torch.float16, kind)


@pytest.fixture
def threads(monkeypatch):
    """Set torch's number of threads, and make even small inputs worth sharing out."""
    before = torch.get_num_threads()
    monkeypatch.setattr(numba_kernels, "_THREAD_BYTES", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def eager(x, cos, sin):
    """rotate_half in float32, as transformers writes it."""
    half = x.shape[-1] // 2
    cos, sin = (torch.cat([t[:, :half].float()] * 2, -1).unsqueeze(1) for t in (cos, sin))
    wide = x.float()
    return (wide * cos + torch.cat([-wide[..., half:], wide[..., :half]], -1) * sin).to(x.dtype)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    integers = torch.int32 if expected.dtype == torch.float32 else torch.int16
    same = actual.contiguous().view(integers) == expected.contiguous().view(integers)
    assert bool((same | nan).all())


def tables(tokens, half, dtype=torch.float32, doubled=False, seed=1):
    angles = 10 * torch.rand(tokens, half, generator=torch.Generator().manual_seed(seed))
    pair = [angles.cos(), angles.sin()]
    return [torch.cat([t, t], -1).to(dtype) if doubled else t.to(dtype) for t in pair]


def heads(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(q, k, cos, sin):
    """Out of place, then in place on copies with the same strides; q and k must be left alone out of place."""
    expected = eager(q, cos, sin), eager(k, cos, sin)
    before = q.clone(), k.clone()
    outputs = rotary_qk(q, k, cos, sin, False)
    for x, kept, out, reference in zip((q, k), before, outputs, expected, strict=True):
        assert out.is_contiguous() and out is not x
        assert_same_bits(out, reference)
        assert_same_bits(x, kept)
    q_in, k_in = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in before)
    outputs = rotary_qk(q_in, k_in, cos, sin, True)
    assert outputs[0] is q_in and outputs[1] is k_in
    assert_same_bits(q_in, expected[0])
    assert_same_bits(k_in, expected[1])


SCALES = (1.0, 0.5, 2.0**-10, 2.0**-9, 1 + 2.0**-8, 1.5, 2.0, 4096.0, 1e-7, -1.0, 0.0, 1e-38, 1e38, float("inf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype, fp16):
    """All 65,536 values, scaled so that ties, subnormals, overflow, infinity and NaN are all rounded."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    q = patterns.view(1024, 1, 64)
    k = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(3))].view(1024, 1, 64)
    cos, sin = tables(1024, 32)
    for scale in SCALES:
        check(q, k, torch.full_like(cos, scale), torch.zeros_like(sin))
        check(q, k, torch.zeros_like(cos), torch.full_like(sin, scale))
        check(q, k, scale * cos, scale * sin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_in_the_tables(dtype, fp16):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    for form in DTYPES:
        check(heads(1024, 1, 128, dtype=form), heads(1024, 2, 128, dtype=form, seed=1), patterns, patterns.flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 6, 14, 22, 30, 50, 64, 72, 80, 96, 128, 130])
def test_head_sizes(dtype, size, fp16):
    check(heads(7, 3, size, dtype=dtype), heads(7, 3, size, dtype=dtype, seed=1), *tables(7, size // 2))


def test_float32_extremes():
    """Subnormal, huge, infinite and NaN float32 go through the same arithmetic."""
    bits = torch.randint(-(2**31), 2**31, (512, 2, 64), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    check(bits.view(torch.float32), bits.flip(0).view(torch.float32), *tables(512, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("doubled", [False, True])
def test_tables_of_every_dtype(dtype, table, doubled, fp16):
    check(heads(9, 2, 80, dtype=dtype), heads(9, 2, 80, dtype=dtype, seed=1), *tables(9, 40, table, doubled))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    cos, sin = tables(6, 40)
    qkv = heads(6, 3, 4, 80, dtype=dtype)
    check(qkv[:, 0], qkv[:, 1], cos, sin)
    flat = heads(2 * 6 * 4 * 80 + 1, dtype=dtype)
    check(flat[1 : 1 + 6 * 4 * 80].view(6, 4, 80), flat[1 : 1 + 6 * 4 * 80].view(6, 4, 80).flip(0), cos, sin)
    check(flat[1:].view(2, 6, 4, 80), heads(2, 6, 1, 80, dtype=dtype), cos, sin)  # (B, S, H, D), 4 heads and 1
    check(heads(2, 4, 6, 80, dtype=dtype).transpose(1, 2), heads(2, 6, 8, 80, dtype=dtype)[:, :, ::2], cos, sin)
    wide = heads(6, 5, 80, dtype=dtype), heads(6, 2, 80, dtype=dtype)
    check(*wide, torch.cat([cos, cos, cos], -1)[:, 40:80], sin[:1].expand(6, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_input(dtype):
    cos, sin = tables(6, 40)
    q, k = heads(1, 1, 80, dtype=dtype).expand(6, 4, 80), heads(1, 6, 2, 80, dtype=dtype).expand(3, 6, 2, 80)
    for x, y in ((q, q), (k, k)):
        for out, reference in zip(rotary_qk(x, y, cos, sin, False), (x, y), strict=True):
            assert out.is_contiguous()
            assert_same_bits(out, eager(reference, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_on_packed_qkv_leaves_v_alone(dtype):
    cos, sin = tables(11, 36)
    flat = heads(11 * 3 * 2 * 72 + 2, dtype=dtype)
    before = flat.clone()
    qkv = flat[1:-1].view(11, 3, 2, 72)
    old = qkv.clone()
    rotary_qk(qkv[:, 0], qkv[:, 1], cos, sin, True)
    assert_same_bits(qkv[:, 0], eager(old[:, 0], cos, sin))
    assert_same_bits(qkv[:, 1], eager(old[:, 1], cos, sin))
    assert_same_bits(qkv[:, 2], old[:, 2])
    assert_same_bits(flat[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("shape", [(0, 4, 80), (6, 0, 80), (0, 6, 4, 80), (2, 0, 4, 80)])
@pytest.mark.parametrize("inplace", [False, True])
def test_empty(shape, inplace):
    q, k = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16)
    outputs = rotary_qk(q, k, *tables(shape[-3], 40), inplace)
    assert [out.shape for out in outputs] == [q.shape, k.shape]


def test_no_heads_of_k():
    q, k = heads(6, 4, 80), heads(6, 0, 80)
    check(q, k, *tables(6, 40))


def test_inference_tensors():
    with torch.inference_mode():
        q, k = heads(6, 4, 80), heads(6, 4, 80, seed=1)
        expected = eager(q, *tables(6, 40))
        rotary_qk(q, k, *tables(6, 40), True)
        assert_same_bits(q, expected)


@pytest.mark.parametrize("tokens", [3, 1100])  # 1100: 4.5 MB an output, which asks for huge pages
def test_outputs_are_written_in_full(tokens, monkeypatch, threads):
    threads(2)
    q, k = heads(tokens, 16, 128), heads(tokens, 2, 128, seed=1)
    cos, sin = tables(tokens, 64)
    expected = eager(q, cos, sin), eager(k, cos, sin)
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
        outputs = rotary_qk(q, k, cos, sin, False)
    assert_same_bits(outputs[0], expected[0])
    assert_same_bits(outputs[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype, threads):
    cos, sin = tables(101, 40)
    for n in (1, 2, 3):
        threads(n)
        check(heads(101, 4, 80, dtype=dtype), heads(101, 4, 80, dtype=dtype, seed=1), cos, sin)
        check(heads(3, 101, 4, 80, dtype=dtype), heads(3, 101, 2, 80, dtype=dtype, seed=1), cos, sin)


def _repeat(seed, times=20):
    cos, sin = tables(64, 40, seed=seed)
    q, k = heads(64, 4, 80, seed=seed), heads(64, 4, 80, seed=seed + 100)
    expected = eager(q, cos, sin), eager(k, cos, sin)
    for _ in range(times):
        outputs = rotary_qk(q, k, cos, sin, False)
        assert_same_bits(outputs[0], expected[0])
        assert_same_bits(outputs[1], expected[1])


def test_concurrent_callers(threads):
    threads(2)
    with ThreadPoolExecutor(6) as callers:
        for future in [callers.submit(_repeat, seed) for seed in range(6)]:
            future.result(timeout=60)


def test_callers_on_every_thread_of_the_pool(threads):
    """Callers that fill the pool find no thread to help them, and must not wait for one."""
    threads(2)
    pool = numba_kernels._get_pool()
    for future in [pool.submit(_repeat, seed) for seed in range(2 * (os.cpu_count() or 1) + 1)]:
        future.result(timeout=60)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child(threads):
    """The child has no thread of its parent's pool; a fork waits while another thread compiles or starts the pool."""
    threads(2)
    cos, sin = tables(64, 40)
    q, k = heads(64, 4, 80), heads(64, 4, 80, seed=1)
    expected = eager(q, cos, sin).view(torch.int16).numpy().tobytes()
    rotary_qk(q, k, cos, sin, False)  # starts the pool
    held, released = threading.Event(), threading.Event()

    def hold():
        with numba_kernels.global_compiler_lock:
            held.set()
            time.sleep(0.2)
            released.set()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            out = rotary_qk(q, k, cos, sin, False)[0]
            helped = any(t.name.startswith("vitkit-rotary") for t in threading.enumerate())
            same = out.view(torch.int16).numpy().tobytes() == expected
            status = 0 if released.is_set() and helped and same else 2
        finally:
            os._exit(status)
    holder.join()
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    _repeat(0, times=1)
