"""The short table that ends `vitkit run`: the best implementation of a few cases, against today's way."""

import pandas as pd

from vitkit.lab.peers import PEERS

LIMITS = ("copy", "empty_launch", "in_place_negate", "matmul")  # what the machine allows, not a way to do it
BASELINES = ("transformers", "reference")  # the first one that was measured
COLUMNS = ("op", "case", "tokens", "dtype", "clock", "best", "median", "speedup over")


def overview(name: str, rows: list[dict]) -> str:
    """`rows` of one notebook's run, as `rows.read_rows` types them: a headline, and a table of what was timed."""
    bad = [row for row in rows if row["correct"] is not True or row["error"]]
    state = f"{len(bad)} NOT correct or failed" if bad else "all correct"
    if bad and all(row["impl"] in PEERS for row in bad):
        state += " (of peers)"
    lines = [f"{name}: {len(rows)} rows, {state}"]
    table = [_line(cases) for cases in _few(_by_case(rows))]
    if not table:
        return lines[0]
    table.insert(0, COLUMNS)
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    right = (COLUMNS.index("tokens"), COLUMNS.index("median"))
    for line in table:
        cells = (
            text.rjust(width) if i in right else text.ljust(width) for i, (text, width) in enumerate(zip(line, widths))
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def duration(us: float) -> str:
    """Microseconds with three significant digits and a fitting unit."""
    scale, unit = (1e6, "s") if us >= 1e6 else (1e3, "ms") if us >= 1e3 else (1, "µs")
    value = us / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _by_case(rows: list[dict]) -> list[list[dict]]:
    """Correct, timed rows of the same inputs and clock, together; special sections (params) only if alone."""
    plain = [row for row in rows if '"section"' not in str(row["params"])]
    groups = {}
    for row in plain or rows:
        if row["correct"] is True and row["median_us"] > 0 and row["impl"] not in LIMITS:  # NaN: not timed
            same = ("op", "direction", "dtype", "clock", "cache", "case", "grid_thw", "params")
            groups.setdefault(tuple(row[key] for key in same), []).append(row)
    return list(groups.values())


def _few(groups: list[list[dict]]) -> list[list[dict]]:
    """The smallest, middle and largest case of every op's first clock and dtype, the largest of the others."""
    series = {}
    for group in groups:
        row = group[0]
        series.setdefault((row["op"], row["direction"], row["dtype"], row["clock"]), []).append(group)
    few, seen = [], set()
    for (op, *_), cases in series.items():
        cases.sort(key=lambda group: _tokens(group[0]))
        picks = {len(cases) - 1} if op in seen else {0, len(cases) // 2, len(cases) - 1}
        seen.add(op)
        few += [cases[i] for i in sorted(picks)]
    return few


def _line(group: list[dict]) -> tuple[str, ...]:
    """One line of the table; no speedup where no baseline was measured."""
    best = min(group, key=lambda row: row["median_us"])
    medians = {row["impl"]: row["median_us"] for row in group}
    base = next((impl for impl in BASELINES if impl in medians), None)
    gain = f"{medians[base] / float(best['median_us']):.2f}x {base}" if base and base != best["impl"] else "-"
    time = duration(best["median_us"])
    tokens = f"{_tokens(best):,}"
    op = f"{best['op']}, backward" if best["direction"] == "bwd" else best["op"]
    return op, best["case"], tokens, best["dtype"], best["clock"], best["impl"], time, gain


def _tokens(row: dict) -> int:
    return 0 if pd.isna(row["n_tokens"]) else int(row["n_tokens"])
