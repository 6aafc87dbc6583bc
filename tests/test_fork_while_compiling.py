"""Processes that fork while a thread of theirs compiles a kernel for the CPU."""

import os
import subprocess
import sys

import pytest

# A process forks while another thread of it compiles its first kernel, and its child compiles one too. A process that
# hangs ends by itself: an alarm needs no lock.
FORK_DURING_A_COMPILE = """
import os, signal, sys, threading, time, traceback
from importlib import import_module

import torch

signal.alarm(45)
for package in sys.argv[1:]:
    import_module(f"vitkit.{package}.numba_kernels")

import vitkit
from vitkit.rotary import numba_kernels

compiles, forks, compile_kernel = threading.Event(), threading.Event(), numba_kernels._compile


def compile_during_the_fork(*key):
    compiles.set()
    forks.wait()
    time.sleep(0.5)  # the fork takes its first lock, if it can
    return compile_kernel(*key)


def rotate(dtype):
    q, table = torch.ones(2, 1, 8, dtype=dtype), torch.ones(2, 4)
    assert vitkit.apply_rotary_qk(q, q.clone(), table, table, impl="numba")[0][0, 0].tolist() == [0] * 4 + [2] * 4


os.register_at_fork(before=forks.set)  # registered last, so it is called first
numba_kernels._compile = compile_during_the_fork
thread = threading.Thread(target=rotate, args=(torch.float32,))
thread.start()
compiles.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    status = 1
    try:
        assert set(numba_kernels._kernels) == {(numba_kernels.KINDS[torch.float32], numba_kernels.KINDS[torch.float16])}
        rotate(torch.bfloat16)
        vitkit.rot_pos_ids(torch.tensor([[1, 4, 4]]), vitkit.Geometry(), impl="numba")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
thread.join()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(f"the child ended with {status}" if status else 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize("order", [("rotary", "indices"), ("indices", "rotary"), ("rotary",)], ids="-".join)
def test_fork_during_a_compile(order):
    """Whichever module is imported first, and so whichever's fork hooks run first, nothing waits for ever."""
    command = [sys.executable, "-c", FORK_DURING_A_COMPILE, *order]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)  # -14: the alarm, which ends what hangs
