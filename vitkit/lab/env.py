"""Which device is measured, and what a reader must know of it to believe a number.

Works without NVML and under ROCm: whatever cannot be read is None. The description holds only what stays the same
between two runs on one machine (maximum clocks rather than current ones, total memory rather than free), so that its
hash can stand for it in every row, and it holds no host name, user name or path.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from vitkit.lab.files import write_whole

LIBRARIES = {  # name in the description: distributions that provide it, the first one installed counts
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "pytorch-triton"),
    "numba": ("numba",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "matplotlib": ("matplotlib",),
    "transformers": ("transformers",),
    "flash-attn": ("flash-attn",),
    "liger-kernel": ("liger-kernel",),
}


def resolve_device(name="auto") -> torch.device:
    """ "auto" (the current GPU, or else the CPU), "cpu", "cuda" or "cuda:1" as a device with its index.

    ROCm's GPUs answer to "cuda" too. ValueError, in one line, if the device is not there or does not start.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or name == torch.device("cpu") or (name == "auto" and not gpus):
        return torch.device("cpu")
    found = re.fullmatch(r"auto|cuda(?::(\d+))?", str(name))
    if not found or not gpus or int(found[1] or 0) >= gpus:
        allowed = ["auto", "cpu"] + ["cuda"] * bool(gpus) + [f"cuda:{i}" for i in range(gpus)]
        why = "" if gpus or not found else "; torch sees no GPU"
        raise ValueError(f"device={str(name)!r}: one of {', '.join(allowed)} is allowed here{why}")
    try:
        index = torch.cuda.current_device() if found[1] is None else int(found[1])
        torch.cuda.get_device_properties(index)  # starts the driver: a GPU that is listed may still be unusable
    except (RuntimeError, AssertionError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"device={str(name)!r}: torch cannot use it ({why}); cpu is allowed") from None
    return torch.device("cuda", index)


def device_slug(device) -> str:
    """The name of the device's folder: cpu-amd-epyc-9654, nvidia-h200, amd-instinct-mi300x."""
    device = torch.device(device)
    if device.type == "cpu":
        name = re.sub(r"\((r|tm)\)|@.*|\bcpu\b|\bprocessor\b|\b\d+-core\b", " ", _cpu_model().lower())
        return _slug(f"cpu {name}")
    name = torch.cuda.get_device_name(device)
    if not name:  # some ROCm drivers know no marketing name
        name = f"amd {_read(lambda: torch.cuda.get_device_properties(device).gcnArchName.split(':')[0]) or 'gpu'}"
    return _slug(name)


def describe(device) -> dict:
    """Device, driver, clocks, CPU, cores and library versions as plain JSON values; None where it cannot be read."""
    device = torch.device(device)
    return {
        "device": device_slug(device),
        "gpu": _describe_gpu(device) if device.type == "cuda" else None,
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": _read(lambda: len(os.sched_getaffinity(0))),  # what the scheduler lets this process use
            "max_mhz": _read(lambda: _number(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")) // 1000),
            "memory_bytes": _read(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        },
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "libraries": {name: _version(names) for name, names in LIBRARIES.items()},
    }


def env_id(description: dict) -> str:
    """12 hex digits: the sha256 of the description's canonical JSON."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def save_env(description: dict, root) -> Path:
    """Writes `root`/data/env/<env_id>.json, whole or not at all, and returns its path."""
    path = Path(root) / "data" / "env" / f"{env_id(description)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_whole(path, (json.dumps(description, indent=2, sort_keys=True) + "\n").encode())
    return path


def _describe_gpu(device) -> dict:
    properties = torch.cuda.get_device_properties(device)

    def prop(name):
        return getattr(properties, name, None)

    driver, sm_mhz, memory_mhz = _nvml(properties)
    capability = f"{properties.major}.{properties.minor}" if prop("major") is not None else None
    return {
        "name": torch.cuda.get_device_name(device) or None,
        "driver": driver or _read(_kernel_driver),
        "max_sm_mhz": sm_mhz or (prop("clock_rate") or 0) // 1000 or None,  # torch gives kHz
        "max_memory_mhz": memory_mhz or (prop("memory_clock_rate") or 0) // 1000 or None,
        "memory_bytes": prop("total_memory"),
        "l2_bytes": prop("L2_cache_size"),
        "processors": prop("multi_processor_count"),
        "capability": capability,
        "arch": prop("gcnArchName") if torch.version.hip else None,  # under CUDA torch repeats the name here
    }


def _nvml(properties) -> tuple:
    """(driver, max SM MHz, max memory MHz), each None where NVML or its Python package is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no NVIDIA driver (ROCm), or a driver that does not match
        return None, None, None
    # By UUID: NVML counts every GPU of the machine, torch only the visible ones.
    handle = _read(lambda: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}"))
    driver = _read(pynvml.nvmlSystemGetDriverVersion)
    sm = _read(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    memory = _read(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM))
    return driver.decode() if isinstance(driver, bytes) else driver, sm, memory


def _kernel_driver() -> str:
    """The driver's version as the Linux kernel tells it, for machines without NVML."""
    if torch.version.hip:
        return Path("/sys/module/amdgpu/version").read_text().strip() or None
    return re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())[0]


def _cpu_model() -> str:
    try:
        return re.search(r"^model name\s*:\s*(\S.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].strip()
    except (OSError, TypeError):  # not Linux, or an ARM kernel, which names no model
        brand = ["sysctl", "-n", "machdep.cpu.brand_string"]
        mac = platform.system() == "Darwin" and _read(lambda: subprocess.check_output(brand, text=True).strip())
        return mac or platform.processor() or platform.machine()


def _version(names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def _number(path: Path) -> int:
    return int(path.read_text())


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _read(get):
    """What `get` returns, or None: no missing file, field or library may stop a measurement."""
    try:
        return get()
    except Exception:
        return None
