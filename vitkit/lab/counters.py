"""Bytes and sectors that the rotary kernel moves, counted by the hardware through NVIDIA's profiler, ncu.

`python -m vitkit.lab.counters DEVICE HEADS` launches the kernel once for each entry of `launches()`: the process that
ncu watches. Counted are bytes of device memory, and sectors (32 bytes) asked of the L2 cache by the kernel's loads and
stores. A write that still lies in the L2 cache when the kernel ends is no write to device memory yet.
"""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch

TOKENS, SECTOR = (128, 256), 32  # h, w of the grid; bytes
METRICS = {
    "dram__bytes_read.sum": "DRAM bytes read",
    "dram__bytes_write.sum": "DRAM bytes written",
    "lts__t_sectors_srcunit_tex_op_read.sum": "L2 sectors read",
    "lts__t_sectors_srcunit_tex_op_write.sum": "L2 sectors written",
}
SCALES = {"": 1, "byte": 1, "sector": 1, "kbyte": 10**3, "mbyte": 10**6, "gbyte": 10**9}


def launches() -> list[tuple[int, bool, bool]]:
    """(D, from positions, in place) of every launch, in their order."""
    return [(dim, from_pos, inplace) for dim in (72, 80) for from_pos in (False, True) for inplace in (False, True)]


def needed(dim, from_pos, num_heads) -> dict:
    """{metric: what must move}: q and k once each way in 2 bytes an entry, and a token's fp32 tables or int32 pair."""
    tokens = TOKENS[0] * TOKENS[1]
    written = 2 * tokens * num_heads * dim * 2
    read = written + tokens * (8 if from_pos else 4 * dim)
    return dict(zip(METRICS, (read, written, read / SECTOR, written / SECTOR)))


def count(device, num_heads: int, seconds=180):
    """(DataFrame, "") with a line a launch and metric: measured, needed, their ratio; or (None, why there is none)."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip:
        return None, "no hardware counters: they are read on a GPU of NVIDIA alone"
    if not shutil.which("ncu"):
        return None, "no hardware counters: ncu, NVIDIA's profiler of kernels, is not on the PATH"
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    command += ["-k", "regex:^_kernel$", sys.executable, "-m", "vitkit.lab.counters", str(device), str(num_heads)]
    here = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    torch.cuda.empty_cache()  # the other process needs some of it
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        counted = parse(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, f"no hardware counters: {type(error).__name__}"
    if len(counted) != len(launches()):
        errors = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
        said = errors[0].removeprefix("==ERROR==").split("(")[0].strip()[:100] if errors else f"exit {done.returncode}"
        return None, f"no hardware counters: ncu saw {len(counted)} of {len(launches())} launches ({said})"
    return table(counted, num_heads), ""


def parse(text: str) -> list[dict]:
    """{metric: value} of every kernel in ncu's CSV, in the order of the launches; what else was printed is passed over.

    A line holds one metric of one kernel. Numbers may have separators of thousands, and units prefixes.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels = {}
    for row in csv.DictReader(lines[start:]):
        name, value = row.get("Metric Name"), (row.get("Metric Value") or "").replace(",", "")
        scale = SCALES.get((row.get("Metric Unit") or "").lower())
        if name in METRICS and scale and (row["ID"] or "").isdigit():
            try:
                kernels.setdefault(int(row["ID"]), {})[name] = float(value) * scale
            except ValueError:
                continue
    return [kernels[i] for i in sorted(kernels)]


def table(counted: list[dict], num_heads: int) -> pd.DataFrame:
    """`counted`, as `parse` gives it, beside what is needed."""
    rows = []
    for (dim, from_pos, inplace), values in zip(launches(), counted):
        version = f"triton{'_from_pos' * from_pos}{'_in_place' * inplace}"
        for metric, least in needed(dim, from_pos, num_heads).items():
            if metric in values:
                row = {"D": dim, "impl": version, "metric": METRICS[metric], "measured": values[metric]}
                rows.append(row | {"needed": float(least), "measured / needed": values[metric] / least})
    return pd.DataFrame(rows)


def compact(df: pd.DataFrame) -> pd.DataFrame:
    """A line a launch, a column a metric: measured over needed."""
    out = df.pivot(index=["D", "impl"], columns="metric", values="measured / needed")
    out = out[[name for name in METRICS.values() if name in out]].add_suffix(" / needed").reset_index()
    out.columns.name = None
    return out


def _launch(device, num_heads):
    from vitkit.lab.rotary_cases import rotary_geometry, rotary_inputs
    from vitkit.rotary import triton_kernels

    for dim, from_pos, inplace in launches():
        r = rotary_inputs([[1, *TOKENS]], rotary_geometry(num_heads, dim), device, torch.bfloat16)[0]
        rotate = triton_kernels.rotary_qk_from_pos if from_pos else triton_kernels.rotary_qk
        rotate(r.q, r.k, *((r.pos_ids, r.table) if from_pos else (r.cos, r.sin)), inplace)
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    _launch(torch.device(sys.argv[1]), int(sys.argv[2]))
