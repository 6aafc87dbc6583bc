"""The description of a machine: complete where it can be read, None where not, stable, and silent on who runs it."""

import getpass
import json
import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch

from vitkit.lab import env

NAME = "AMD Instinct MI300X"


@pytest.fixture
def rocm(monkeypatch):
    """What torch reports under ROCm, without NVML."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=4, total_memory=2**37, multi_processor_count=304, gcnArchName="gfx942:sramecc+"
    )
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(env, "_nvml", lambda properties: (None, None, None))
    return properties


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_devices_without_a_gpu(no_gpu):
    assert env.resolve_device() == env.resolve_device("cpu") == env.resolve_device(torch.device("cpu"))
    for name in ("cuda", "cuda:0", "gpu", "cpu:x", "", None, "mps"):
        with pytest.raises(ValueError, match="auto, cpu is allowed") as error:
            env.resolve_device(name)
        assert "\n" not in str(error.value) and repr(str(name)) in str(error.value)


def test_devices_under_rocm(rocm):
    assert env.resolve_device("auto") == env.resolve_device("cuda") == torch.device("cuda", 1)
    assert env.resolve_device("cuda:0") == env.resolve_device(torch.device("cuda:0")) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="cuda:2.*auto, cpu, cuda, cuda:0, cuda:1 is allowed"):
        env.resolve_device("cuda:2")


def test_a_gpu_that_does_not_start_is_refused(rocm, monkeypatch):
    def fail(index):
        raise RuntimeError("device is busy\nlong explanation")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(ValueError, match=r"device='cuda:0': .*\(device is busy\)"):
        env.resolve_device("cuda:0")


def test_description_under_rocm(rocm):
    found = env.describe("cuda:0")
    assert found["device"] == "amd-instinct-mi300x" and found["hip"] == "6.4.1" and found["cuda"] is None
    gpu = found["gpu"]
    assert gpu["name"] == NAME and gpu["arch"] == "gfx942:sramecc+" and gpu["memory_bytes"] == 2**37
    assert gpu["l2_bytes"] is gpu["max_sm_mhz"] is gpu["max_memory_mhz"] is None
    json.dumps(found)


def test_a_gpu_without_a_name_has_a_slug(rocm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "")
    assert env.device_slug("cuda:0") == "amd-gfx942"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace())
    assert env.device_slug("cuda:0") == "amd-gpu"


def test_nvml_is_asked_by_uuid_and_may_be_missing_or_broken(monkeypatch):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1-2": "handle"}[uuid],
        nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: {("handle", 1): 1980, ("handle", 2): 3201}[handle, kind],
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    assert env._nvml(SimpleNamespace(uuid="1-2")) == ("570.1", 1980, 3201)
    assert env._nvml(SimpleNamespace(uuid="other")) == ("570.1", None, None)
    nvml.nvmlInit = lambda: 1 / 0
    assert env._nvml(SimpleNamespace(uuid="1-2")) == (None, None, None)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # import raises ImportError
    assert env._nvml(SimpleNamespace(uuid="1-2")) == (None, None, None)


@pytest.mark.parametrize(
    "model, slug",
    [
        ("AMD EPYC 9654 96-Core Processor", "cpu-amd-epyc-9654"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "cpu-intel-xeon-platinum-8480c"),
        ("aarch64", "cpu-aarch64"),
    ],
)
def test_cpu_slugs(monkeypatch, model, slug):
    monkeypatch.setattr(env, "_cpu_model", lambda: model)
    assert env.device_slug("cpu") == slug


def test_the_description_is_stable_and_names_nobody(tmp_path):
    found = env.describe("cpu")
    assert found == env.describe("cpu") and env.env_id(found) == env.env_id(env.describe("cpu"))
    assert found["gpu"] is None and found["cpu"]["model"] and found["libraries"]["torch"] and found["python"]
    text = env.save_env(found, tmp_path).read_text()
    for private in (socket.gethostname(), getpass.getuser(), os.getcwd(), str(tmp_path), os.path.expanduser("~")):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", text)


def test_the_id_follows_the_content_not_the_order(tmp_path):
    assert env.env_id({"a": 1, "b": 2}) == env.env_id({"b": 2, "a": 1}) != env.env_id({"a": 1, "b": 3})
    path = env.save_env({"b": None, "a": 1}, tmp_path)
    assert path == env.save_env({"a": 1, "b": None}, tmp_path)
    assert path == tmp_path / "data" / "env" / f"{env.env_id({'a': 1, 'b': None})}.json"
    assert json.loads(path.read_text()) == {"a": 1, "b": None} and len(list(path.parent.iterdir())) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_described_and_stable():
    device = env.resolve_device("auto")
    found = env.describe(device)
    assert device.type == "cuda" and found["gpu"]["name"] and found["gpu"]["memory_bytes"]
    torch.zeros(2**20, device=device)  # neither memory in use nor clocks may change the id
    assert env.env_id(found) == env.env_id(env.describe(device))
