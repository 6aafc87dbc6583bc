"""From positions: the same bits as from the rows of cos and sin that the positions stand for."""

import numpy
import pytest
import torch
from test_rotary import DEVICE, DTYPES, GPU, randn

import vitkit
from vitkit import (
    Geometry,
    apply_rotary_qk,
    apply_rotary_qk_from_pos,
    apply_rotary_qkv_,
    apply_rotary_qkv_from_pos_,
    rot_pos_ids,
    rotary_cos_sin,
    rotary_table,
)
from vitkit.rotary import FROM_POS

IMPLS = [i for i in FROM_POS if not (GPU and i == "numba")]


def positions(S, dtype=torch.int32, high=40):
    return torch.randint(0, high, (S, 2), device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [4, 8, 64, 72, 80, 96, 128])
def test_bits_of_the_rows(impl, dtype, D):
    S = 300 if GPU else 21
    geometry = Geometry(head_dim=D)
    pos, table = positions(S), rotary_table(geometry, 39, DEVICE)
    qkv = randn(S, 3, 3, D, dtype=dtype)
    q, k = qkv[:, 0], qkv[:, 1]
    rows = apply_rotary_qk(q, k, *rotary_cos_sin(pos, geometry), impl=impl)
    outs = apply_rotary_qk_from_pos(q, k, pos, table, max_position=39, impl=impl)
    for out, row in zip(outs, rows):
        assert out.is_contiguous() and torch.equal(out, row)
    v = qkv[:, 2].clone()
    assert apply_rotary_qkv_from_pos_(qkv, pos, table, impl=impl) is qkv
    assert torch.equal(q, rows[0]) and torch.equal(k, rows[1]) and torch.equal(qkv[:, 2], v)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ids", [torch.int64, torch.int16, torch.uint8], ids=str)
def test_any_integers_and_strides_batches_and_other_heads(impl, ids):
    geometry, B, S = Geometry(), 2, 7
    q, k = randn(B, S, 2, 80), randn(B, S, 3, 80)
    pos = torch.stack([positions(S, ids)[:, 0]] * 3 + [positions(S, ids)[:, 1]], dim=1)[:, ::3]  # strides (4, 3)
    table = torch.stack([rotary_table(geometry, 40, DEVICE)] * 2, dim=-1)[..., 1]  # last axis not contiguous
    rows = apply_rotary_qk(q, k, *rotary_cos_sin(pos, geometry), impl=impl)
    outs = apply_rotary_qk_from_pos(q, k, pos, table, impl=impl)
    assert all(map(torch.equal, outs, rows))


@pytest.mark.parametrize("impl", IMPLS)
def test_positions_beyond_the_table_are_clamped(impl):
    q, table = randn(4, 2, 80), rotary_table(Geometry(), 9, DEVICE)
    beyond = torch.tensor([[-1, 10], [2**31 - 1, -(2**31)], [3, 4], [9, 0]], dtype=torch.int32, device=DEVICE)
    outs = apply_rotary_qk_from_pos(q, q.clone(), beyond, table, impl=impl)
    kept = apply_rotary_qk_from_pos(q, q.clone(), beyond.clamp(0, 9), table, impl=impl)
    assert all(map(torch.equal, outs, kept))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("D", [4, 8])
def test_positions_column_by_column(impl, D):
    pos, q, geometry = positions(6).t().contiguous().t(), randn(6, 2, D), Geometry(head_dim=D)
    outs = apply_rotary_qk_from_pos(q, q, pos, rotary_table(geometry, 40, DEVICE), impl=impl)
    rows = apply_rotary_qk(q, q, *rotary_cos_sin(pos, geometry), impl=impl)
    assert all(map(torch.equal, outs, rows))


def test_the_table_is_exact_and_of_the_model_alone():
    geometry = Geometry.qwen3_vl()
    table = rotary_table(geometry, 8191)
    assert table.shape == (2, 8192, 18) and table.dtype == torch.float32 and table.is_contiguous()
    f = geometry.rope_theta ** -(torch.arange(18, dtype=torch.float64) / 18)
    angles = torch.arange(8192, dtype=torch.float64)[:, None] * f
    assert (table[0] - angles.cos()).abs().max() < 1e-6 and (table[1] - angles.sin()).abs().max() < 1e-6
    ids = rot_pos_ids([[1, 8, 12]], geometry)
    cos, sin = rotary_cos_sin(ids, geometry)
    assert torch.equal(table[0][ids.long()].flatten(1), cos) and torch.equal(table[1][ids.long()].flatten(1), sin)


