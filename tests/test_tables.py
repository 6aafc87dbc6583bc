import json

import numpy as np
import pandas as pd
import pytest

from vitkit.lab import tables
from vitkit.lab.workloads import load_workloads


def row(case, impl, median, **changed):
    base = dict(op="rot_pos_ids", impl=impl, direction="fwd", device="cpu-some", dtype="int32", case=case, clock="e2e")
    return base | dict(n=9, median_us=median, p20_us=median * 0.9, p80_us=median * 1.1, correct=True) | changed


def test_published_figures_have_every_workload():
    names = [name for name, _ in load_workloads()]
    for key, info in tables.load_published().items():
        assert info["unit"] == "ms" and info["machine"]
        assert all(len(values) == len(info["columns"]) for values in info["rows"].values())
        assert list(info["rows"]) == (names if info["key"] == "case" else ["triton_separate", "triton"]), key


def test_published_beside_this_machine():
    df = pd.DataFrame(
        [
            row("1x8x8", "numba", 9.0),
            row("1x8x8", "numba", 25.0),  # newer
            row("10x36x36", "numba", 40.0),
            row("1x36x36", "numba", 30.0, correct=False),
            row("1x8x8", "reference", 200.0),
            row("1x8x8", "numba", 999.0, op="window_index"),
            row("a photo", "numba", 50.0),
        ]
    )
    out = tables.published(df, "rot_pos_ids_cpu")
    assert list(out.columns) == [
        "case",
        "before, ms (Xeon Platinum 8372HC, published)",
        "numba, ms (Xeon Platinum 8372HC, published)",
        "numba, ms (cpu-some)",
        "reference, ms (cpu-some)",
    ]
    assert out["case"].tolist() == [name for name, _ in load_workloads()]
    np.testing.assert_allclose(out["numba, ms (cpu-some)"], [0.025, np.nan, 0.040, np.nan, np.nan])
    np.testing.assert_allclose(out.iloc[:, 1], [0.151, 0.175, 0.196, 1.584, 1.505])


def test_clocks_get_columns_of_their_own():
    df = pd.DataFrame([row("1x8x8", "triton", 30.0, clock=clock) for clock in ("host", "e2e")])
    out = tables.published(df, "rot_pos_ids_gpu")
    assert {"triton, host, ms (cpu-some)", "triton, e2e, ms (cpu-some)"} <= set(out.columns)


def test_published_without_rows_and_with_a_wrong_name():
    assert tables.published(pd.DataFrame([row("other", "numba", 1.0)]), "window_index_gpu").shape == (5, 3)
    with pytest.raises(ValueError, match="table='rotary2'.*rot_pos_ids_cpu"):
        tables.published(pd.DataFrame([row("1x8x8", "numba", 1.0)]), "rotary2")


def test_rotary_has_a_row_a_kernel():
    df = pd.DataFrame([row("B2 S16384", "triton", 84.0, op="apply_rotary_qk")])
    out = tables.published(df, "rotary").set_index("impl")
    assert out.loc["triton", "B2 S16384, ms (cpu-some)"] == pytest.approx(0.084)


def test_the_overview_compares_green_rows_of_equal_clocks():
    rows = [
        row("a", "reference", 100.0),
        row("a", "numba", 20.0),
        row("a", "torch", 10.0, correct=False),
        row("a", "copy", 1.0),
        row("b", "reference", 100.0, correct="False"),
        row("b", "numba", 20.0, correct="True"),
        row("a", "numba", 50.0, clock="host"),
    ]
    df = pd.DataFrame([{**r, "n_images": 1, "n_tokens": 64 if r["case"] == "b" else 4} for r in rows])
    assert tables.baseline(df) == "reference" and tables.baseline(df[df.impl == "numba"]) == "numba"
    out = tables.overview(df, "reference").set_index(["clock", "case"])
    first = rows[0]["clock"]
    assert out.loc[(first, "a"), "numba µs"] == 20 and out.loc[(first, "a"), "copy µs"] == 1
    assert out.loc[(first, "a"), "fastest"] == "numba" and out.loc[(first, "a"), "gain on reference"] == 5
    assert pd.isna(out.loc[(first, "b"), "gain on reference"]) and pd.isna(out.loc[("host", "a"), "gain on reference"])
    assert "torch µs" not in out and list(out["patches"]) == [4, 64, 4]


