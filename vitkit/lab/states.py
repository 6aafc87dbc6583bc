"""The folders runs/<utc>/ of batches, and the state.json in each that says what was asked for and what has finished."""

import fcntl
import json
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from vitkit.lab.files import write_whole
from vitkit.lab.params import one_line


class Stopped(Exception):
    """The batch cannot go on; the message is one line."""


def new_run(runs: Path, jobs) -> tuple[Path, dict]:
    """A new folder runs/<utc> and its state; ValueError if it cannot be written. jobs: of `batch.make_jobs`."""
    stamp = utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for again in range(2, 100):
        try:
            (runs / utc).mkdir()
            break
        except FileExistsError:
            utc = f"{stamp}-{again}"
        except OSError as error:
            raise ValueError(f"cannot write in {runs}: {error.strerror}") from None
    state = {"utc": utc, "status": "running", "running": None, "planned": [job.key for job in jobs]}
    state |= {"finished": {}, "failed": {}, "parameters": {job.key: job.values for job in jobs}}
    state["notebooks"] = {job.key: job.path.stem for job in jobs}
    try:
        note(runs / utc, state)
    except Stopped as error:
        raise ValueError(error) from None
    return runs / utc, state


def load(runs: Path, utc: str = "") -> tuple[Path, dict]:
    """Folder and state of the batch `utc`, "" is the newest one that has not finished; ValueError if there is none."""
    if utc:
        path = runs / utc / "state.json"
        known = sorted(other.parent.name for other in runs.glob("*/state.json"))
        if utc not in known:
            raise ValueError(f"no run {utc!r} in {runs.name}/; there are: {', '.join(known[-5:]) or 'none'}")
        try:
            return path.parent, json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(error)}") from None
    for path in _by_time(runs)[::-1]:
        try:
            state = json.loads(path.read_text())
        except ValueError:
            continue
        if state["status"] != "finished":
            return path.parent, state
    raise ValueError(f"no run in {runs.name}/ has anything missing")


def note(folder: Path, state: dict, **changes) -> None:
    """Writes state.json so that a reader, or a crash, never meets half of it; Stopped if the disk refuses."""
    state.update(changes)
    try:
        write_whole(folder / "state.json", json.dumps(state, indent=1).encode())
    except OSError as error:
        raise Stopped(error) from None


@contextmanager
def lock(folder: Path):
    """Makes runs/ and takes its lock: True, or False where another batch holds it. ValueError: it cannot be written.

    The system drops the lock when this process ends, however it ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"cannot write in {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def say_what_came_before(runs: Path) -> None:
    paths = _by_time(runs)
    try:
        state = json.loads(paths[-1].read_text()) if paths else {"status": "finished"}
    except ValueError:
        return
    if state["status"] == "finished":
        return
    what = f"was interrupted{at(state)}"
    if state["status"] == "failed":
        what = f"failed at {', '.join(state['failed'])}"
    print(f"the previous run ({state['utc']}) {what}; {finished(state)}", flush=True)
    print(f"  python -m vitkit run --resume {state['utc']} runs what is missing of it", flush=True)


def at(state: dict) -> str:
    return f" at {state['running']}" if state["running"] else ""


def finished(state: dict) -> str:
    done = [
        f"{name} ({what['rows']} rows in {what['csv']})" if what["rows"] else name
        for name, what in state["finished"].items()
    ]
    return f"finished: {', '.join(done) or 'none'}"


def _by_time(runs: Path) -> list[Path]:
    return sorted(runs.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
