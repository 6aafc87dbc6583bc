"""Puts what a run wrote on another machine where a run on this one would have put it, by device.

A CSV gets the rows of the runs that it does not hold yet, written beside it and renamed: a reader, or a crash, meets
the old file or the new one, and what arrives twice counts once.
"""

import fcntl
import io
import os
import time
import zipfile
from pathlib import Path


def bring_home(packed: bytes, notebook: str, out: Path, executed: Path) -> tuple[Path, list[dict], list[Path]]:
    """(the notebook's CSV, its rows of this run, all files) of a zip with out/ and executed.ipynb.

    out: the folder of data/ and figures/ here. executed: where the executed notebook goes. OSError where a file cannot
    be written, ValueError where a CSV here has another layout.
    """
    from vitkit.lab.rows import newest, read_rows

    archive = zipfile.ZipFile(io.BytesIO(packed))
    files = {Path(name): archive.read(name) for name in archive.namelist()}
    if Path("executed.ipynb") in files:
        write(executed, files.pop(Path("executed.ipynb")))
    csv, rows, drawn, written = out / "data" / "results" / f"{notebook}.csv", [], True, []
    for path, content in sorted(files.items(), key=lambda file: file[0].parts[1] == "figures"):  # these last
        path = out / path.relative_to("out")
        if path.suffix == ".csv":
            if not content:  # a full disk over there
                continue
            ids = add_runs(path, content)
            if path.stem == notebook:
                df = read_rows(path)
                csv, rows, drawn = path, df[df.run_id.isin(ids)].to_dict("records"), set(newest(df).run_id) <= ids
        elif path.is_relative_to(out / "figures") and not drawn:
            continue  # those here are of a newer run
        elif not (path.is_relative_to(out / "data" / "env") and path.exists()):
            write(path, content)
        written.append(path)
    return csv, rows, written


def add_runs(path: Path, incoming: bytes) -> set[str]:
    """Adds the rows of the runs that `path` lacks; returns the ids of all incoming ones."""
    header, *lines = incoming.decode().split("\n")[:-1]  # what follows the last line break was being written
    ids = {line.partition(",")[0] for line in lines}
    if not path.exists():
        write(path, "\n".join([header, *lines, ""]).encode())
        return ids
    with _locked(path) as file:
        before = file.read()
        if before and before.split(b"\n")[0].decode(errors="replace") != header:
            raise ValueError(f"{path}: another layout than the rows that came for it; move the file away")
        if before and not before.endswith(b"\n"):
            before += b"\n"  # a crash tore that line: leave it alone
        known = {line.partition(b",")[0].decode(errors="replace") for line in before.split(b"\n")}
        new = [line for line in lines if line.partition(",")[0] not in known]
        write(path, before + "\n".join([*([] if before else [header]), *new, ""]).encode())
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(0.1)  # a run on this machine may have waited to append to the file that is now the old one
        fcntl.flock(file, fcntl.LOCK_EX)
        late = file.read()
    if late:
        with _locked(path) as file:
            write(path, file.read() + late)
    return ids


def write(path: Path, content: bytes) -> None:
    """The whole file or none of it: beside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _locked(path: Path):
    """The file at `path`, open and locked as `rows.append_lines` locks it, and still the one of that name."""
    while True:
        file = open(path, "rb")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
        file.close()
