"""Puts what a run wrote on another machine where a run on this one would have put it, by device.

A CSV gets the rows of the runs that it does not hold yet, so that what arrives twice counts once.
"""

import csv
import io
import zipfile
from pathlib import Path

from vitkit.lab.files import write_whole


def bring_home(packed: bytes, notebook: str, out: Path, executed: Path) -> tuple[Path, list[dict], list[Path]]:
    """(the notebook's CSV, its rows of this run, all files) of a zip with out/ and executed.ipynb.

    out: the folder of data/ and figures/ here. executed: where the executed notebook goes. OSError where a file cannot
    be written, ValueError where a CSV here has another layout.
    """
    from vitkit.lab.rows import newest, read_rows

    archive = zipfile.ZipFile(io.BytesIO(packed))
    files = {Path(name): archive.read(name) for name in archive.namelist()}
    if Path("executed.ipynb") in files:
        write_whole(executed, files.pop(Path("executed.ipynb")))
    table, rows, drawn, written = out / "data" / "results" / f"{notebook}.csv", [], True, []
    for path, content in sorted(files.items(), key=lambda file: file[0].parts[1] == "figures"):  # these last
        path = out / path.relative_to("out")
        if path.suffix == ".csv":
            if b"\n" not in content:  # a full disk over there
                continue
            ids = add_runs(path, content)
            if path.stem == notebook:
                df = read_rows(path)
                table, rows, drawn = path, df[df.run_id.isin(ids)].to_dict("records"), set(newest(df).run_id) <= ids
        elif path.is_relative_to(out / "figures") and not drawn:
            continue  # those here are of a newer run
        elif not (path.is_relative_to(out / "data" / "env") and path.exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        written.append(path)
    return table, rows, written


def add_runs(path: Path, incoming: bytes) -> set[str]:
    """Appends the rows of the runs that `path` lacks, as a run here would; returns the ids of all incoming ones."""
    from vitkit.lab.rows import append_lines, check_header

    whole = incoming[: incoming.rfind(b"\n") + 1].decode()  # what follows the last line break was being written
    columns, *rows = csv.reader(io.StringIO(whole))
    check_header(path, columns)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    known = {line.partition(b",")[0].decode(errors="replace") for line in lines}
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, columns, [row for row in rows if row[0] not in known])
    return {row[0] for row in rows}
