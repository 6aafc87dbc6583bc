"""Where results go: one CSV a notebook and device, appended row by row, with the figures drawn from it.

A row is on the disk when `Run.add` returns, so that an interrupt loses nothing that had finished.
"""

import io
import re
import secrets
import tempfile
import time
from pathlib import Path

import pandas as pd

from vitkit.lab import code, env
from vitkit.lab.files import write_whole
from vitkit.lab.peers import PEERS
from vitkit.lab.rows import COLUMNS, COUNT_COLUMNS, STAMP, append_lines, as_text, check_header, read_rows, typed

SHARE = "share of the error allowed"  # a count of this name above 1 is a failure


def repo_root() -> Path:
    """The checkout that holds this package, or the current folder where it is installed without one."""
    top = Path(__file__).resolve().parents[2]
    return top if (top / "pyproject.toml").is_file() else Path.cwd()


def code_hash(notebook_stem: str, root=None) -> str:
    """`code.code_hash` of notebooks/<notebook_stem>.ipynb and the library in `root`, or the installed one."""
    root = Path(root) if root else repo_root()
    package = root / "vitkit" if (root / "vitkit").is_dir() else Path(__file__).resolve().parents[1]
    return code.code_hash(root / "notebooks" / f"{notebook_stem}.ipynb", package)


