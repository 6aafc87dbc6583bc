"""The Makefile, without an install: what it would do, and what it refuses."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder, *args):
    return subprocess.run(["make", "--no-print-directory", *args], cwd=folder, capture_output=True, text=True)


def script(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def test_refuses_an_old_python(checkout):
    """A stand-in for an old interpreter: it runs the check as Python 3.9 would."""
    old = script(
        checkout / "old", "exec python3 -c \"import sys; sys.version_info = (3, 9); sys.version = '3.9.1'; $2\""
    )
    result = make(checkout, "run", f"PYTHON={old}")
    assert result.returncode != 0 and not (checkout / ".venv").exists()
    assert (
        result.stderr.splitlines()[0]
        == f"{old} is Python 3.9.1, but vitkit needs 3.11 or later: make PYTHON=/path/to/python3"
    )


def test_installs_once_and_again_when_interrupted_or_changed(checkout):
    """A stand-in for the venv's interpreter writes down its calls and can fail as an interrupted pip does."""
    log = checkout / "log"
    python = checkout / ".venv" / "bin" / "python"
    body = ['[ "$3" = --version ] && exit 0', f'echo "$*" >> {log}']
    script(python, *body, '[ "$2" = pip ] && exit 1', "exit 0")
    assert make(checkout, "run").returncode != 0  # pip failed: no stamp
    script(python, *body)
    assert make(checkout, "run", "ARGS=2 -p device cpu").returncode == 0
    assert make(checkout, "test").returncode == 0
    later = time.time() + 5  # a touch may fall into the tick of the clock in which the stamp was made
    os.utime(checkout / "requirements.txt", (later, later))
    assert make(checkout, "install").returncode == 0
    calls = log.read_text().splitlines()
    install = "-m pip install --disable-pip-version-check -r requirements.txt"
    assert calls == [install, install, "-m vitkit run 2 -p device cpu", "-m pytest", install]


def test_clean_keeps_results(checkout):
    kept = ["data/results/cpu-x/1_a.csv", "data/images/mine.jpg", ".venv/bin/python", "figures/cpu-x/1.svg"]
    for name in [*kept, "runs/x/state.json", "vitkit/__pycache__/a.pyc", "tests/__pycache__/a.pyc"]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert make(checkout, "clean").returncode == 0
    assert all((checkout / name).exists() for name in kept)
    assert not (checkout / "runs").exists() and not list(checkout.rglob("__pycache__"))
