"""Which way is the faster one, by size: measured on this device by `python -m vitkit tune`, or a committed default.

For each op a crossover: the number of patches from which `triton` is faster than `numba` on a GPU, or `torch` than
`numba` on a CPU; infinity is never. Measured ones lie in `folder()`, a JSON file a device, and count only for the very
GPU or CPU, driver, versions and, on a CPU, number of torch's threads that they were measured with.
"""

import hashlib
import json
import math
import os
import platform
import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

OPS = ("rot_pos_ids", "window_index", "cu_seqlens", "VisionPlan")

# Measured by `tune` on an H200, and taken for other GPUs as well. On a CPU numba was faster at every size.
_H200 = {"rot_pos_ids": 12_000, "window_index": 39_000, "cu_seqlens": math.inf, "VisionPlan": 11_600}
DEFAULTS = {
    "NVIDIA H200": _H200,
    None: _H200,
    "cpu": dict.fromkeys(OPS, math.inf),
}


def crossover(op: str, device: torch.device) -> tuple[float, str]:
    """(patches from which the second way is the faster one, where the number comes from)."""
    if device.type not in ("cpu", "cuda"):
        return math.inf, f"default for {device.type}"
    return _crossovers(device, torch.get_num_threads() if device.type == "cpu" else 0)[op]


_caches = []


def cached(function):
    """`functools.cache`, forgotten when `save` changes what is measured."""
    _caches.append(cache(function))
    return _caches[-1]


@cached
def _crossovers(device, threads):
    try:
        path = file_of(device)
    except RuntimeError:  # no home directory
        path = None
    measured = path and _read(path, describe(device))
    if measured is not None:
        return {op: (value, "measured on this machine") for op, value in measured.items()}
    name = "cpu" if device.type == "cpu" else describe(device)["device"]
    source = f"default for {name}" if name in DEFAULTS else "default for GPUs not measured"
    return {op: (value, source) for op, value in DEFAULTS.get(name, DEFAULTS[None]).items()}


def folder() -> Path:
    """VITKIT_CACHE, or vitkit in the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    own = os.environ.get("VITKIT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"


def file_of(device) -> Path:
    """The file of this device as it is now: another driver, version or number of threads has another."""
    key = hashlib.sha256(json.dumps(describe(device), sort_keys=True).encode()).hexdigest()
    return folder() / f"tuned-{device.type}-{key[:12]}.json"


def describe(device) -> dict:
    """What a measured crossover depends on: JSON values by name."""
    versions = {name: _version(name) for name in ("torch", "triton", "numba", "vitkit")}
    if device.type == "cpu":
        return {"device": _cpu_name(), "threads": torch.get_num_threads(), **versions}
    return {"device": torch.cuda.get_device_name(device), "driver": _driver(), **versions}


def save(device, crossovers: dict) -> Path:
    """Writes {op: patches or math.inf} for this device, and lets this process use it. Returns the file's path."""
    path = file_of(device)
    content = {
        "key": describe(device),
        "from_patches": {k: None if math.isinf(v) else v for k, v in crossovers.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    forget()
    return path


def forget():
    """Lets the next call look at the files again."""
    for one in _caches:
        one.cache_clear()


def _read(path, key):
    """{op: patches} of a file that is whole and of this device; None, with a warning if there is another one."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        text = repr(error)
    try:
        content = json.loads(text)
        values = {op: content["from_patches"][op] for op in OPS}
        values = {op: math.inf if value is None else value for op, value in values.items()}
        whole = content["key"] == key and all(type(v) in (int, float) and v >= 0 for v in values.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if whole:
        return values
    warnings.warn(
        f"{path} is not a measurement of this device and is ignored; `python -m vitkit tune` writes a new one",
        stacklevel=2,
    )
    return None


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name():
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver():
    """The kernel driver's version, or of the CUDA that it serves; None where neither can be read."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    if found:
        return found[0]
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)
    return asked() if asked else None
