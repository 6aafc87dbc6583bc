"""What `vitkit run` is asked for, checked before a kernel starts: which notebooks, with which values.

papermill only warns about a misspelt parameter and then runs on the defaults, so every name and value is checked
here against the notebook's cell tagged `parameters`. Every refusal is a ValueError of one line that names what is
allowed.
"""

import ast
import difflib
import json
import math
import re
from pathlib import Path

SIZES = ("auto", "tiny", "cpu", "gpu")


def scratch(size: str) -> str:
    """Where a run of this size writes, below the repository: a tiny one proves nothing and stays out of data/."""
    return "runs/tiny" if size == "tiny" else ""


def list_notebooks(folder: Path) -> list[Path]:
    """The notebooks of a folder in the order of their numbers; those without a number come last, by name."""
    paths = [path for path in Path(folder).glob("*.ipynb") if not path.name.startswith(".")]
    if not paths:
        raise ValueError(f"no notebook in {folder}: run this in a checkout of the repository")
    return sorted(paths, key=lambda path: (_number(path.stem) is None, _number(path.stem) or 0, path.stem))


def select(names, folder: Path) -> list[Path]:
    """The notebooks meant by `names`, each a stem, a file name, a number or a part that fits one only; none: all."""
    paths = list_notebooks(folder)
    chosen = [_find(name, paths) for name in names] or paths
    return list(dict.fromkeys(chosen))  # a notebook named twice runs once


def make_plan(names, parameters, folder: Path) -> list[tuple[Path, dict]]:
    """[(notebook, its values)] for names and (name, text) pairs, or ValueError.

    A parameter goes to the notebooks that know it, and must be known to one of them at least.
    """
    plan = [(path, inspect(path), {}) for path in select(names, folder)]
    allowed = sorted({name for _, known, _ in plan for name in known})
    for name, text in parameters:
        if name not in allowed:
            where = ", ".join(path.stem for path, _, _ in plan)
            names_allowed = ", ".join(allowed) or "none"
            raise ValueError(f"no parameter {name!r} in {where}; allowed: {names_allowed}{_nearest(name, allowed)}")
        for _, known, values in plan:
            if name in known:
                values[name] = check_value(name, parse_value(name, text, known[name]), known[name])
    return [(path, values) for path, _, values in plan]


def inspect(path: Path) -> dict:
    """{name: papermill's description} of the cell tagged `parameters`: inferred_type_name, default, help."""
    import papermill

    try:
        return papermill.inspect_notebook(str(path))
    except Exception as error:  # papermill passes on whatever its readers raise
        raise ValueError(f"{path.name} cannot be read as a notebook: {one_line(error)}") from error


def parse_value(name: str, text: str, known: dict):
    """`text` as the type that the parameters cell states, or else as the type of its default."""
    kind = known["inferred_type_name"]
    if kind in ("None", ""):
        kind = type(_literal(known["default"], None)).__name__
    kind = kind.split("[")[0].strip()
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() in ("true", "1", "yes"):
            return True
        if text.lower() in ("false", "0", "no"):
            return False
        raise ValueError(f"{name}={text!r}: true or false is allowed")
    if kind == "int":
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError(f"{name}={text!r}: an integer is allowed (default {known['default']})")
        return int(text)
    if kind == "float":
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{name}={text!r}: a finite number is allowed (default {known['default']})")
        return value
    value = _literal(text, text)  # object and the like: JSON, a Python literal, or the text (a path)
    wanted = {"list": list, "tuple": (list, tuple), "dict": dict}.get(kind)
    if wanted and not isinstance(value, wanted):
        raise ValueError(f"{name}={text!r}: a {kind} is allowed, written as JSON or as in Python")
    return value


def check_value(name: str, value, known: dict):
    """The value as the notebook will get it; paths become absolute, since a notebook runs in its own folder.

    A help text that holds "one of a, b, c" (up to a semicolon) limits the values to these.
    """
    if name == "device":
        from vitkit.lab.env import resolve_device

        resolve_device(value)
    elif name == "size" and value not in SIZES:
        raise ValueError(f"size={value!r}: one of {', '.join(SIZES)} is allowed{_nearest(value, SIZES)}")
    elif name == "threads" and value < 0:
        raise ValueError(f"threads={value}: 0 (as many as torch takes) or more is allowed")
    elif name == "out" and value:
        return str(Path(value).expanduser().resolve())
    elif name == "grids" and value is not None:
        from vitkit.lab.workloads import read_grids

        value = str(Path(value).expanduser().resolve()) if isinstance(value, str) else value
        read_grids(value)
    choices = re.search(r"\bone of ([^;]+)", known.get("help") or "")
    choices = [choice.strip(" .'\"") for choice in choices[1].split(",")] if choices else []
    if choices and str(value) not in choices:
        raise ValueError(f"{name}={value!r}: one of {', '.join(choices)} is allowed{_nearest(str(value), choices)}")
    return value


def one_line(error) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _find(name, paths: list[Path]) -> Path:
    name = str(name)  # 2 is as good as "2"
    stem = Path(name).name.removesuffix(".ipynb")
    fits = [path for path in paths if path.stem == stem]
    if not fits and stem.isdigit():
        fits = [path for path in paths if _number(path.stem) == int(stem)]
    elif not fits and stem:
        fits = [path for path in paths if stem in path.stem]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ValueError(f"notebook {name!r} fits {' and '.join(path.stem for path in fits)}: name one of them")
    stems = [path.stem for path in paths]
    near = _nearest(stem, stems + [re.sub(r"^\d+_", "", stem) for stem in stems])
    raise ValueError(f"no notebook {name!r} in {paths[0].parent.name}/; there are: {', '.join(stems)}{near}")


def _number(stem: str) -> int | None:
    number = re.match(r"\d+", stem)
    return int(number[0]) if number else None


def _nearest(word, words) -> str:
    """What may have been meant; a word from a YAML or JSON file may be any value."""
    near = difflib.get_close_matches(str(word), [str(other) for other in words], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _literal(text: str, otherwise):
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return otherwise
