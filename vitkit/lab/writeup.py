"""`python -m vitkit writeup`: Markdown for a pull request, made of the rows of the newest runs and nothing else.

Every number is a cell of data/results, or computed from such cells; what failed its check is named.
"""

import json
import os
from pathlib import Path

import pandas as pd

from . import before_after, results, runs
from .results import SHARE
from .tables import is_correct, load_published, markdown, params
from .writeup_styles import STYLES

FOLD = 12  # tables with more lines than this are folded away, below a summary that is not
LAYER = r"relative error after layer (\d+)"
DIFFERENCE = "largest difference of the outputs"


def write(style="plain", *, device="", run_ids=(), root=None, out=None, base="") -> str:
    """The writeup as Markdown.

    style: a key of STYLES. device, run_ids: as `runs.pick_runs` takes them; without either, the newest run of every
    notebook on the device with the newest rows. root: the folder with data/ and figures/; None is the repository.
    out: where the text will lie, so that its links resolve from there; None: from `root`. base: what links begin with
    instead, such as https://raw.githubusercontent.com/OWNER/REPOSITORY/COMMIT. ValueError names what is not allowed.
    """
    if style not in STYLES:
        raise ValueError(f"style={style!r}: one of {', '.join(STYLES)} is allowed")
    root = Path(root or results.repo_root()).resolve()
    there = runs.finished(root)
    chosen = runs.pick_runs(there, device=device, run_ids=run_ids)
    beside = Path(out).resolve().parent if out else root

    def link(path):
        return f"{base.rstrip('/')}/{path}" if base else Path(os.path.relpath(root / path, beside)).as_posix()

    blocks = {
        "environment": _environment(root, chosen),
        "results": _results(chosen),
        "accuracy": _accuracy(chosen),
        "traffic": _traffic(chosen),
        "figures": _figures(root, chosen, runs.newest_of(there, chosen[0].device), link),
        "failed": "\n".join(f"- {one.notebook} {line}" for one in chosen for line in one.failed()) or "None.",
        "commands": _commands(chosen, style, root),
        "full_environment": _full_environment(root, chosen),
    }
    return STYLES[style].format(**blocks)


def _environment(root, chosen) -> str:
    ids = dict.fromkeys(env_id for one in chosen for env_id in one.env_ids)
    lines = [environment_line(runs.environment(root, env_id), env_id) for env_id in ids]
    table = pd.DataFrame(
        {
            "notebook": one.notebook,
            "run": one.run_id,
            "rows": len(one.rows),
            "passed": int(is_correct(one.rows).sum()),
            "CPU threads": ", ".join(map(str, _threads(one))),
            "code": f"{', '.join(h[:12] for h in one.code_hashes)}, {_age(one)}",
            "environment": ", ".join(one.env_ids),
        }
        for one in chosen
    )
    stale = [one.notebook for one in chosen if not one.is_current]
    if stale:
        lines.append(
            f"**{', '.join(stale)}: measured with other code than that of this checkout.** "
            "Run them again before you publish, or say which version these rows are of."
        )
    return "\n\n".join([*lines, markdown(table).rstrip()])


def environment_line(env: dict | None, env_id: str) -> str:
    """One line about a machine, from data/env/<env_id>.json; what could not be read is left out."""
    if env is None:
        return f"Environment {env_id}: data/env/{env_id}.json is missing."
    gpu, cpu, said = env["gpu"] or {}, env["cpu"], []
    if gpu:
        about = [_gib(gpu["memory_bytes"]), gpu["driver"] and f"driver {gpu['driver']}"]
        about += [env["cuda"] and f"CUDA {env['cuda']}", env["hip"] and f"ROCm {env['hip']}"]
        said.append(f"**{gpu['name'] or env['device']}** ({', '.join(filter(None, about))})")
    about = [f"{cpu['usable_cores'] or cpu['cores']} cores", _gib(cpu["memory_bytes"])]
    said.append(f"{cpu['model']} ({', '.join(filter(None, about))})")
    said += [env["system"], f"Python {env['python']}"]
    said.append(", ".join(f"{name} {version}" for name, version in env["libraries"].items() if version))
    return "; ".join(said)