def test_markdown():
    df = pd.DataFrame(
        {
            "case": ["a|b", "c\nd"],
            "ms": [0.16349, float("nan")],
            "big": [123456.7, 1e-7],
            "n": [3, 40],
            "ok": [True, False],
        }
    )
    assert tables.markdown(df).splitlines() == [
        "| case | ms | big | n | ok |",
        "| --- | ---: | ---: | ---: | --- |",
        "| a\\|b | 0.1635 | 123457 | 3 | True |",
        "| c<br>d |  | 1e-07 | 40 | False |",
    ]
    named = pd.DataFrame({"x": [1]}, index=pd.Index(["r"], name="row"))
    assert tables.markdown(named).splitlines()[0] == "| row | x |"


def test_a_notebook_shows_every_row_and_column_in_a_box_that_scrolls():
    df = pd.DataFrame([[f"size_cache <{i}>", *range(40)] for i in range(150)], columns=["case|", *map(str, range(40))])
    shown = tables.show(df.assign(ms=0.163491))._repr_mimebundle_()
    page = shown["text/html"]
    assert page.startswith('<div style="overflow-x: auto') and page.count("<tr>") == 151 and page.count("<th") == 43
    assert page.count("<td") == 150 * 42 and page.count(">0.1635</td>") == 150
    assert 'style="text-align: left">size_<wbr>cache &lt;149&gt;</td>' in page and "<td>7</td>" in page
    assert shown["text/markdown"] == shown["text/plain"] == tables.markdown(df.assign(ms=0.163491))


def shape(D, **more):
    return json.dumps({"D": D, "threads": 1, **more})


def test_pick_looks_at_columns_and_params():
    rows = [
        row("a", "x", 1.0, params=shape(80)),
        row("a", "x", 2.0, params=shape(72), clock="host"),
        row("a", "x", 3.0, params=shape(80), direction="bwd"),
        row("a", "x", 4.0, params=shape(80, section="limit")),
    ]
    df = pd.DataFrame(rows)
    assert tables.pick(df).median_us.tolist() == [1, 2] and tables.pick(df, D=80).median_us.tolist() == [1]
    assert tables.pick(df, direction=None).median_us.tolist() == [1, 2, 3]
    assert tables.pick(df, section="limit").median_us.tolist() == [4]
    assert tables.pick(df, clock="host", D=72).median_us.tolist() == [2] and tables.pick(df, D=64).empty
    assert tables.pick(df.iloc[:0], section="limit", clock="host").empty


def test_shares_are_of_the_copy_of_the_same_case():
    rows = []
    for D, copy in ((72, 400.0), (80, 500.0)):
        params = shape(D, section="limit")
        rows.append(row("a", "copy", 1.0, gbps=copy, params=params, n_tokens=64))
        rows.append(row("a", "triton", 1.0, gbps=300.0, params=params, n_tokens=64))
        rows.append(row("a", "wrong", 1.0, gbps=300.0, params=params, n_tokens=64, correct=False))
        rows.append(row("a", "empty_launch", 1.0, gbps=float("nan"), params=params, n_tokens=64))
        rows.append(row("b", "triton", 1.0, gbps=300.0, params=params, n_tokens=64))  # without a copy
    out = tables.with_shares(pd.DataFrame(rows))
    assert out[["D", "impl", "share"]].values.tolist() == [[72, "triton", 0.75], [80, "triton", 0.6]]
    table = tables.share_table(pd.DataFrame(rows))
    assert list(table.columns) == ["D", "patches", "triton"] and table.triton.tolist() == [0.75, 0.6]
    assert tables.with_shares(pd.DataFrame(rows).iloc[:0]).empty


def test_the_overview_keeps_head_sizes_and_threads_apart():
    rows = [row("a", "x", float(D), params=shape(D), n_tokens=4, n_images=1) for D in (72, 80)]
    rows.append(row("a", "x", 5.0, params=json.dumps({"D": 80, "threads": 2}), n_tokens=4, n_images=1))
    out = tables.overview(pd.DataFrame(rows), "x")
    assert list(out.columns[:3]) == ["D", "threads", "patches"] and out["x µs"].tolist() == [72, 80, 5]
