"""compare: rows are matched by all that tells them apart, and noise is called noise."""

import pandas as pd
import pytest
from results_files import add_counts, add_rows

from vitkit.cli import main
from vitkit.lab import compare, results, runs

NEW = {"run_id": "r2", "utc": "2026-02-01T00:00:00Z"}


@pytest.mark.parametrize(
    "spans, said",
    [
        (((9, 11), (9, 11)), compare.NOISE),
        (((9, 11), (11, 13)), compare.NOISE),  # they touch
        (((9, 11), (11.1, 13)), compare.SLOWER),
        (((9, 11), (7, 8.9)), compare.FASTER),
        (((9, 11), (1, 99)), compare.NOISE),  # a noisy run proves nothing
    ],
)
def test_change(tmp_path, spans, said):
    for (low, high), more in zip(spans, ({}, NEW)):
        add_rows(tmp_path, [{"median_us": (low + high) / 2, "p20_us": low, "p80_us": high}], **more)
    table, alone = match(tmp_path, "r1", "r2")
    assert table["change"].tolist() == [said] and not len(alone)
    assert table["ratio"][0] == pytest.approx(sum(spans[1]) / sum(spans[0]))
    text = compare.write("r1", "r2", root=tmp_path)
    rows = text.split("## Rows that changed by more than the noise")[1].split("##")[0]
    assert ("None." in rows) == (said == compare.NOISE)
    assert compare.NOISE in compare.write("r1", "r2", root=tmp_path, every=True)


def match(root, first, second):
    there = runs.finished(root)
    return compare.match(*(compare._rows(compare.pick(there, name)) for name in (first, second)))


def test_rows_are_matched_by_all_that_tells_them_apart(tmp_path):
    add_rows(tmp_path, [{"median_us": 10.0}])
    others = [{"impl": "numba"}, {"clock": "host"}, {"case": "other"}, {"params": {"threads": 2}}, {"direction": "bwd"}]
    others += [{"dtype": "int64"}, {"cache": "cold"}, {"op": "cu_seqlens"}, {"grid_thw": [[1, 8, 10]]}]
    add_rows(tmp_path, [{"median_us": 99.0, **other} for other in others] + [{"median_us": 20.0}], **NEW)
    table, alone = match(tmp_path, "r1", "r2")
    assert table["ratio"].tolist() == [2.0] and table["change"].tolist() == [compare.SLOWER]
    assert len(alone) == len(others) and set(alone["side"]) == {"second"}
    text = compare.write("r1", "r2", root=tmp_path)
    assert "| only 2_toy r2 | 2_toy | rot_pos_ids | triton |" in text


def test_red_rows_are_named_and_have_no_ratio(tmp_path):
    red = {"correct": False, "note": "another value", "case": "red"}
    add_rows(tmp_path, [{"median_us": 10.0, "case": "red"}, {"median_us": 10.0}])
    add_rows(tmp_path, [red, {"median_us": 10.0}], **NEW)
    table, _ = match(tmp_path, "r1", "r2")
    assert table["change"].tolist() == [compare.FAILED, compare.NOISE] and pd.isna(table["ratio"][0])
    text = compare.write("r1", "r2", root=tmp_path)
    assert "- second, nvidia-toy, 2_toy (rot_pos_ids, triton, fwd, int32, red, e2e): another value" in text
    summed = compare.summary(table).iloc[0]
    assert (summed["rows"], summed[compare.NOISE], summed[compare.FAILED]) == (2, 1, 1)


def test_devices_stand_for_their_newest_runs(tmp_path):
    add_rows(tmp_path, [{"median_us": 77.0}], device="cpu-toy", run_id="c1")
    add_rows(tmp_path, [{"median_us": 40.0}], device="cpu-toy", run_id="c2", utc="2026-03-01T00:00:00Z")
    add_rows(tmp_path, [{"median_us": 10.0}])
    add_counts(tmp_path, [("a", "v", "copies", 3), ("a", "v", "error", 0.5), ("a", "v", "waits", 0)])
    counts = [("a", "v", "copies", 4), ("a", "v", "error", 0.501), ("a", "v", "waits", 0)]
    add_counts(tmp_path, counts, device="cpu-toy", run_id="c2", utc="2026-03-01T00:00:00Z")
    text = compare.write("cpu-toy", "nvidia-toy", root=tmp_path)
    assert (
        text.startswith("# nvidia-toy against cpu-toy\n") and "| 40 (39.2 to 40.8) | 10 (9.8 to 10.2) | 0.25 |" in text
    )
    assert "| 2_toy | a | v | copies | 4 | 3 |" in text and "| error |" not in text and "| waits |" not in text


def test_a_run_with_itself_is_within_the_noise():
    device = runs.finished(results.repo_root())[-1].device
    table, alone = match(results.repo_root(), device, device)
    assert len(table) and set(table["change"]) <= {compare.NOISE, compare.FAILED} and not len(alone)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["r1", "r9"], "run='r9': a device (nvidia-toy) or the id of a run is allowed: r1 (2_toy, nvidia-toy)"),
        (["r1", "r3"], "have no row in common"),
        (["r1"], "the following arguments are required"),
    ],
)
def test_refusals(tmp_path, capsys, argv, said):
    add_rows(tmp_path, [{"median_us": 10.0}])
    add_rows(tmp_path, [{"median_us": 10.0}], run_id="r3", notebook="3_toy")
    try:
        status = main(["compare", "--root", str(tmp_path), *argv])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and err.startswith("vitkit compare: ") and said in err and err.count("\n") == 1 and not out
