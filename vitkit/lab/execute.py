"""One notebook through papermill: the kernel is this interpreter, and what counts is the rows that it wrote.

papermill marks cells completed after a kernel's death, so a notebook has finished only if nothing was raised and rows
of a new run stand in its data/results/<device>/<notebook>.csv; or new figures, in the case of one that measures
nothing, such as the tour.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from vitkit.lab.batch import out_of
from vitkit.lab.params import one_line


class Target:
    """Where a notebook writes, and what stood there before it ran."""

    def __init__(self, path: Path, values: dict, root: Path):
        from vitkit.lab.env import device_slug, resolve_device

        self.name, self.root = path.stem, out_of(values, root)
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


def execute(path: Path, values: dict, output: Path) -> None:
    """Executes a notebook in its own folder, into `output`; raises what a cell raised, or that the kernel died."""
    import papermill

    # Silences a warning of the debugger that would otherwise stand in every executed notebook.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    # The kernel imports the library that this process runs, wherever another one may be installed.
    here = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what goes wrong is told in a line, by the runner
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters=values,
        kernel_name="python3",
        kernel_manager_class=_kernel_manager(),
        progress_bar={"desc": path.stem} if sys.stderr.isatty() else False,
        log_output=False,
        cwd=str(path.parent),  # as in JupyterLab
    )


_kernels, _processes = [], []


def _kernel_manager():
    """A kernel manager whose kernels run in this interpreter, whatever kernels Jupyter's search path names python3."""
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    class ThisInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self):
            # At its end a kernel is interrupted; one that is not idle yet would say so on our stderr.
            own = get_kernel_dict(extra_arguments=["--IPKernelApp.log_level=50"])
            return KernelSpec(**{**own, "argv": [sys.executable, *own["argv"][1:]]})

        async def start_kernel(self, **kwargs):
            _kernels.append(self)
            if self.has_trait("transport_encryption") and zmq.has("curve"):  # else a new kernel warns of plain text
                self.transport_encryption = "auto"
            await super().start_kernel(**kwargs)
            _processes.append(getattr(self.provisioner, "process", None))

    return ThisInterpreter


def kill_kernels() -> None:
    """Ends the kernels at once: what a notebook has added to its results is on the disk already."""
    for manager in _kernels:
        process = getattr(manager.provisioner, "process", None)
        if process is not None and process.poll() is None:
            process.kill()


def describe(error: Exception) -> str:
    """One line: of a cell's error its number, first line of source, and what was raised."""
    if hasattr(error, "ename"):
        source = next((line for line in error.source.splitlines() if line.strip()), "")
        return one_line(f"cell [{error.exec_count}] `{source.strip()}`: {error.ename}: {error.evalue}")
    if type(error).__name__ == "DeadKernelError":
        return f"DeadKernelError: the kernel died{_how(_processes[-1] if _processes else None)}"
    return one_line(f"{type(error).__name__}: {error}")


def _how(process) -> str:
    status = process.poll() if process is not None else None
    if status is None:
        return ""
    if status >= 0:
        return f" with exit status {status}"
    why = " (killed by someone, or by the system for want of memory)" if status == -signal.SIGKILL else ""
    return f" of {signal.Signals(-status).name}{why}"