def _results(chosen) -> str:
    out = []
    for one in chosen:
        for op, rows in before_after.kinds(one.rows).items():
            out += _before_after(op, rows)
        kernels = before_after.kernel_table(one.rows, load_published(results.repo_root())["rotary"])
        if len(kernels):
            first = before_after.plain(one.rows, "published").iloc[0]
            out.append(f"### Kernels at the published shape: {first['case']}, {first['dtype']}, {first['clock']} clock")
            out.append("Rows hold the median, p20 and p80, and no mean; `python -m vitkit rotary` prints a mean too.")
            out.append(markdown(kernels).rstrip())
    return "\n\n".join(out) or "No op was timed in these runs."


def _before_after(op, rows):
    table, before, after = before_after.compare_ways(rows)
    first = rows.iloc[0]
    same = [f"{name} {first[name]}" for name in ("direction", "clock", "dtype") if name not in table]
    yield f"### `{op}`: `{before}` before, `{after or 'nothing of ours'}` after"
    yield f"{', '.join(same)}. Medians; the speedup is before over after." if same else "Medians; before over after."
    yield markdown(before_after.means(table)).rstrip()
    slower = table[table["speedup"].astype(float).lt(1)]
    if len(slower):
        series = [name for name in before_after.SERIES if name in table]
        named = [
            f"{', '.join(str(row[n]) for n in [*series, 'case'])} ({row['speedup']:.4g})"
            for _, row in slower.iterrows()
        ]
        yield f"**Slower than before:** {'; '.join(named)}."
    yield _folded(f"{op}: every workload", markdown(table), len(table))


def _accuracy(chosen) -> str:
    out = []
    for one in chosen:
        counts, green = one.counts, int(is_correct(one.rows).sum())
        checked = f"{one.notebook}: {green} of {len(one.rows)} rows passed the check on the inputs that were timed."
        out.append(checked if len(one.rows) else f"{one.notebook}: counts alone.")
        shares = counts[counts["metric"].eq(SHARE)]
        if len(shares):
            errors = counts[counts["metric"].eq("relative error")]
            table = shares.groupby("version", sort=False)["value"].agg(["size", "max"]).reset_index()
            table["max"] = table["max"].astype(object).where(table["max"].ne(0), "passed")  # its error was not kept
            table.columns = ["version", "cases", f"largest {SHARE}"]
            out.append(markdown(table).rstrip())
            if len(errors):
                out.append(_folded(f"{one.notebook}: relative errors", *_wide(errors, "version")))
        layers = counts["metric"].str.extract(LAYER)[0].astype(float)
        if layers.notna().any():
            deepest = counts[layers.eq(layers.groupby([counts["case"], counts["version"]]).transform("max"))]
            out.append(
                "Relative error against float32 after the last layer:\n\n" + _wide(deepest, "version")[0].rstrip()
            )
        same = counts[counts["metric"].eq(DIFFERENCE)]
        if len(same):
            out.append(f"The {DIFFERENCE}, of every version and transformers:\n\n" + _wide(same, "version")[0].rstrip())
    return "\n\n".join(out)


def _traffic(chosen) -> str:
    from .traffic import published

    out = []
    for one in chosen:
        counts = one.counts
        rest = counts[
            ~counts["metric"].isin([SHARE, "relative error", DIFFERENCE]) & ~counts["metric"].str.match(LAYER)
        ]
        if rest.empty:
            continue
        forwards = published(rest, results.repo_root())
        if len(forwards.columns) > 4:  # case, metric and the published before and after: then there is a column of ours
            out.append(f"{one.notebook}: one forward of the tower, and what was published of it:")
            out.append(markdown(forwards).rstrip())
        out.append(_folded(f"{one.notebook}: every count", *_wide(rest, "metric", ["case", "version"]), always=True))
    return "\n\n".join(out) or "Nothing was counted in these runs."


