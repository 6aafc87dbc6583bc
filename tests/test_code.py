"""Which files of the library count for a notebook's rows."""

import json

import pytest

from vitkit.lab import code
from vitkit.lab.results import repo_root

FILES = {
    "__init__.py": "from .one import x",
    "one.py": "x = 1",
    "two.py": "y = 2",
    "ops/__init__.py": "WAYS = {'fast': '.fast'}",
    "ops/fast.py": "def f():\n    from ..two import y",
    "lab/__init__.py": "",
    "lab/used.py": "from . import helper",
    "lab/helper.py": "import pandas, vitkit.ops",
    "lab/other.py": "",
}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "vitkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "vitkit"


def names(package, *sources):
    return {path.relative_to(package).as_posix() for path in code.reached(package, sources)}


def test_what_imports_lead_to(package):
    assert names(package, "import math") == set()
    assert names(package, "import vitkit") == {"__init__.py", "one.py"}
    assert names(package, "from vitkit.lab import other") == {
        "__init__.py",
        "one.py",
        "lab/__init__.py",
        "lab/other.py",
    }
    # through a helper, a folder of ops that counts whole, and an import within a function
    assert names(package, "x = 1", "from vitkit.lab.used import z") == set(FILES) - {"lab/other.py"}


def test_the_hash_follows_what_is_reached(package):
    notebook = package.parent / "1_a.ipynb"
    cell = {"cell_type": "code", "source": ["from vitkit.lab import used"], "metadata": {}, "outputs": []}
    notebook.write_text(json.dumps({"cells": [cell]}))
    first = code.code_hash(notebook, package)
    (package / "lab" / "other.py").write_text("z = 3")
    assert code.code_hash(notebook, package) == first
    for name in set(FILES) - {"lab/other.py"}:
        path = package / name
        before = path.read_text()
        path.write_text(before + "\nz = 3")
        assert code.code_hash(notebook, package) != first, name
        path.write_text(before)
    assert code.code_hash(notebook, package) == first


@pytest.mark.parametrize("notebook", sorted((repo_root() / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_runs_counts(notebook):
    package = repo_root() / "vitkit"
    cells = json.loads(notebook.read_text())["cells"]
    found = names(package, *("".join(c["source"]) for c in cells if c["cell_type"] == "code"))
    always = {"lab/results.py", "indices/numba_kernels.py", "rotary/triton_kernels.py"}
    assert always | ({"lab/timing.py"} if notebook.stem != "0_tour" else set()) <= found
    assert "cli.py" not in found
    assert ("models/graphs.py" in found) == (notebook.stem in ("5_vit_forward", "6_encoder_data_parallel"))
    for name in ("lab/parallel_bench.py", "parallel/balance.py"):  # what its ranks run, in processes of their own
        assert (name in found) == (notebook.stem == "6_encoder_data_parallel")
