"""Kernel files stand alone: copied by themselves elsewhere they import torch and triton, and run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VITKIT = Path(__file__).parents[1] / "vitkit"

ROTARY = """
import torch, triton_kernels
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, a = torch.randn(7, 3, 80), torch.randn(7, 2, 80), torch.rand(7, 40)
for rotate in (triton_kernels.rotary_qk, triton_kernels.rotary_qk_separate):
    outs = rotate(*(x.to(device) for x in (q, k, a.cos(), a.sin())))
    for x, out in zip((q, k), outs):
        x1, x2, c, s = x[..., :40], x[..., 40:], a.cos()[:, None], a.sin()[:, None]
        torch.testing.assert_close(out.cpu(), torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1))
print("ran")
"""

INDICES = """
import torch, triton_kernels
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
index, reverse, cu = triton_kernels.window_index([(1, 6, 10)], 2, 4, device)
assert index.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 4, 9, 14] and cu.tolist() == [0, 48, 60]
assert triton_kernels.rot_pos_ids([(1, 2, 2)], 2, 4, device, "image").tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
assert triton_kernels.cu_seqlens([(2, 2, 4)], 2, 4, device).tolist() == [0, 8, 16]
print("ran")
"""


@pytest.mark.parametrize(("folder", "script"), [("rotary", ROTARY), ("indices", INDICES)])
def test_a_kernel_file_runs_by_itself(folder, script, tmp_path):
    (tmp_path / "triton_kernels.py").write_text((VITKIT / folder / "triton_kernels.py").read_text())
    absent = ("vitkit", "numba", "pandas", "matplotlib", "transformers")
    block = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    (tmp_path / "run.py").write_text(block + script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ran", done.stderr


def test_importing_vitkit_needs_torch_alone():
    absent = ("numba", "triton", "pandas", "matplotlib", "transformers", "papermill", "scipy", "PIL")
    script = f"""
import sys, torch
loaded = set(sys.modules)
for name in {absent!r}:
    if name not in loaded: sys.modules[name] = None
import vitkit
assert not any(m.split(".")[0] in {absent!r} for m in set(sys.modules) - loaded if sys.modules[m] is not None)
assert vitkit.rot_pos_ids([[1, 2, 2]], vitkit.Geometry(), impl="torch").tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
x, t = torch.ones(2, 1, 8), torch.ones(2, 4)
vitkit.apply_rotary_qk(x, x.clone(), t, t, impl="eager")
print("ran")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=VITKIT.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ran", done.stderr


@pytest.mark.parametrize("folder", ["indices", "rotary"])
def test_ops_import_nothing_from_above(folder):
    for file in (VITKIT / folder).glob("*.py"):
        text = file.read_text()
        for above in ("lab", "cli", "models", "plan", "parallel", "pandas", "matplotlib", "transformers"):
            assert f"import {above}" not in text and f"from ..{above}" not in text and f"from {above}" not in text, file