class Run:
    """One execution of a notebook on one device: adds rows and counts, saves figures and tables, and at the end says
    what it wrote and whether all of it was right.

    notebook: its stem, such as 2_rot_pos_ids. device: as `env.resolve_device` takes it. out: the folder for data/ and
    figures/; "" is the repository. What could make the first write fail (a folder that cannot be written, a file of
    another layout) is a ValueError here, before anything is measured. run_id: that of an earlier run of the same code
    on the same machine, to go on with it; "" begins a new one.
    """

    def __init__(self, notebook: str, device="auto", out="", run_id=""):
        if not re.fullmatch(r"\w[\w-]*", str(notebook)):
            raise ValueError(f"notebook={notebook!r}: letters, digits, _ and - are allowed")
        self.device = env.resolve_device(device)
        self.notebook, self.slug = notebook, env.device_slug(self.device)
        self.root = Path(out).expanduser().resolve() if out else repo_root()
        self.results = self.root / "data" / "results" / self.slug / f"{notebook}.csv"
        self.counts = self.results.with_name(f"{notebook}-counts.csv")
        self.figures = self.root / "figures" / self.slug
        self._written = []
        for folder in (self.results.parent, self.figures, self.root / "data" / "env"):
            _check_writable(folder, out)
        for path, columns in ((self.results, COLUMNS), (self.counts, COUNT_COLUMNS)):
            check_header(path, columns)
        now = time.gmtime()
        self.utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        description = env.describe(self.device)
        self.env_id = env.env_id(description)
        self.code_hash = code_hash(notebook)
        self.run_id = run_id or f"{time.strftime('%Y%m%dT%H%M%SZ', now)}-{secrets.token_hex(2)}"
        if run_id:
            self._check_same(run_id)
        self._note(env.save_env(description, self.root))

    def add(self, rows) -> None:
        """Appends one row (a dict) or several to data/results/<slug>/<notebook>.csv. What a row lacks stays blank."""
        rows = [rows] if isinstance(rows, dict) else list(rows)
        for row in rows:
            unknown = sorted(set(row) - set(COLUMNS))
            if unknown or not row.get("op") or not row.get("impl"):
                raise ValueError(f"row={row!r}: op, impl and names from {COLUMNS} are allowed, not {unknown}")
        self._append(self.results, COLUMNS, rows)

    def count(self, case, version, metric, value, unit="") -> None:
        """Appends one counted or computed number (launches, bytes, an error norm) to <notebook>-counts.csv."""
        row = {"case": case, "version": version, "metric": metric, "value": value, "unit": unit}
        self._append(self.counts, COUNT_COLUMNS, [row])

    def frame(self) -> pd.DataFrame:
        """This run's rows, as they are on the disk."""
        return self._mine(self.results, COLUMNS)

    def count_frame(self) -> pd.DataFrame:
        """This run's counts, as they are on the disk."""
        return self._mine(self.counts, COUNT_COLUMNS)

    def save_figure(self, fig, name: str) -> None:
        """figures/<slug>/<notebook>-<name>.svg and .png, with no date and fixed ids.

        A figure made from the same rows, and shown or saved as often before, gives the same bytes. Each drawing lays
        out anew from where the last one ended, so that another number of them moves coordinates of the SVG a little.
        """
        import matplotlib

        for kind, metadata in (("svg", {"Date": None}), ("png", None)):
            data = io.BytesIO()
            with matplotlib.rc_context({"svg.hashsalt": "vitkit"}):
                fig.savefig(data, format=kind, metadata=metadata, dpi=150, bbox_inches="tight")
            self._save(name, kind, data.getvalue())

    def save_table(self, df: pd.DataFrame, name: str) -> None:
        """figures/<slug>/<notebook>-<name>.md."""
        from vitkit.lab.tables import markdown

        self._save(name, "md", (markdown(df).rstrip("\n") + "\n").encode())

    def paths(self) -> list[Path]:
        """Everything this run wrote, relative to `root`, each once, in the order of writing."""
        return [path.relative_to(self.root) for path in self._written]

    def finish(self) -> None:
        """Prints the paths, then RuntimeError if anything of ours is wrong, failed or has no time, for the exit code.

        A peer's failure is printed and no more: it says something about the peer's installation.
        """
        for path in self.paths():
            print(f"wrote {_shown(self.root / path)}")
        df, counts = self.frame(), self.count_frame()
        failed = df[~df.correct.eq(True).fillna(False) | df.error.ne("") | df.median_us.isna()]
        said = [(r.impl, f"({r.op}, {r.impl}, {r.case}): {r.error or r.note or 'wrong'}") for r in failed.itertuples()]
        red = counts[counts.metric.eq(SHARE) & ~counts.value.le(1)]
        said += [(r.version, f"({r.version}, {r.case}): {r.value:.3g} of the error allowed") for r in red.itertuples()]
        for impl, what in dict.fromkeys(said):
            if impl in PEERS:
                print(f"a peer is left out: {what}")
        ours = [what for impl, what in dict.fromkeys(said) if impl not in PEERS]
        if ours:
            raise RuntimeError(f"{len(ours)} results are wrong or failed: " + "; ".join(ours))

    def _append(self, path, columns, rows):
        stamp = {name: getattr(self, name) for name in STAMP}
        stamp["device"] = self.slug  # "cuda:0" would not tell machines apart once files are joined
        if rows:
            append_lines(
                path, columns, [[as_text(name, {**row, **stamp}.get(name)) for name in columns] for row in rows]
            )
            self._note(path)

    def _check_same(self, run_id):
        """Refuses to go on with a run that there is not, or that was of other code or on another machine."""
        rows = pd.concat([self.frame(), self.count_frame()])
        if not len(rows):
            raise ValueError(
                f"run_id={run_id!r}: {self.results.name} has no such run; the id of one, or '', is allowed"
            )
        for name, mine in (("code_hash", self.code_hash), ("env_id", self.env_id)):
            theirs = sorted(set(rows[name]))
            if theirs != [mine]:
                raise ValueError(f"run_id={run_id!r} has {name}={theirs}: only this one's, {mine!r}, is allowed")

    def _mine(self, path, columns):
        df = read_rows(path) if path.exists() else typed(pd.DataFrame(columns=columns, dtype=object))
        return df[df.run_id == self.run_id].reset_index(drop=True)

    def _save(self, name, kind, content: bytes):
        path = self.figures / f"{self.notebook}-{name}.{kind}"
        write_whole(path, content)
        self._note(path)

    def _note(self, path):
        if path not in self._written:
            self._written.append(path)


def _shown(path) -> str:
    """Relative to the repository, for a file in it."""
    path = Path(path).resolve()
    return (path.relative_to(repo_root()) if path.is_relative_to(repo_root()) else path).as_posix()


def _check_writable(folder, out):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # a full disk still makes empty files
            file.flush()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"out={str(out)!r}: cannot write in {folder} ({reason}); a writable folder is allowed"
        ) from None
