"""A disk that is full, or fails, leaves whole files: no part beside them, no half of one, and what was finished."""

import errno
import os
import subprocess
import threading

import pandas as pd
import pytest

from vitkit.lab import files, rows
from vitkit.lab.results import Run
from vitkit.lab.rows import append_lines, read_rows

ROW = {"op": "rot_pos_ids", "impl": "numba", "case": "one", "correct": True}
COLUMNS = rows.COLUMNS
LINE = ["a"] * 11 + ["{}", "1", "1", "e2e", "warm", "3", "1.5", "1.5", "1.5", "2", "4", "2", "true", "", ""]


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def fails(number=errno.ENOSPC, after=0):
    """An os.write of which the first `after` bytes go through, and then none."""
    left, write = [after], os.write

    def broken(fd, data):
        if not left[0]:
            raise OSError(number, os.strerror(number))
        n, left[0] = write(fd, data[: left[0]]), 0
        return n

    return broken


@pytest.fixture
def small(tmp_path):
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_keeps_what_was_finished(small):
    run = Run("2_rot_pos_ids", "cpu", small)
    run.add(ROW)
    run.save_table(pd.DataFrame({"x": [1]}), "summary")
    (table,) = run.figures.glob("*-summary.md")
    before, text = names(small), table.read_text()
    fill(small)
    with pytest.raises(OSError, match=r"^\S*2_rot_pos_ids\.csv: cannot be written \(No space left") as error:
        for i in range(100):  # the last block of the file has some room left
            run.add({**ROW, "note": f"{i}" * 100})
    assert error.value.errno == errno.ENOSPC and "\n" not in str(error.value)
    finished = len(read_rows(run.results))  # without a warning of a torn line
    assert finished == 1 + i and run.results.read_bytes().endswith(b"\n")
    with pytest.raises(OSError, match="2_rot_pos_ids-counts.csv: cannot be written"):
        run.count("one", "before", "uploads", 5)
    with pytest.raises(OSError, match="2_rot_pos_ids-summary.md: cannot be written"):
        run.save_table(pd.DataFrame({"x": range(2000)}), "summary")
    assert names(small) == sorted([*before, "filler"]) and table.read_text() == text
    with pytest.raises(ValueError, match="out=.*cannot write in .*No space left"):
        Run("2_rot_pos_ids", "cpu", small)
    (small / "filler").unlink()
    run.add(ROW)
    assert len(read_rows(run.results)) == finished + 1


def test_a_first_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"rows\.csv: cannot be written \(No space left on device\)"):
        append_lines(path, COLUMNS, [LINE])
    assert names(tmp_path) == []


@pytest.mark.parametrize("after", [0, 20])
def test_an_append_that_fails_takes_its_part_back(tmp_path, monkeypatch, after):
    path = tmp_path / "rows.csv"
    append_lines(path, COLUMNS, [LINE])
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fails(errno.EIO, after))
        with pytest.raises(OSError, match=r"rows\.csv: cannot be written \(Input/output error\)") as error:
            append_lines(path, COLUMNS, [LINE])
    assert path.read_bytes() == before and error.value.errno == errno.EIO
    append_lines(path, COLUMNS, [LINE])
    assert len(read_rows(path)) == 2 and names(tmp_path) == ["rows.csv"]


def test_an_interrupt_takes_no_row_that_was_written(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    append_lines(path, COLUMNS, [LINE])

    def interrupt(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            append_lines(path, COLUMNS, [LINE])
    assert len(read_rows(path)) == 2


def test_many_first_writers_make_one_header(tmp_path):
    path, gate = tmp_path / "rows.csv", threading.Barrier(4)

    def write():
        gate.wait()
        for _ in range(5):
            append_lines(path, COLUMNS, [LINE])

    threads = [threading.Thread(target=write) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert path.read_text().count("run_id") == 1 and len(read_rows(path)) == 20


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert files.create_whole(tmp_path / "x", b"1") and (tmp_path / "x").read_bytes() == b"1"
    assert not files.create_whole(tmp_path / "x", b"2") and (tmp_path / "x").read_bytes() == b"1"
    assert names(tmp_path) == ["x"]


def test_what_stood_there_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "figure.svg"
    files.write_whole(path, b"old")

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"figure\.svg: cannot be written \(Read-only file system\); what stood there"):
        files.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["figure.svg"]
