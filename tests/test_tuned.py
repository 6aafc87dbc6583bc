"""The crossovers: a default, a measured file, and files that are not to be believed."""

import json
import math
import warnings

import pytest
import torch

from vitkit import Geometry, VisionPlan, tuned

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def test_defaults_and_the_folder(monkeypatch, tmp_path):
    assert tuned.crossover("VisionPlan", CPU) == (math.inf, "default for cpu")
    monkeypatch.delenv("VITKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(tuned.folder()) == "/somewhere/vitkit"
    assert all(set(values) == set(tuned.OPS) for values in tuned.DEFAULTS.values())


def test_a_measured_file_decides_and_the_plan_says_so(folder):
    measured = {"rot_pos_ids": 5000, "window_index": math.inf, "cu_seqlens": 0, "VisionPlan": 100}
    path = tuned.save(CPU, measured)
    assert path.parent == folder and [p.name for p in folder.iterdir()] == [path.name]
    for op, value in measured.items():
        assert tuned.crossover(op, CPU) == (value, "measured on this machine")
    small, big = (VisionPlan.from_grid([[1, h, 8]], Geometry()) for h in (8, 16))
    assert (small.impl, big.impl) == ("numba", "torch") and small.chosen_by == "auto: measured on this machine"


def test_another_number_of_threads_is_another_measurement():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tuned.save(CPU, dict.fromkeys(tuned.OPS, 7))
        torch.set_num_threads(2)
        assert tuned.crossover("VisionPlan", CPU)[0] == math.inf
        torch.set_num_threads(1)
        assert tuned.crossover("VisionPlan", CPU)[0] == 7
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoil", ["cut", "foreign", "bytes", "negative", "text", "missing", "folder", "list", "deep"])
def test_a_file_that_is_not_to_be_believed_is_ignored_with_one_warning(spoil):
    path = tuned.save(CPU, dict.fromkeys(tuned.OPS, 7))
    content = json.loads(path.read_text())
    if spoil == "cut":
        path.write_text(path.read_text()[:-9])
    elif spoil == "deep":
        path.write_text("[" * 100_000)
    elif spoil == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif spoil == "folder":
        path.unlink()
        path.mkdir()
    else:
        changed = {
            "foreign": {"key": {**content["key"], "torch": "1.0"}},
            "negative": {"from_patches": {**content["from_patches"], "VisionPlan": -1}},
            "text": {"from_patches": {**content["from_patches"], "VisionPlan": "7"}},
            "missing": {"from_patches": {"VisionPlan": 7}},
            "list": {"from_patches": [7]},
        }[spoil]
        path.write_text(json.dumps({**content, **changed}))
    with pytest.warns(UserWarning, match="vitkit tune") as said:
        for op in tuned.OPS:
            assert tuned.crossover(op, CPU) == (math.inf, "default for cpu")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VisionPlan.from_grid([[1, 8, 8]], Geometry())


def test_without_a_home_the_defaults_hold(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VITKIT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tuned.Path, "home", nowhere)
    tuned.forget()
    assert tuned.crossover("VisionPlan", CPU) == (math.inf, "default for cpu")


def test_a_save_that_fails_leaves_nothing_behind(folder):
    tuned.file_of(CPU).mkdir()
    with pytest.raises(OSError):
        tuned.save(CPU, dict.fromkeys(tuned.OPS, 1))
    assert [path.name for path in folder.iterdir()] == [tuned.file_of(CPU).name]


def test_a_version_is_part_of_the_key(monkeypatch):
    before = tuned.file_of(CPU)
    monkeypatch.setattr(tuned, "_version", lambda name: "0")
    assert tuned.file_of(CPU) != before
