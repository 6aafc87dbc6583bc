"""Executes a batch, one notebook after another or on a Dask cluster, and keeps on disk what has finished.

Executed notebooks and `state.json` lie in runs/<utc>/; the rows, environments and figures lie where the notebooks
write them, each row on the disk as soon as it is measured. Standard output tells what goes on; whatever went wrong is
one line on stderr at the end.
"""

import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from vitkit.lab import execute, states
from vitkit.lab.batch import Job, describe
from vitkit.lab.execute import Target

INTERRUPTED = 130


def run(jobs: list[Job], root: Path, *, stop: bool = False, scheduler: str = "", earlier=None) -> int:
    """Executes `jobs` and returns the exit status.

    0: all finished; 1: one failed, and the others ran all the same, or with `stop` were left; 130: interrupted.
    scheduler: address of a Dask scheduler whose workers execute them. earlier: (folder, state) of the batch that is
    gone on with, as `states.load` returns it. ValueError, before anything runs, if that one is still going on, if runs/
    cannot be written or if the scheduler does not answer.
    """
    folder = Path(root) / "runs"
    with states.lock(folder) as alone, _signals_as_interrupt():
        if earlier and not alone:
            raise ValueError("another run is going on here: wait for its end")
        if not alone:
            print("another run is going on here: the two will disturb each other's timings", flush=True)
        elif not earlier:
            states.say_what_came_before(folder)
        if scheduler:
            from vitkit.lab import cluster

            cluster.check_jobs(jobs)
            way = cluster.connect(scheduler)
        else:
            way = _one_after_another
        batch = Batch(jobs, Path(root), *(earlier or states.new_run(folder, jobs)))
        try:
            batch.note(status="running", running=None)
            way(batch, stop)
            batch.note(running=None, status="finished" if batch.complete() else "failed")
            batch.report()
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # what is left takes no time; restored on the way out
            execute.kill_kernels()
            batch.leave(f"interrupted{states.at(batch.state)}")
            return INTERRUPTED
        except states.Stopped as error:
            batch.leave(f"stopped: {error}")
        return 0 if batch.complete() else 1


class Batch:
    """A batch under way: its jobs, its folder runs/<utc>, and the state that is noted there at every step."""

    def __init__(self, jobs: list[Job], root: Path, folder: Path, state: dict):
        self.jobs, self.root, self.folder, self.state = jobs, root, folder, state
        self.done, self.started = [], {}  # done: (notebook, its rows, files written)

    def begin(self, job: Job) -> None:
        number = [other.key for other in self.jobs].index(job.key) + 1
        print(f"[{number}/{len(self.jobs)}] {job.key}  {describe(job.values)}", flush=True)
        self.started[job.key] = time.monotonic()
        self.state["failed"].pop(job.key, None)  # of an earlier try
        self.note(running=", ".join(self.started))

    def finish(self, job: Job, csv: Path, rows: list[dict], written: list[Path]) -> None:
        self.done.append((job.path.stem, rows, written))
        ids = sorted({row["run_id"] for row in rows})
        self._end(job, "finished", {"rows": len(rows), "csv": self.short(csv), "run_ids": ids})

    def fail(self, job: Job, why: str) -> None:
        print(f"{job.key} failed: {why}\n  {self.short(self.folder / job.key)}.ipynb", flush=True)
        self._end(job, "failed", why)

    def complete(self) -> bool:
        return all(key in self.state["finished"] for key in self.state["planned"])

    def note(self, **changes) -> None:
        states.note(self.folder, self.state, **changes)

    def short(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def report(self) -> None:
        """What was measured and where it lies, then a line for every job."""
        from vitkit.lab.before_after import OWN
        from vitkit.lab.overview import overview

        for name, rows, _ in self.done:
            print(f"\n{overview(name, rows) if rows else f'{name}: figures, no rows'}")
            own = [row for row in rows if re.match(OWN, str(row["case"]))]
            if own:
                print(overview("  your own grids", own))
            if rows:
                print(f"  run {rows[-1]['run_id']}")
        print("\nexecuted notebooks")
        for path in sorted(self.folder.glob("*.ipynb")):
            print(f"  {self.short(path)}")
        print("rows, environments and figures")
        for path in dict.fromkeys(path for _, _, written in self.done for path in written):
            print(f"  {self.short(path)}")
        print("\n" + summary(self.state), flush=True)
        for key, why in self.state["failed"].items():
            _tell(f"{key} failed: {why}")

    def leave(self, why: str) -> None:
        """The end of a batch that stopped on the way."""
        with suppress(states.Stopped):  # a state left at "running" reads as interrupted too
            self.note(status="interrupted")
        print("\n" + summary(self.state))
        print(f"state and executed notebooks: {self.short(self.folder)}/")
        print(f"  python -m vitkit run --resume {self.state['utc']} runs what is missing", flush=True)
        _tell(f"{why}; {states.finished(self.state)}")

    def _end(self, job: Job, state: str, what) -> None:
        self.state[state][job.key] = what
        seconds = self.state.setdefault("seconds", {})
        seconds[job.key] = round(time.monotonic() - self.started.pop(job.key), 1)
        self.note(running=", ".join(self.started) or None)


def summary(state: dict) -> str:
    """A table with a line for every job of a batch: whether it finished, its rows, how long it took."""
    lines = [("run", "state", "rows", "seconds", "values")]
    for key in state["planned"]:
        how = next((how for how in ("finished", "failed") if key in state[how]), "not run")
        rows = str(state["finished"][key]["rows"]) if how == "finished" else ""
        seconds = state.get("seconds", {}).get(key, "") if how != "not run" else ""
        lines.append((key, how, rows, str(seconds), describe(state["parameters"][key])))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    sides = (str.ljust, str.ljust, str.rjust, str.rjust)
    texts = ["  ".join([*(side(x, n) for side, x, n in zip(sides, line, widths)), line[4]]) for line in lines]
    return "\n".join(texts)


def _tell(line: str) -> None:
    print(f"vitkit run: {line}", file=sys.stderr, flush=True)


def _one_after_another(batch: Batch, stop: bool) -> None:
    for job in batch.jobs:
        batch.begin(job)
        target = None
        try:
            target = Target(job.path, job.values, batch.root)
            execute.execute(job.path, job.values, batch.folder / f"{job.key}.ipynb")
            rows = target.new_rows()
            if not rows and not target.drawn():
                raise RuntimeError(f"no row was written to {target.csv}")
        except Exception as error:
            batch.fail(job, execute.describe(error) + _kept(target))
            if stop:
                return
        else:
            batch.finish(job, target.csv, rows, target.written(rows))


def _kept(target: Target | None) -> str:
    """What a notebook that failed had measured before."""
    try:
        rows = target.new_rows() if target else []
    except (OSError, ValueError):  # the file itself may be what is wrong
        rows = []
    return f"; {len(rows)} rows measured before it are kept in {target.csv}" if rows else ""


@contextmanager
def _signals_as_interrupt():
    """SIGTERM and SIGINT raise KeyboardInterrupt, even where a shell started us with SIGINT ignored."""

    def interrupt(number, frame):
        execute.kill_kernels()  # asked politely, a busy one would print a traceback and take seconds
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
