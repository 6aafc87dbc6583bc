"""How this package compiles with numba, and what keeps that safe where processes fork."""

import os

from numba import njit
from numba.core.compiler_lock import global_compiler_lock


def jit(function):
    """`function` compiled when it is first called, without the GIL; machine code is kept on disk where numba can."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that it may write to
        return njit(nogil=True)(function)


if hasattr(os, "register_at_fork"):
    # A fork waits while another thread compiles: the child would inherit numba's lock as held, and wait for ever.
    # It waits for this lock alone: with a second one, a thread that holds it and begins to compile would lock up both.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
