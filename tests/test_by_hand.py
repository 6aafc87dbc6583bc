"""One workload by hand: a small table of what was checked and timed, bad values refused by name, nothing written."""

import pandas as pd
import pytest
import torch

from vitkit import Geometry
from vitkit.lab import by_hand, cases, plan_cases, rotary_sections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID, GEOMETRY = [[1, 4, 6], [2, 8, 4]], Geometry.qwen2_5_vl()
SHAPE = {"tokens": 24, "num_heads": 2, "head_dim": 8, "dtype": "float32", "device": DEVICE}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(by_hand, "BUDGET", {"n": 3, "warmup": 1})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole(out, *impls):
    assert set(impls) <= set(out.impl) and out.correct.eq("yes").all(), out
    assert (out["median ms"] > 0).all() and (out["p20 ms"] <= out["p80 ms"]).all()
    (over,) = (name for name in out if name.startswith("over "))
    ours = out.set_index("impl")["median ms"][over.removeprefix("over ")]
    assert out[over].tolist() == pytest.approx((out["median ms"] / ours).tolist())


def test_rotary():
    whole(rotary_sections.one_workload(**SHAPE), "eager", "copy")


def test_the_image_of_so_many_tokens_has_as_many(monkeypatch):
    seen = []
    monkeypatch.setattr(by_hand, "timed", lambda case, *_: seen.append((case.grid_thw, case.n_tokens)))
    for n in (4, 8, 20, 64, 1296):
        rotary_sections.one_workload(**SHAPE | {"tokens": n})
    grids = [[1, 2, 2]], [[1, 2, 4]], [[1, 2, 10]], [[1, 8, 8]], [[1, 36, 36]]
    assert seen == list(zip(grids, (4, 8, 20, 64, 1296)))


@pytest.mark.parametrize("op", ["rot_pos_ids", "window_index", "cu_seqlens"])
def test_indices(op):
    whole(cases.one_workload(op, GRID, GEOMETRY, DEVICE), "reference", "torch", "copy")


def test_plan():
    out = plan_cases.one_workload(GRID, GEOMETRY, DEVICE)
    whole(out, "reference", "auto", "size_cache")
    assert "over auto" in out


def test_forward_and_ranks():
    pytest.importorskip("transformers")
    from vitkit.lab import forward_cases, parallel_by_hand
    from vitkit.lab.tower import make_tower

    arms = forward_cases.Arms(make_tower(GEOMETRY, DEVICE))
    whole(forward_cases.one_workload(GRID, arms), "transformers", "plan", "accelerate")
    with pytest.raises(ValueError, match=r"grid_thw=.*0 patches, but 1 to \d+ are allowed"):
        forward_cases.one_workload([], arms)
    torch.set_num_threads(2)
    out = parallel_by_hand.one_workload([[1, 8, 8], [6, 4, 4]], 3, "qwen2_5_vl", DEVICE)
    whole(out, "one_process", "frames", "whole_images")
    load = out.set_index("impl")["load"]
    assert load.one_process == 1 < load.frames < load.whole_images
    assert torch.get_num_threads() == 2  # as before
    few = parallel_by_hand.one_workload([[1, 4, 4]], 2, "qwen2_5_vl", DEVICE)  # a rank without frames
    assert few.correct.eq("yes").all() and few.set_index("impl")["load"].frames == 2


def test_shares_that_are_wrong_get_no_time(monkeypatch):
    pytest.importorskip("transformers")
    from vitkit.lab import parallel_by_hand

    monkeypatch.setattr(parallel_by_hand, "whole_images", lambda grid, *_: [[(0, 0, 1)], [(0, 0, 1)]])
    out = parallel_by_hand.one_workload([[2, 4, 4]], 2, "qwen2_5_vl", DEVICE).set_index("impl")
    assert out.correct.frames == "yes" and out.correct.whole_images.startswith("no: error ")
    assert pd.isna(out["median ms"].whole_images)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tokens": 6}, r"tokens=6: a multiple of 4 from 4 to \d+ is allowed"),
        ({"tokens": True}, "tokens=True: a multiple of 4"),
        ({"tokens": 2**40}, f"tokens={2**40}: a multiple of 4"),
        ({"head_dim": 6}, "head_dim=6: a multiple of 4 is allowed"),
        ({"num_heads": 0}, "num_heads=0: an integer of at least 1"),
        ({"dtype": "int8"}, "dtype='int8': one of float32, bfloat16, float16 is allowed"),
    ],
)
def test_a_bad_shape_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        rotary_sections.one_workload(**SHAPE | change)


def test_a_bad_grid_op_tower_or_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="op='rope': one of rot_pos_ids, .* is allowed"):
        cases.one_workload("rope", GRID, GEOMETRY, DEVICE)
    with pytest.raises(ValueError, match=r"grid_thw\[0\]=\[1, 3, 4\]: h and w must be multiples"):
        plan_cases.one_workload([[1, 3, 4]], GEOMETRY, DEVICE)
    with pytest.raises(ValueError, match=r"grid_thw=.*: 67108864 patches, but 1 to 1048576 are allowed"):
        cases.one_workload("cu_seqlens", [[1, 8192, 8192]], GEOMETRY, DEVICE)
    from vitkit.lab import parallel_by_hand

    with pytest.raises(ValueError, match="ranks=0: an integer from 1 to 16 is allowed"):
        parallel_by_hand.one_workload(GRID, 0, "qwen2_5_vl", DEVICE)
    with pytest.raises(ValueError, match="tower='clip': one of qwen2_5_vl, qwen2_vl is allowed"):
        parallel_by_hand.one_workload(GRID, 2, "clip", DEVICE)


def test_the_table_names_what_is_wrong_and_compares_with_the_fastest_of_ours():
    time = {"median_us": 2000.0, "p20_us": 1000.0, "p80_us": 3000.0}
    rows = [
        {"impl": "reference", "correct": True, "error": "", "note": "", **time, "median_us": 500.0},
        {"impl": "torch", "correct": True, "error": "", "note": "", **time},
        {"impl": "numba", "correct": False, "error": "", "note": "differs"},
        {"impl": "copy", "correct": True, "error": "OutOfMemoryError: x", "note": ""},
    ]
    out = by_hand.table(rows).set_index("impl")
    assert out["over torch"].tolist()[:2] == [0.25, 1] and out["over torch"].isna().tolist()[2:] == [True, True]
    assert out.correct.tolist() == ["yes", "yes", "no: differs", "no: OutOfMemoryError: x"]
    assert by_hand.table(rows[2:]).columns[-2] == "over ours"
