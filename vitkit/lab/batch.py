"""What a batch consists of: notebooks, each with every combination of the values asked for, checked before it starts.

Values come from a parameter file, from -p and from sweeps; the command line wins over the file. A value goes to the
notebooks that know its name, and what would be the same execution twice is done once. Every refusal is a ValueError of
one line.
"""

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from vitkit.lab import params

NO_TAG = 'has no cell tagged parameters: give its first code cell this tag, with lines such as device: str = "auto"'


@dataclass(frozen=True)
class Job:
    """One execution: key names it within its batch; path is the notebook; values are what its parameters cell gets."""

    key: str
    path: Path
    values: dict


def make_jobs(names, given, sweeps, file, folder: Path, *, away: bool = False) -> list[Job]:
    """The batch, in the order of the notebooks, then of the file's mappings, then of the sweeps, the last one fastest.

    names: as `params.select` takes them. given: (name, text) pairs. sweeps: texts name=v1,v2. file: path of a YAML file
    with a mapping of names to values or a list of mappings (each is run), or "". folder: of the notebooks.
    away: the runs are for other machines, and only these can tell whether a device is there.
    """
    paths = params.select(names, folder)
    known = {path: _inspect(path) for path in paths}
    swept = _read_sweeps(sweeps, given)
    checked, jobs = {}, {}  # each value is checked once
    for variant in read_file(file) if file else [{}]:
        fixed = {**variant, **dict(given)}
        for values in itertools.product(*swept.values()):
            wanted = {**fixed, **dict(zip(swept, values))}
            for path, own in _plan(known, wanted, away, checked):
                jobs.setdefault((path, json.dumps(own, sort_keys=True)), own)
    runs = sorted(((path, own) for (path, _), own in jobs.items()), key=lambda run: paths.index(run[0]))  # stable
    return _keyed(runs)


def missing_jobs(state: dict, folder: Path, *, away: bool = False) -> list[Job]:
    """The jobs of an earlier batch that have not finished, checked anew. state: its state.json."""
    jobs = []
    for key in state["planned"]:
        path = folder / f"{state.get('notebooks', {}).get(key, key)}.ipynb"
        if key in state["finished"]:
            continue
        if not path.is_file():
            raise ValueError(f"run {state['utc']}: its notebook {path.name} is gone from {folder.name}/")
        ((_, values),) = _plan({path: _inspect(path)}, state["parameters"][key], away, {})
        jobs.append(Job(key, path, values))
    return jobs


