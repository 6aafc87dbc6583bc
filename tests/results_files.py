"""Small files of results for the tests of writeup and compare: rows and counts as a run writes them."""

import json
import os

from vitkit.lab.rows import COLUMNS, COUNT_COLUMNS, append_lines, as_text

ENV = {
    "device": "nvidia-toy",
    "gpu": {"name": "Toy GPU", "driver": "1.2", "memory_bytes": 2**30},
    "cpu": {"model": "Toy CPU", "cores": 4, "usable_cores": 2, "memory_bytes": 2**31},
    "cuda": "13.0",
    "hip": None,
    "libraries": {"torch": "2.12.0", "flash-attn": None},
    "python": "3.12.0",
    "system": "Linux x86_64",
}
ROW = {
    **{"env_id": "0123456789ab", "code_hash": "f" * 64, "op": "rot_pos_ids", "impl": "triton", "direction": "fwd"},
    **{"dtype": "int32", "case": "1x8x8", "grid_thw": [[1, 8, 8]], "params": {"threads": 1}, "n_images": 1},
    **{"n_tokens": 64, "clock": "e2e", "cache": "warm", "n": 9, "correct": True, "error": "", "note": ""},
}


def add_rows(root, rows, *, run_id="r1", utc="2026-01-01T00:00:00Z", device="nvidia-toy", notebook="2_toy"):
    """Appends rows, of which only what differs from ROW is given; p20 and p80 are 2 % from the median by default."""
    full = []
    for row in rows:
        row = {**ROW, "run_id": run_id, "utc": utc, "device": device, **row}
        us = row.get("median_us")
        if us is not None:
            row = {"p20_us": 0.98 * us, "p80_us": 1.02 * us, **row}
        full.append(row)
    _append(root, device, f"{notebook}.csv", COLUMNS, full)
    env = root / "data" / "env" / f"{ROW['env_id']}.json"
    env.parent.mkdir(parents=True, exist_ok=True)
    env.write_text(json.dumps(ENV))


def add_counts(root, counts, *, run_id="r1", utc="2026-01-01T00:00:00Z", device="nvidia-toy", notebook="2_toy"):
    """Appends counts: (case, version, metric, value) each."""
    stamp = {"run_id": run_id, "utc": utc, "env_id": ROW["env_id"], "code_hash": ROW["code_hash"], "device": device}
    rows = [{**stamp, **dict(zip(("case", "version", "metric", "value"), count)), "unit": "1"} for count in counts]
    _append(root, device, f"{notebook}-counts.csv", COUNT_COLUMNS, rows)


def _append(root, device, name, columns, rows):
    folder = root / "data" / "results" / device
    os.makedirs(folder, exist_ok=True)
    append_lines(folder / name, columns, [[as_text(c, row.get(c)) for c in columns] for row in rows])
