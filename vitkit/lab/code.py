"""Which code a notebook's rows were measured with: its own cells, and the files of the library that these can reach.

A file that no import statement leads to, from the cells on, cannot have changed a measurement: a new module beside the
others leaves the rows of other notebooks as good as they were. The folders of ops count whole, since they import their
ways by name.
"""

import ast
import hashlib
import json
from pathlib import Path


def code_hash(notebook: Path, package: Path) -> str:
    """sha256 over the cells' sources, and over every file of `reached` (name and bytes).

    notebook: the .ipynb; its outputs and metadata do not count, since running it must not change the hash. Without one,
    all files of the package count. package: the folder `vitkit`.
    """
    files, cells = sorted(package.rglob("*.py")), []
    if notebook.is_file():
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        files = reached(package, ["".join(c["source"]) for c in cells if c["cell_type"] == "code"])
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    if cells:
        digest.update(json.dumps([[cell["cell_type"], "".join(cell["source"])] for cell in cells]).encode())
    return digest.hexdigest()


def reached(package: Path, sources: list[str]) -> list[Path]:
    """The package's files that `sources` import, those that these import, and so on, sorted; within functions too.

    With a module come the `__init__.py` above it, as Python runs them, and if it lies in a folder other than `lab` all
    files of that folder. Names that are not of this package, or are no modules, lead nowhere. SyntaxError where a
    source is not Python.
    """
    found, names = set(), [name for source in sources for name in _imported(ast.parse(source), "")]
    while names:
        for path in _files(package, names.pop()):
            if path not in found:
                found.add(path)
                module = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
                names += _imported(ast.parse(path.read_bytes()), module)
                if path.parent not in (package, package / "lab"):
                    above = module.rpartition(".")[0]
                    names += (f"{above}.{other.stem}" for other in path.parent.glob("*.py"))
    return sorted(found)


def _imported(tree, module):
    """Full names that the import statements of a module mention; of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # as a list, the module's own name or __init__ is the last part: level 1 is the folder that it lies in
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _files(package, name):
    """The files that importing `name` runs: of every folder on the way its `__init__.py`, and its own."""
    parts = name.split(".")
    if parts[0] != package.name:
        return
    for i in range(1, len(parts) + 1):
        place = package.joinpath(*parts[1:i])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file() and (i > 1 or path.name == "__init__.py"):
                yield path