def read_file(path) -> list[dict]:
    """The mappings of a parameter file. ValueError names the file and what is allowed."""
    import yaml

    allowed = "a mapping of names to values, or a list of such mappings, is allowed"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--params {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--params {path}: no YAML ({params.one_line(error)}); {allowed}") from None
    variants = content if isinstance(content, list) else [content]
    if not variants or not all(isinstance(variant, dict) and variant for variant in variants):
        raise ValueError(f"--params {path}: {allowed}")
    return [{str(name): value for name, value in variant.items()} for variant in variants]


def check_outputs(jobs: list[Job], root: Path) -> None:
    """ValueError where a job could not write its results: a file in the way, a read-only mount, no permission.

    Creates nothing. That a disk is full shows only when something is written.
    """
    for job in jobs:
        out = out_of(job.values, root)
        for folder in ("data/results", "data/env", "figures"):
            why = unwritable(out / folder)
            if why:
                raise ValueError(f"out={str(out)!r} of {job.key}: {why}; a writable folder is allowed")


def out_of(values: dict, root: Path) -> Path:
    """The folder of data/ and figures/ that a notebook with these values writes to."""
    return Path(values.get("out") or Path(root) / params.scratch(values.get("size", "")))


def unwritable(folder: Path) -> str:
    """Why files cannot be made in a folder that may not exist yet; "" where they can."""
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is no folder"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} is on a read-only file system"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"no permission to write in {place}"


def describe(values: dict) -> str:
    """Values on one line: name=value, a blank between them."""
    texts = {name: x if isinstance(x, str) else json.dumps(x, separators=(",", ":")) for name, x in values.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items()) or "defaults"


def preview(jobs: list[Job]) -> str:
    """What would run, a line each."""
    width = max((len(job.key) for job in jobs), default=0)
    lines = [f"[{i}/{len(jobs)}] {job.key:{width}}  {describe(job.values)}" for i, job in enumerate(jobs, 1)]
    return "\n".join(lines) or "nothing is missing"


def _plan(known: dict, wanted: dict, away: bool, checked: dict) -> list[tuple[Path, dict]]:
    """[(notebook, its values)] for wanted {name: a text, or a value from YAML or JSON}.

    known: {notebook: its parameters}. checked: {(name, value as text): {notebook: value}}, filled here.
    """
    for name, value in wanted.items():
        if (name, repr(value)) not in checked:
            checked[name, repr(value)] = _check(name, value, known, away)
    given = [(name, checked[name, repr(value)]) for name, value in wanted.items()]
    return [(path, {name: found[path] for name, found in given if path in found}) for path in known]


def _check(name, value, known: dict, away: bool) -> dict:
    """{notebook: value as it will get it} by `params.make_plan`; ValueError for what it refuses."""
    text = _text(name, value, known)
    if away and name == "device":  # whether it is there shows on the machine that takes the run
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
            raise ValueError(f"device={text!r}: auto, cpu, cuda or cuda:<n> is allowed")
        text, there = "cpu", text
    plan = params.make_plan([path.stem for path in known], [(name, text)], next(iter(known)).parent)
    return {path: there if away and name == "device" else own[name] for path, own in plan if own}


def _text(name, value, known: dict) -> str:
    """A value from YAML or JSON as `-p` would have it; a text stays as it is."""
    if isinstance(value, str):
        return value
    for parameters in known.values():
        kind = parameters[name]["inferred_type_name"] if name in parameters else ""
        if kind == "str" or (kind == "None" and parameters[name]["default"][:1] in "'\""):
            raise ValueError(f"{name}={value!r}: a text is allowed (in YAML within quotes)")
    try:
        return json.dumps(value)
    except TypeError:  # YAML has dates
        raise ValueError(f"{name}={value!r}: a number, a text, true, false, or a list of them is allowed") from None


def _keyed(runs) -> list[Job]:
    """Jobs with their keys: the notebook's stem, and a number where it runs more than once."""
    stems = [path.stem for path, _ in runs]
    jobs = []
    for i, (path, values) in enumerate(runs):
        number = stems[: i + 1].count(path.stem)
        key = path.stem if stems.count(path.stem) == 1 else f"{path.stem}.{number}"
        jobs.append(Job(key, path, values))
    return jobs


def _inspect(path: Path) -> dict:
    """The notebook's parameters, or ValueError: papermill would run one without the cell on its own values."""
    known = params.inspect(path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    if not any("parameters" in cell["metadata"].get("tags", []) for cell in cells):
        raise ValueError(f"{path.name} {NO_TAG}")
    return known


def _read_sweeps(sweeps, given) -> dict[str, list[str]]:
    """{name: [texts]}; commas within brackets and quotes belong to a value."""
    swept = {}
    for text in sweeps:
        name, _, rest = text.partition("=")
        values, depth, quote = [""], 0, ""
        for sign in rest:
            if sign in "\"'":
                quote = "" if sign == quote else quote or sign
            elif not quote:
                depth += (sign in "[({") - (sign in "])}")
            if sign == "," and not quote and not depth:
                values.append("")
            else:
                values[-1] += sign
        if not name or not all(values) or depth or quote:
            raise ValueError(f"--sweep {text!r}: name=value,value is allowed, such as threads=1,2")
        if name in swept or name in dict(given):
            raise ValueError(f"{name} is given twice: one --sweep or one -p for a name is allowed")
        swept[name] = values
    return swept