@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "3"])
def test_a_table_needs_a_last_position(bad):
    with pytest.raises(ValueError, match="max_position="):
        rotary_table(Geometry(), bad)
    with pytest.raises(ValueError, match="geometry="):
        rotary_table(80, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_ids": torch.zeros(5, 2)}, "pos_ids=torch.float32"),
        ({"pos_ids": torch.zeros(5, 3, dtype=torch.int32)}, r"pos_ids.shape=\(5, 3\): \(5, 2\)"),
        ({"pos_ids": torch.zeros(4, 2, dtype=torch.int32)}, r"pos_ids.shape=\(4, 2\): \(5, 2\)"),
        ({"pos_ids": None}, "pos_ids=None"),
        ({"pos_ids": torch.zeros(5, 2, dtype=torch.int32, device="meta")}, "pos_ids lies on meta"),
        ({"table": torch.zeros(2, 9, 20, dtype=torch.float64)}, "table=torch.float64"),
        ({"table": torch.zeros(2, 9, 40)}, r"table.shape=\(2, 9, 40\): \(2, positions, 20\)"),
        ({"table": torch.zeros(2, 0, 20)}, r"table.shape=\(2, 0, 20\)"),
        ({"table": [0]}, "table="),
        ({"max_position": 9}, "max_position=9: 0 to 8, the table's last"),
        ({"max_position": -1}, "max_position=-1"),
        ({"max_position": numpy.int64(9)}, "max_position=9: 0 to 8"),
        ({"max_position": True}, "max_position=True"),
        ({"max_position": 3.0}, "max_position=3.0"),
        ({"q": torch.ones(5, 2, 82), "k": torch.ones(5, 2, 82)}, "multiple of 4"),
        ({"impl": "triton_separate"}, "impl='triton_separate': 'eager', 'triton', 'numba', 'auto'"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, message):
    arguments = {
        "q": torch.ones(5, 2, 80),
        "k": torch.ones(5, 2, 80),
        "pos_ids": torch.zeros(5, 2, dtype=torch.int32),
        "table": torch.zeros(2, 9, 20),
        "inplace": True,
    }
    with pytest.raises(ValueError, match=message):
        apply_rotary_qk_from_pos(**{**arguments, **change})
    assert (arguments["q"] == 1).all() and (arguments["k"] == 1).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_do(impl):
    table = rotary_table(Geometry(), 3, DEVICE)
    q, k = apply_rotary_qk_from_pos(randn(0, 2, 80), randn(0, 3, 80), positions(0), table, impl=impl)
    assert q.shape == (0, 2, 80) and k.shape == (0, 3, 80)
    q, k = apply_rotary_qk_from_pos(randn(4, 0, 80), randn(4, 3, 80), positions(4), table, impl=impl)
    assert q.shape == (4, 0, 80) and k.shape == (4, 3, 80) and k.isfinite().all()


def test_the_names_are_public():
    for name in ("apply_rotary_qk_from_pos", "apply_rotary_qkv_from_pos_", "rotary_table"):
        assert name in vitkit.__all__ and callable(getattr(vitkit, name))


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu():
    S, geometry = 600_000, Geometry()  # 600,000 * 3 * 16 * 80 entries, above 2^31
    qkv = torch.randn(S, 3, 16, 80, device="cuda", dtype=torch.bfloat16)
    pos, table = positions(S), rotary_table(geometry, 39, "cuda")
    rows = slice(S - 1000, S)
    expected = apply_rotary_qk(qkv[rows, 0], qkv[rows, 1], *rotary_cos_sin(pos[rows], geometry), impl="triton")
    v = qkv[rows, 2].clone()
    apply_rotary_qkv_from_pos_(qkv, pos, table)
    assert torch.equal(qkv[rows, 0], expected[0]) and torch.equal(qkv[rows, 1], expected[1])
    assert torch.equal(qkv[rows, 2], v)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 72, 80, 96, 128])
def test_more_rows_than_a_grid_axis_of_blocks_of_eight(D):
    S, geometry = 530_000, Geometry(num_heads=2, head_dim=D)
    qkv = torch.randn(S, 3, 2, D, device="cuda", dtype=torch.bfloat16)
    pos, table = positions(S), rotary_table(geometry, 39, "cuda")
    cos, sin = rotary_cos_sin(pos, geometry)
    expected = apply_rotary_qk(qkv[:, 0], qkv[:, 1], cos, sin, impl="eager")
    for out in (
        apply_rotary_qk(qkv[:, 0], qkv[:, 1], cos, sin),
        apply_rotary_qk_from_pos(qkv[:, 0], qkv[:, 1], pos, table),
        apply_rotary_qkv_(qkv.clone(), cos, sin)[:, :2].unbind(1),
        apply_rotary_qkv_from_pos_(qkv.clone(), pos, table)[:, :2].unbind(1),
    ):
        for x, right in zip(out, expected):  # fused multiply-add against two roundings: one step of bf16 at most
            assert ((x.float() - right.float()).abs() <= right.float().abs() * 2**-7 + 1e-3).all()
