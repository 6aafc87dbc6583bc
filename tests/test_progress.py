"""Progress shows counts between items, in one place of a notebook or in few lines elsewhere."""

from types import SimpleNamespace

import pytest

from vitkit.lab import progress as module
from vitkit.lab.progress import LINES, Sized, progress


def test_few_lines_without_a_notebook_however_many_items(capsys):
    assert list(progress(range(5000))) == list(range(5000))
    lines = capsys.readouterr().out.splitlines()
    assert 10 < len(lines) <= LINES and lines[0].startswith("0 of 5000 cases, 0 s; now 0")
    assert lines[-1] == "5000 of 5000 cases, 0 s"


def test_one_output_of_a_notebook_is_updated(monkeypatch):
    ipython, display = pytest.importorskip("IPython"), pytest.importorskip("IPython.display")
    shown, clock = [], iter(range(0, 1000, 10))
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    def first(data, raw, display_id):
        shown.append(data["text/plain"])
        return handle

    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=1))
    monkeypatch.setattr(display, "display", first)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    cases = [SimpleNamespace(case="one"), ("two", [[1, 2, 2]])]
    seen = [len(shown) for _ in progress(Sized(2, iter(cases)), "grids")]
    assert shown == ["0 of 2 grids, 10 s; now one", "1 of 2 grids, 20 s; now two", "2 of 2 grids, 30 s"]
    assert seen == [1, 2]  # nothing is shown while an item is worked on
    shown.clear()
    list(progress(iter("a")))
    assert shown[0].startswith("0 cases,") and shown[1].startswith("1 cases,")


def test_no_items_say_why(capsys):
    assert list(progress([], skipped="needs a GPU: skipped on a CPU")) == []
    assert capsys.readouterr().out == "needs a GPU: skipped on a CPU\n"


def test_items_are_made_when_they_are_asked_for():
    made = []
    for i in progress(Sized(3, (made.append(i) or i for i in range(3)))):
        assert made == list(range(i + 1))
