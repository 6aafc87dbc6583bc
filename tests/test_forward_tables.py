import json

import numpy as np
import pandas as pd

from vitkit.lab import forward_tables

MS = {"transformers": 40.0, "transformers_varlen": 20.0, "plan": 16.0, "accelerate": 10.0}
CASES = {"qwen2_5_vl, 1x36x36": 4_000_000, "qwen2_vl, mine": 2_000_000}  # floating-point operations


def row(op, impl, case, ms, flop, **changed):
    params = {"flop": flop, "threads": 1} | ({"tower": case.split(",")[0], "layers": 32} if op == "accelerate" else {})
    out = dict(op=op, impl=impl, direction="fwd", device="nvidia-h200", dtype="bfloat16", case=case, clock="e2e")
    return out | dict(n=9, median_us=ms * 1000, params=json.dumps(params), correct=True, n_tokens=1296) | changed


def frame(**matmul):
    rows = [row("matmul", "matmul", "8192 x 8192 x 8192", 2.0, 1_600_000, **matmul)]  # 800 a us
    rows += [row("accelerate", impl, case, ms, flop) for case, flop in CASES.items() for impl, ms in MS.items()]
    return pd.DataFrame(rows)


def test_the_limit_of_a_forward_is_its_arithmetic_at_the_speed_of_the_product():
    out = forward_tables.with_limit(frame())
    assert set(out.op) == {"accelerate"} and len(out) == 8
    assert out.groupby("case").limit_us.unique().map(list).to_dict() == {
        "qwen2_5_vl, 1x36x36": [5000.0],
        "qwen2_vl, mine": [2500.0],
    }


def test_no_limit_without_a_green_product_in_the_same_dtype():
    for changed in ({"correct": False}, {"dtype": "float32"}, {"median_us": np.nan}):
        assert forward_tables.with_limit(frame(**changed)).limit_us.isna().all()
    assert forward_tables.gains(frame(correct=False))["times the limit"].isna().all()


def test_gains_on_both_baselines_and_times_the_limit():
    out = forward_tables.gains(frame())
    assert out.columns.tolist() == [
        *("case", "transformers ms", "transformers_varlen ms", "accelerate ms"),
        *("gain on transformers", "gain on transformers_varlen", "limit ms", "times the limit"),
    ]
    assert out.iloc[0].tolist() == ["qwen2_5_vl, 1x36x36", 40.0, 20.0, 10.0, 4.0, 2.0, 5.0, 2.0]
    assert out.iloc[1].tolist() == ["qwen2_vl, mine", 40.0, 20.0, 10.0, 4.0, 2.0, 2.5, 4.0]


def test_a_red_row_gives_no_gain():
    rows = frame()
    rows.loc[rows.impl.eq("accelerate") & rows.case.eq("qwen2_vl, mine"), "correct"] = False
    out = forward_tables.gains(rows).set_index("case")
    assert out.loc["qwen2_vl, mine", ["accelerate ms", "gain on transformers", "times the limit"]].isna().all()
    assert out.loc["qwen2_vl, mine", "transformers ms"] == 40.0 and out.loc["qwen2_vl, mine", "limit ms"] == 2.5
    without = forward_tables.gains(rows[rows.impl != "accelerate"])
    assert without["gain on transformers"].isna().all() and "accelerate ms" in without


def test_published_beside_this_machine():
    out = forward_tables.published(frame()).set_index("case")
    towers, grids = ("qwen2_5_vl", "qwen2_vl"), ("1x36x36", "10x36x36")
    assert list(out.index) == [f"{tower}, {grid}" for tower in towers for grid in grids]
    assert out.loc["qwen2_vl, 10x36x36", "after, ms (a GPU, published)"] == 481.14
    assert out.loc["qwen2_5_vl, 1x36x36", "transformers_varlen, ms (NVIDIA H200, trial code)"] == 21.9
    assert out.loc["qwen2_5_vl, 1x36x36", "accelerate, ms (nvidia-h200)"] == 10.0
    assert out["accelerate, ms (nvidia-h200)"].notna().sum() == 1


def test_a_narrow_tower_does_not_stand_beside_the_published_ones():
    rows = frame()
    rows["params"] = rows["params"].str.replace('"layers": 32', '"layers": 4')
    assert not any("nvidia-h200)" in name for name in forward_tables.published(rows))
