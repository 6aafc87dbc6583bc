"""A batch on a Dask cluster: each run is a task, one at a time on a GPU, and what it wrote is brought home.

Machines need not share a disk: notebook and library travel with the task, rows and figures with its result. When a
worker dies, Dask gives its run to another one, which begins it anew; only a result that arrives here is merged, so
that nothing is lost or counted twice. docs/cluster.md shows how to start a cluster.
"""

import io
import json
import logging
import re
import secrets
import time
import zipfile
from functools import partial
from pathlib import Path

from vitkit.lab import cluster_task, merge, params, states
from vitkit.lab.batch import Job, out_of


def check_jobs(jobs: list[Job]) -> None:
    """ValueError for a notebook whose results could not be brought home."""
    for job in jobs:
        if "out" not in params.inspect(job.path):
            raise ValueError(f"--scheduler: {job.path.name} has no parameter out, by which its results are found")
        if job.values.get("run_id"):
            raise ValueError("run_id is not allowed with --scheduler: an earlier run can be gone on with only at home")


def connect(address: str):
    """The function that executes a batch there: (batch, stop) -> None. ValueError if no scheduler answers."""
    if not re.fullmatch(r"\w+://.+:\d+", address):  # a client of anything else complains again when it is deleted
        raise ValueError(f"--scheduler {address}: an address such as tcp://host:8786 is allowed")
    try:
        import cloudpickle
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ValueError(f"--scheduler: {error.name} is not installed; pip install distributed") from None
    cloudpickle.register_pickle_by_value(cluster_task)  # whatever vitkit is installed there
    for name in ("distributed", "distributed.client", "tornado.application"):  # a lost connection is told in our line
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--scheduler {address}: no scheduler answers ({params.one_line(error)})") from None
    return partial(_execute, client)


def _execute(client, batch, stop: bool) -> None:
    common = _common_files(batch.root)
    pending, running, told = list(batch.jobs), {}, False
    try:
        while pending or running:
            places, needs = _places(client)
            if not places and not told:
                print("no worker is there: waiting for one", flush=True)
            told = not places
            while pending and len(running) < places:
                job = pending.pop(0)
                batch.begin(job)
                key = f"{job.key}-{secrets.token_hex(8)}"
                task = client.submit(
                    cluster_task.run_notebook, _bundle(common, job), key, key=key, pure=False, resources=needs
                )
                running[task] = job
            for task in _done(client, running):
                if not _bring_home(task, running.pop(task), batch) and stop:
                    pending.clear()
    finally:
        client.cancel(list(running), force=True)  # a worker ends what nobody waits for
        client.close()


def _places(client) -> tuple[int, dict | None]:
    """How many runs may be under way, and what each occupies: a GPU of those declared, else a worker."""
    try:
        declared = client.run_on_scheduler(cluster_task.resources)
    except OSError as error:
        raise states.Stopped(f"the scheduler does not answer any more ({params.one_line(error)})") from None
    gpus = int(sum(one.get("GPU", 0) for one in declared))
    return (gpus, {"GPU": 1}) if gpus else (len(declared), None)


def _done(client, running: dict) -> list:
    """The tasks that have ended, after a while of waiting for the next one."""
    until = time.monotonic() + 2
    while time.monotonic() < until and not any(task.done() for task in running):
        if client.status != "running":
            raise states.Stopped("the connection to the scheduler is lost")
        time.sleep(0.1)
    return [task for task in running if task.done()]


def _bring_home(task, job: Job, batch) -> bool:
    """Merges what a run wrote, also where it failed half-way; whether it finished."""
    if task.status != "finished":  # the run itself raises nothing
        if task.status != "error":
            raise states.Stopped("the connection to the scheduler is lost")
        batch.fail(job, f"no worker finished it: {params.one_line(task.exception())}")
        return False
    result = task.result()
    try:
        csv, rows, written = merge.bring_home(
            result["zip"], job.path.stem, out_of(job.values, batch.root), batch.folder / f"{job.key}.ipynb"
        )
    except (OSError, ValueError) as error:
        batch.fail(job, f"its results cannot be written here: {params.one_line(error)}{_keep(batch, job, result)}")
        return False
    error = result["error"] or ("" if written else "neither a row nor a figure was written")
    if error:
        batch.fail(job, error + (f"; {len(rows)} rows measured before it are kept in {csv}" if rows else ""))
        return False
    batch.finish(job, csv, rows, written)
    return True


def _keep(batch, job: Job, result: dict) -> str:
    """Where what cannot be merged is kept, if that disk can take it."""
    path = batch.folder / f"{job.key}.zip"
    try:
        path.write_bytes(result["zip"])
    except OSError:
        path.unlink(missing_ok=True)
        return ""
    return f"; they are kept in {batch.short(path)}"


def _common_files(root: Path) -> dict[str, bytes]:
    """{path: content} of what every run needs: the library as it is here, the workloads, one's own photos."""
    package = Path(__file__).resolve().parents[1]
    files = {f"vitkit/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    data = [*root.glob("data/*.json"), *root.glob("data/images/*")]
    files |= {path.relative_to(root).as_posix(): path for path in data if path.is_file()}
    return {"pyproject.toml": b"", **{name: path.read_bytes() for name, path in sorted(files.items())}}


def _bundle(common: dict[str, bytes], job: Job) -> bytes:
    """The zip that a worker unpacks."""
    values = {name: value for name, value in job.values.items() if name != "out"}
    files = {**common, f"notebooks/{job.path.name}": job.path.read_bytes()}
    grids = values.get("grids")
    if isinstance(grids, str) and Path(grids).is_file():
        values["grids"] = f"grids{Path(grids).suffix}"
        files[values["grids"]] = Path(grids).read_bytes()
    files["job.json"] = json.dumps({"notebook": job.path.stem, "values": values}).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()
