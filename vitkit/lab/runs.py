"""The runs that data/results holds: one execution of one notebook on one device, with its rows and counts."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from .peers import PEERS
from .results import SHARE, code_hash
from .rows import COLUMNS, COUNT_COLUMNS, read_rows, typed
from .tables import is_correct


@dataclass
class Finished:
    """rows: as in <notebook>.csv; counts: as in <notebook>-counts.csv; both of this run alone, either may be empty."""

    root: Path
    device: str
    notebook: str
    run_id: str
    utc: str
    rows: pd.DataFrame = field(repr=False)
    counts: pd.DataFrame = field(repr=False)

    @cached_property
    def code_hashes(self) -> list[str]:
        return sorted({*self.rows["code_hash"], *self.counts["code_hash"]})

    @cached_property
    def env_ids(self) -> list[str]:
        return sorted({*self.rows["env_id"], *self.counts["env_id"]})

    @cached_property
    def is_current(self) -> bool:
        """Whether this checkout's notebook and library would measure with the same code."""
        return self.code_hashes == [code_hash(self.notebook)]

    def failed(self) -> list[str]:
        """One line for every row and count that failed its check, raised an error or has no value."""
        bad = self.rows[~is_correct(self.rows) | self.rows["error"].ne("") | self.rows["median_us"].isna()]
        said = []
        for row in bad.itertuples():
            what = f"{row.op}, {row.impl}, {row.direction}, {row.dtype}, {row.case}, {row.clock}"
            said.append((row.impl, f"({what}): {row.error or row.note or 'wrong, or without a time'}"))
        red = self.counts["metric"].eq(SHARE) & ~self.counts["value"].le(1)
        for row in self.counts[red | self.counts["value"].isna()].itertuples():
            of = f"{row.value:.4g} of the error allowed" if row.metric == SHARE else f"{row.metric}, without a value"
            said.append((row.version, f"({row.version}, {row.case}): {of}"))
        return [f"{'a peer, ' if impl in PEERS else ''}{line}" for impl, line in dict.fromkeys(said)]


def finished(root) -> list[Finished]:
    """Every run below root/data/results, the oldest first. ValueError where there is none, or a file is another one."""
    root, found = Path(root), []
    for folder in sorted(path for path in (root / "data" / "results").glob("*") if path.is_dir()):
        stems = {path.stem.removesuffix("-counts") for path in folder.glob("*.csv")}
        for stem in sorted(stems):
            rows, counts = _read(folder / f"{stem}.csv", COLUMNS), _read(folder / f"{stem}-counts.csv", COUNT_COLUMNS)
            both = pd.concat([rows[["run_id", "utc"]], counts[["run_id", "utc"]]])
            for run_id, utc in both.groupby("run_id")["utc"].max().items():
                mine = (table[table["run_id"] == run_id].reset_index(drop=True) for table in (rows, counts))
                found.append(Finished(root, folder.name, stem, run_id, utc, *mine))
    if not found:
        raise ValueError(f"no results in {root / 'data' / 'results'}: python -m vitkit run measures some")
    return sorted(found, key=lambda one: (one.utc, one.run_id))


def newest_of(runs: list[Finished], device: str) -> list[Finished]:
    """The newest run of every notebook on a device, in the order of the notebooks."""
    last = {one.notebook: one for one in runs if one.device == device}  # the oldest comes first
    return [last[name] for name in sorted(last)]


def pick_runs(runs: list[Finished], *, device="", run_ids=()) -> list[Finished]:
    """The runs asked for: `run_ids`, all of one device, or the newest of every notebook on `device`; "" is the device
    with the newest rows. ValueError names what there is."""
    devices = sorted({one.device for one in runs})
    if device and device not in devices:
        raise ValueError(f"device={device!r}: one of {', '.join(devices)} is allowed (a folder of data/results)")
    if not run_ids:
        return newest_of(runs, device or runs[-1].device)
    there = {one.run_id: one for one in runs if device in ("", one.device)}
    for run_id in run_ids:
        if run_id not in there:
            named = ", ".join(f"{one.run_id} ({one.notebook}, {one.device})" for one in there.values())
            raise ValueError(f"run={run_id!r}: one of {named} is allowed")
    out = [there[run_id] for run_id in dict.fromkeys(run_ids)]
    if len({one.device for one in out}) > 1:
        raise ValueError(f"run={', '.join(run_ids)!r}: runs of one device are allowed, these are of several")
    return sorted(out, key=lambda one: one.notebook)


def environment(root, env_id: str) -> dict | None:
    """data/env/<env_id>.json, or None where the file is missing."""
    path = Path(root) / "data" / "env" / f"{env_id}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _read(path, columns):
    if path.exists() and path.stat().st_size:
        return read_rows(path)
    return typed(pd.DataFrame(columns=columns, dtype=object))
