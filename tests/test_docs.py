"""The pages in docs/: their links resolve, their commands parse, the code of extending.md runs as it stands."""

import re
import shlex

import pytest
import torch

from vitkit import indices
from vitkit.cli import COMMANDS
from vitkit.lab.results import repo_root
from vitkit.lab.rows import read_rows

ROOT = repo_root()
PAGES = sorted((ROOT / "docs").glob("*.md"))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    broken = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"python -m vitkit ([a-z]+)", text):
        assert command in COMMANDS
    for path in re.findall(r"`((?:vitkit|tests|data)/[\w./-]+)`", text):
        assert "<" in path or (ROOT / path).exists(), path


def test_readme_names_every_page():
    assert all(f"(docs/{name})" in read("README.md") for name in
               ("measuring.md", "extending.md", "upstream.md", "results.md", "cluster.md"))  # fmt: skip


def test_results_name_every_device_and_hold_no_number_of_a_row():
    page = read("docs/results.md")
    for folder in (ROOT / "data" / "results").iterdir():
        assert f"writeup --device {folder.name}\n" in page and f"(../figures/{folder.name})" in page
    assert not re.search(r"\d\s?(µs|us|ms|x|%)\b", page)


def test_writeup_commands_of_the_results_page_work(capsys):
    for line in re.findall(r"-m vitkit (writeup .*|compare .*)", read("docs/results.md")):
        command, *argv = shlex.split(line)
        assert COMMANDS[command](argv) == 0 and capsys.readouterr().out


def test_the_code_of_extending_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", read("docs/extending.md"), re.M | re.S)
    monkeypatch.setitem(indices.IMPLEMENTATIONS, "cu_seqlens", dict(indices.IMPLEMENTATIONS["cu_seqlens"]))
    threads = torch.get_num_threads()
    names = {"device": "cpu", "size": "tiny", "threads": 1, "out": str(tmp_path)}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)
    torch.set_num_threads(threads)
    from vitkit import Geometry, cu_seqlens
    from vitkit.lab import cases
    from vitkit.lab.timing import measure

    grid = [[2, 8, 8], [1, 4, 6]]
    assert cu_seqlens(grid, Geometry.qwen2_5_vl(), impl="numpy").cu_seqlens.tolist() == [0, 64, 128, 152]
    timed = measure(cases.index_case("cu_seqlens", "a", grid, Geometry(), "cpu", threads=1), "e2e", device="cpu", n=1)
    assert next(row for row in timed if row["impl"] == "numpy")["correct"]  # a notebook would time it from now on
    (csv,) = tmp_path.glob("data/results/*/9_mine.csv")
    assert set(read_rows(csv).impl) == {"torch", "numpy"}
