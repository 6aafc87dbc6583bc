"""What `vitkit run` accepts and refuses, before any kernel."""

import json

import pytest

pytest.importorskip("papermill")
from vitkit.lab import params

CELL = """device: str = "auto"  # where
size: str = "auto"  # one of auto, tiny, cpu, gpu
threads: int = 0
scale: float = 1.5
fast: bool = False
grids: object = None
heads: list = [1, 2]
plain = 3"""


@pytest.fixture
def folder(toy):
    toy("10_last", parameters="only_here: int = 1")
    toy("2_second", parameters=CELL)
    return toy("1_first_one", parameters=CELL).parent


def test_select(folder):
    def stems(*names):
        return [path.stem for path in params.select(names, folder)]

    assert stems() == ["1_first_one", "2_second", "10_last"]
    assert stems("second", "10", "1_first_one.ipynb", "02", "notebooks/10_last.ipynb") == [
        "2_second",
        "10_last",
        "1_first_one",
    ]


@pytest.mark.parametrize(
    "name, said",
    [
        ("3", ["'3'", "1_first_one, 2_second, 10_last"]),
        ("secnod", ["no notebook 'secnod'", "did you mean 'second'"]),
        ("_", ["fits 1_first_one and 2_second and 10_last"]),
        ("", ["no notebook ''"]),
    ],
)
def test_missing_notebook(folder, name, said):
    with pytest.raises(ValueError) as refusal:
        params.make_plan([name], [], folder)
    assert all(part in str(refusal.value) for part in said) and "\n" not in str(refusal.value)


def test_no_notebooks(tmp_path):
    with pytest.raises(ValueError, match="no notebook in"):
        params.make_plan([], [], tmp_path)


def test_values_go_only_where_they_are_known(folder):
    given = [("threads", "2"), ("only_here", "7"), ("device", "cpu"), ("scale", "2"), ("fast", "yes")]
    given += [("heads", "[3]"), ("plain", "4")]
    known = {"threads": 2, "device": "cpu", "scale": 2.0, "fast": True, "heads": [3], "plain": 4}
    assert [values for _, values in params.make_plan([], given, folder)] == [known, known, {"only_here": 7}]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("devise", "cpu", ["no parameter 'devise'", "allowed: device, fast", "did you mean 'device'"]),
        ("only_here", "1", ["no parameter 'only_here'"]),  # known, but not to the notebook asked for
        ("threads", "two", ["threads='two'", "an integer"]),
        ("threads", "1.5", ["threads='1.5'", "an integer"]),
        ("threads", "-1", ["threads=-1"]),
        ("plain", "x", ["plain='x'", "an integer"]),
        ("scale", "nan", ["scale='nan'", "finite"]),
        ("fast", "maybe", ["fast='maybe'", "true or false"]),
        ("heads", "3", ["heads='3'", "a list"]),
        ("size", "tinny", ["size='tinny'", "auto, tiny, cpu, gpu", "did you mean 'tiny'"]),
        ("device", "cuda:99", ["device='cuda:99'", "cpu"]),
        ("grids", "no_such_file.csv", ["no_such_file.csv"]),
        ("grids", "[[1, 2, 3]]", ["spatial_merge_size"]),
    ],
)
def test_refused_in_one_line(folder, name, text, said):
    with pytest.raises(ValueError) as refusal:
        params.make_plan(["2"], [(name, text)], folder)
    assert all(part in str(refusal.value) for part in said) and "\n" not in str(refusal.value)


def test_a_name_or_value_that_is_no_text_is_refused_like_any_other(folder):
    for names, given, said in (
        ([7], [], "no notebook '7'"),
        (["2"], [(5, "x")], "no parameter 5"),
    ):
        with pytest.raises(ValueError, match=said):
            params.make_plan(names, given, folder)
    for value in (5, None, ["tiny"]):
        with pytest.raises(ValueError, match="size=.*one of auto, tiny, cpu, gpu is allowed"):
            params.check_value("size", value, {"default": "auto", "help": ""})
    assert [path.stem for path in params.select([2], folder)] == ["2_second"]


def test_choices_stand_in_the_help(toy):
    path = toy("1_a", parameters='dtype: str = "bfloat16"  # one of float32, bfloat16; of q and k')
    assert params.make_plan([], [("dtype", "float32")], path.parent)[0][1] == {"dtype": "float32"}
    with pytest.raises(ValueError, match="one of float32, bfloat16 is allowed; did you mean 'float32'"):
        params.make_plan([], [("dtype", "float23")], path.parent)


def test_paths_are_taken_from_where_the_user_stands(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(json.dumps([1, 4, 6]) + "\n")
    plan = params.make_plan(["2"], [("grids", "trace.jsonl")], folder)
    assert plan[0][1] == {"grids": str(tmp_path / "trace.jsonl")}


def test_broken_notebook(tmp_path):
    (tmp_path / "1_a.ipynb").write_text("{")
    with pytest.raises(ValueError, match=r"1_a\.ipynb cannot be read as a notebook"):
        params.make_plan([], [], tmp_path)