def _wide(counts, columns, index=("case",)):
    """(Markdown, lines): a column for each value of `columns`. Whole numbers have no decimal point."""
    table = counts.pivot_table(index=list(index), columns=columns, values="value", aggfunc="last", sort=False)
    whole = [name for name in table if table[name].dropna().mod(1).eq(0).all()]
    table[whole] = table[whole].astype("Int64")
    table.columns.name = None
    return markdown(table.reset_index()), len(table)


def _figures(root, chosen, newest, link) -> str:
    """Pictures of the notebooks, and links to their tables; they are those of the newest run alone."""
    latest, out = {one.run_id for one in newest}, []
    for one in chosen:
        if one.run_id not in latest:
            out.append(f"{one.notebook}: the figures in the repository are of a later run than {one.run_id}.")
            continue
        folder = Path("figures") / one.device
        paths = sorted((root / folder).glob(f"{one.notebook}-*.png"))
        out += [f"![{path.stem}, {one.device}]({link((folder / path.name).as_posix())})" for path in paths]
        tables = sorted((root / folder).glob(f"{one.notebook}-*.md"))
        named = [f"[{p.stem.removeprefix(one.notebook + '-')}]({link((folder / p.name).as_posix())})" for p in tables]
        if named:
            out.append(f"Tables of {one.notebook}: {', '.join(named)}")
    return "\n\n".join(out) or "No figure was saved."


def _commands(chosen, style, root) -> str:
    device = "cpu" if chosen[0].device.startswith("cpu-") else "cuda"
    repository = results.repo_root()
    place = root.relative_to(repository).as_posix() if root.is_relative_to(repository) else "ROOT"  # no path of mine
    out = {".": "", "runs/tiny": " -p size tiny"}.get(place, f" -p out {place}")
    groups, lines = {}, ["make install"]
    for one in chosen:
        grids = list(before_after.own_grids(one.rows).values())
        groups.setdefault((_threads(one), json.dumps(grids)), []).append(one.notebook)
    for i, ((threads, grids), notebooks) in enumerate(groups.items(), start=1):
        more = f" -p threads {threads[0]}" if len(threads) == 1 and threads != (1,) else ""
        if grids != "[]":  # each line is a batch, as it was; their names count lines
            more += f" -p grids grids{i}.jsonl"
            batches = [json.dumps({"grid_thw": grid}) for grid in json.loads(grids)]
            lines += [f"cat > grids{i}.jsonl <<'EOF'", *batches, "EOF"]
        lines.append(f".venv/bin/python -m vitkit run {' '.join(notebooks)} -p device {device}{more}{out}")
    if any(len(before_after.plain(one.rows, "published")) for one in chosen):
        lines.append(f".venv/bin/python -m vitkit rotary --device {device}")
    ids = "".join(f" --run {one.run_id}" for one in chosen)
    where = "" if place == "." else f" --root {place}"
    lines.append(f".venv/bin/python -m vitkit writeup --style {style} --device {chosen[0].device}{ids}{where}")
    prompt = "<!-- Rows do not tell the other parameters: add those that you gave (such as -p size). -->"
    if place == "ROOT":
        prompt = f"<!-- ROOT: the folder that -p out named. -->\n{prompt}"
    return "\n".join(["```", *lines, "```"]) + f"\n\n{prompt}"


def _full_environment(root, chosen) -> str:
    texts = []
    for env_id in dict.fromkeys(env_id for one in chosen for env_id in one.env_ids):
        path = root / "data" / "env" / f"{env_id}.json"
        text = path.read_text(encoding="utf-8").rstrip() if path.is_file() else "missing"
        texts.append(f"data/env/{env_id}.json\n\n```json\n{text}\n```")
    return _fold("The full environment", "\n\n".join(texts))


def _folded(title, table, lines, always=False) -> str:
    return _fold(title, table.rstrip()) if always or lines > FOLD else table.rstrip()


def _fold(title, text) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def _threads(one) -> tuple:
    return tuple(sorted({int(n) for n in params(before_after.plain(one.rows), "threads", 0)}))


def _age(one) -> str:
    return "as in this checkout" if one.is_current else "not of this checkout"


def _gib(n_bytes):
    return n_bytes and f"{n_bytes / 2**30:.0f} GiB"
