"""`vitkit tune`: where two curves cross, and a whole run on a small ladder."""

import math

import pytest
import torch

from vitkit import Geometry, VisionPlan, tuned
from vitkit.cli import main
from vitkit.lab import tune


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


@pytest.mark.parametrize(
    "times, expected",
    [
        ([(10, 1, 2), (40, 2, 1)], 20),  # as far behind as ahead: the geometric middle
        ([(10, 1, 1), (40, 2, 1)], 10),
        ([(10, 2, 1), (40, 2, 1)], 0),
        ([(10, 1, 2), (40, 1, 2)], math.inf),
        ([(10, 2, 1), (20, 1, 3), (40, 2, 1)], 31),  # 20 * 2^(ln 3 / ln 6)
        ([(10, 2, 1), (40, 1, 2)], math.inf),  # not the faster one at the end
    ],
)
def test_where_they_cross(times, expected):
    assert tune.crossover(times) == expected


def test_a_run_stores_what_auto_then_follows(folder, monkeypatch, capsys):
    ladder = [[[1, 8, 8]], [[2, 12, 8]]]
    found = tune.run(torch.device("cpu"), ladder=ladder, n=3)
    assert set(found) == set(tuned.OPS)
    out = capsys.readouterr().out
    assert all(op in out for op in found) and "tuned-cpu-" in out
    assert {op: tuned.crossover(op, torch.device("cpu")) for op in found} == {
        op: (value, "measured on this machine") for op, value in found.items()
    }
    assert VisionPlan.from_grid(ladder[0], Geometry()).chosen_by == "auto: measured on this machine"


def test_what_cannot_be_measured(folder, monkeypatch, capsys):
    assert main(["tune", "--device", "cuda:99"]) == 2 and "cuda:99" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "--threads", "-1"])
    assert "'-1'" in capsys.readouterr().err
    folder.write_text("a file")
    assert main(["tune", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vitkit tune: ") and err.count("\n") == 1
    monkeypatch.setattr(tune, "find_spec", lambda name: name != "numba")
    with pytest.raises(ValueError, match="numba is not installed"):
        tune.run(torch.device("cpu"))


def test_a_wrong_way_stores_nothing(folder, monkeypatch):
    monkeypatch.setattr(tune, "_op_tensors", lambda out: [torch.rand(3)])
    with pytest.raises(ValueError, match="rot_pos_ids by"):
        tune.run(torch.device("cpu"), ladder=[[[1, 8, 8]]], n=2)
    assert not list(folder.iterdir())
