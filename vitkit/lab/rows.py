"""The CSV files of results and counts: their columns, reading, and appending row by row.

A row is one line (line breaks in a cell become spaces): a line torn by a crash can be told from a whole one and spoils
no other.
"""

import csv
import fcntl
import io
import json
import os
import re
import warnings
from pathlib import Path

import pandas as pd

from vitkit.lab.files import cannot_write, create_whole

STAMP = ["run_id", "utc", "env_id", "code_hash", "device"]  # filled in by Run
COLUMNS = [
    *("run_id", "utc", "env_id", "code_hash", "op", "impl", "direction", "device", "dtype", "case", "grid_thw"),
    *("params", "n_images", "n_tokens", "clock", "cache", "n", "median_us", "p20_us", "p80_us", "first_call_us"),
    *("bytes", "gbps", "correct", "error", "note"),
]
COUNT_COLUMNS = [*STAMP, "case", "version", "metric", "value", "unit"]
INTEGERS = ["n_images", "n_tokens", "n", "bytes"]
FLOATS = ["median_us", "p20_us", "p80_us", "first_call_us", "gbps", "value"]
NUMBERS = {*INTEGERS, *FLOATS}


def read_rows(path) -> pd.DataFrame:
    """A results or counts file as a DataFrame. Blank is "" in text, NaN in times, <NA> in counts and in `correct`.

    Torn lines are left out with a warning; a file of another layout is a ValueError.
    """
    path = Path(path)
    lines = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n")
    columns = lines[0].split(",")
    if columns not in (COLUMNS, COUNT_COLUMNS) or len(lines) < 2:
        raise ValueError(f"{path}: its first line is not the header of results or counts: {lines[0][:80]!r}")
    tail, rows, torn = lines.pop(), [], []
    for number, line in enumerate(lines[1:], 2):
        try:  # each line by itself: a quote left open in one must not swallow the next
            cells = next(csv.reader([line], strict=True), [])
        except csv.Error:
            cells = []
        rows.append(cells) if _whole(cells, columns) else torn.append(number)
    if tail:  # what follows the last line break was being written when something stopped it
        torn.append(len(lines) + 1)
    if torn:
        warnings.warn(f"{path}: left out torn lines {torn}", stacklevel=2)
    return typed(pd.DataFrame(rows, columns=columns, dtype=object))


def _whole(cells, columns) -> bool:
    """Whether the cells are a row: as many as there are columns, numbers where numbers belong, no second header."""
    if len(cells) != len(columns) or cells == columns:
        return False
    try:
        return all(float(cell) is not None for name, cell in zip(columns, cells) if name in NUMBERS and cell)
    except ValueError:
        return False


def newest(df: pd.DataFrame) -> pd.DataFrame:
    """The rows of the newest run in `df`: by utc, then by run_id."""
    if df.empty:
        return df
    return df[df.run_id == max(zip(df.utc, df.run_id))[1]].reset_index(drop=True)


def typed(df):
    for name in df.columns:
        blank = df[name].eq("")
        if name in INTEGERS:
            df[name] = pd.to_numeric(df[name].mask(blank)).astype("Int64")
        elif name in FLOATS:
            df[name] = pd.to_numeric(df[name].mask(blank)).astype("float64")
        elif name == "correct":
            df[name] = df[name].map({"true": True, "false": False}).astype("boolean")
        else:
            df[name] = df[name].astype(str)
    return df


def as_text(name, value) -> str:
    """A value as the text of one cell: JSON for lists and dicts, true and false, blank for None and NaN."""
    if hasattr(value, "tolist"):  # a numpy number or array, a tensor
        value = value.tolist()
    if name in ("grid_thw", "params") and value is not None and not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"))
    if pd.isna(value):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return re.sub(r"[\r\n]+", " ", str(value))


def append_lines(path, columns, rows):
    """Appends `rows` in one write, and waits for the disk; a new file is written beside, with its header, and renamed.

    OSError of one line that names the file, where the disk is full, say: the file is then as it was, or still absent.
    """
    path = Path(path)
    if not path.exists() and create_whole(path, _csv([columns, *rows])):
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # two runs at once: no row within another
        size = os.fstat(fd).st_size
        data = _csv(rows if size else [columns, *rows])
        if size:
            os.lseek(fd, size - 1, os.SEEK_SET)
            if os.read(fd, 1) != b"\n":  # a crash tore the last line: leave it alone and begin a new one
                data = b"\n" + data
        _append(fd, size, data)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        os.close(fd)


def _append(fd, size, data):
    """All of `data` behind the `size` bytes that are there, or after an error nothing; an interrupt takes no row."""
    try:
        rest = data
        while rest:  # on a disk that is nearly full a part is written, and the next call says why
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except BaseException as error:
        if isinstance(error, OSError) or os.fstat(fd).st_size != size + len(data):
            os.ftruncate(fd, size)
        raise


def _csv(rows) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def check_header(path, columns):
    if path.exists() and path.stat().st_size:
        with open(path, encoding="utf-8", errors="replace") as file:
            header = file.readline()
        if header != ",".join(columns) + "\n":
            raise ValueError(
                f"{path}: its header is {header.strip()[:60]!r}..., another layout than this version writes "
                f"({','.join(columns[:4])},...); move the file away"
            )
