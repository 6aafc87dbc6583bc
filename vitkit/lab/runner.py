"""Executes notebooks one after another through papermill, and keeps on disk what had finished.

Executed notebooks and `state.json` lie in runs/<utc>/; the rows, environments and figures lie where the notebooks
write them. papermill marks cells completed after a kernel's death, so a notebook has finished only if nothing was
raised and rows of a new run stand in its data/results/<device>/<notebook>.csv; or new figures, in the case of one that
measures nothing, such as the tour.
"""

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from vitkit.lab.params import one_line, scratch

INTERRUPTED = 130


def run(plan: list[tuple[Path, dict]], root: Path) -> int:
    """Executes `plan`, [(notebook, values)] as `params.make_plan` returns it; returns the exit status.

    0: all finished; 1: a notebook failed, and the others ran all the same; 130: interrupted.
    """
    runs = Path(root) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with open(runs / ".lock", "w") as lock, _signals_as_interrupt():
        _say_what_came_before(runs, lock)
        folder, state = _new_run(runs, plan)
        done = []
        try:
            for i, (path, values) in enumerate(plan):
                print(f"[{i + 1}/{len(plan)}] {path.stem}", flush=True)
                _note(folder, state, running=path.stem)
                try:
                    target = Target(path, values, Path(root))
                    _execute(path, values, folder / path.name)
                    rows = target.new_rows()
                    if not rows and not target.drawn():
                        raise RuntimeError(f"no row was written to {target.csv}")
                    state["finished"][path.stem] = {"rows": len(rows), "csv": _short(target.csv, root)}
                    done.append((target, rows))
                except Exception as error:
                    state["failed"][path.stem] = _describe(error)
                    print(f"{path.stem} failed: {_describe(error)}\n  {_short(folder / path.name, root)}", flush=True)
                _note(folder, state, running=None)
            _note(folder, state, status="failed" if state["failed"] else "finished")
            _report(state, done, folder, root)
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # what is left takes no time; restored on the way out
            _kill_kernels()
            _note(folder, state, status="interrupted")
            print(f"\ninterrupted{_at(state)}; {_finished(state)}", flush=True)
            print(f"state and executed notebooks: {_short(folder, root)}/", flush=True)
            return INTERRUPTED
    return 1 if state["failed"] else 0


class Target:
    """Where a notebook writes, and what stood there before it ran."""

    def __init__(self, path: Path, values: dict, root: Path):
        from vitkit.lab.env import device_slug, resolve_device

        self.name, self.root = path.stem, Path(values.get("out") or root / scratch(values.get("size", "")))
        self.slug = device_slug(resolve_device(values.get("device", "auto")))
        self.csv = self.root / "data" / "results" / self.slug / f"{self.name}.csv"
        self.before = len(_rows(self.csv))
        self.start = time.time()

    def new_rows(self) -> list[dict]:
        """The rows appended since; of an earlier run where it has been gone on with."""
        return _rows(self.csv)[self.before :]

    def written(self, rows: list[dict]) -> list[Path]:
        """The files of this run: rows, environments, figures."""
        env = [self.root / "data" / "env" / f"{i}.json" for i in sorted({row["env_id"] for row in rows})]
        counts = self.csv.with_name(f"{self.name}-counts.csv")
        return [*(path for path in (self.csv, counts, *env) if path.exists()), *self.drawn()]

    def drawn(self) -> list[Path]:
        """Figures and tables written since."""
        figures = sorted((self.root / "figures" / self.slug).glob(f"{self.name}-*"))
        return [path for path in figures if path.stat().st_mtime >= self.start - 1]  # file systems round down


def _rows(path: Path) -> list[dict]:
    from vitkit.lab.rows import read_rows

    return read_rows(path).to_dict("records") if path.exists() and path.stat().st_size else []


def _execute(path: Path, values: dict, output: Path) -> None:
    import papermill

    # Silences a warning of the debugger that would otherwise stand in every executed notebook.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    # The kernel imports the library that this process runs, wherever another one may be installed.
    here = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    bar = {"desc": path.stem, "mininterval": 0.1 if sys.stderr.isatty() else 10.0}
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters=values,
        kernel_name="python3",
        kernel_manager_class=_kernel_manager(),
        progress_bar=bar,
        log_output=False,
        cwd=str(path.parent),  # as in JupyterLab
    )


_kernels = []


def _kernel_manager():
    """A kernel manager whose kernels run in this interpreter, whatever kernels Jupyter's search path names python3."""
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    class ThisInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self):
            own = get_kernel_dict()
            return KernelSpec(**{**own, "argv": [sys.executable, *own["argv"][1:]]})

        async def start_kernel(self, **kwargs):
            _kernels.append(self)
            if self.has_trait("transport_encryption") and zmq.has("curve"):  # else a new kernel warns of plain text
                self.transport_encryption = "auto"
            await super().start_kernel(**kwargs)

    return ThisInterpreter


def _kill_kernels() -> None:
    """Ends the kernels at once: what a notebook has added to its results is on the disk already."""
    for manager in _kernels:
        process = getattr(manager.provisioner, "process", None)
        if process is not None and process.poll() is None:
            process.kill()


@contextmanager
def _signals_as_interrupt():
    """SIGTERM and SIGINT raise KeyboardInterrupt, even where a shell started us with SIGINT ignored."""

    def interrupt(number, frame):
        _kill_kernels()  # asked politely, a busy one would print a traceback and take seconds
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_run(runs: Path, plan) -> tuple[Path, dict]:
    """A new folder runs/<utc> and its state."""
    stamp = utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for again in range(2, 100):
        try:
            (runs / utc).mkdir()
            break
        except FileExistsError:
            utc = f"{stamp}-{again}"
    state = {"utc": utc, "status": "running", "running": None, "planned": [path.stem for path, _ in plan]}
    state |= {"finished": {}, "failed": {}, "parameters": {path.stem: values for path, values in plan}}
    _note(runs / utc, state)
    return runs / utc, state


def _note(folder: Path, state: dict, **changes) -> None:
    """Writes state.json so that a reader, or a crash, never meets half of it."""
    state.update(changes)
    with open(folder / "state.json.new", "w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "state.json.new", folder / "state.json")


def _say_what_came_before(runs: Path, lock) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it when this process ends, however it ends
    except OSError:
        print("another run is going on here: the two will disturb each other's timings", flush=True)
        return
    states = sorted(runs.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    try:
        state = json.loads(states[-1].read_text()) if states else {"status": "finished"}
    except ValueError:
        return
    if state["status"] == "failed":
        print(
            f"the previous run ({state['utc']}) failed at {', '.join(state['failed'])}; {_finished(state)}", flush=True
        )
    elif state["status"] != "finished":
        print(f"the previous run ({state['utc']}) was interrupted{_at(state)}; {_finished(state)}", flush=True)


def _at(state: dict) -> str:
    return f" at {state['running']}" if state["running"] else ""


def _finished(state: dict) -> str:
    done = [
        f"{name} ({what['rows']} rows in {what['csv']})" if what["rows"] else name
        for name, what in state["finished"].items()
    ]
    return f"finished: {', '.join(done) or 'none'}"


def _report(state: dict, done, folder: Path, root) -> None:
    from vitkit.lab.overview import overview

    for target, rows in done:
        print(f"\n{overview(target.name, rows) if rows else f'{target.name}: figures, no rows'}")
    print("\nexecuted notebooks")
    for path in sorted(folder.glob("*.ipynb")):
        print(f"  {_short(path, root)}")
    print("rows, environments and figures")
    for path in dict.fromkeys(path for target, rows in done for path in target.written(rows)):
        print(f"  {_short(path, root)}")
    for name, error in state["failed"].items():
        print(f"failed: {name}: {error}", flush=True)
    sys.stdout.flush()


def _short(path: Path, root) -> str:
    path = Path(path)
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _describe(error: Exception) -> str:
    """One line: of a cell's error its number, first line of source, and what was raised."""
    if hasattr(error, "ename"):
        source = next((line for line in error.source.splitlines() if line.strip()), "")
        return one_line(f"cell [{error.exec_count}] `{source.strip()}`: {error.ename}: {error.evalue}")
    return one_line(f"{type(error).__name__}: {error}")
