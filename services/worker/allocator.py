"""Keeps the C allocator from taking ever more of the host's memory.

glibc gives each thread that finds the others busy an arena of its own, up to eight a core; what is freed in one arena
serves no other. A worker's threads come and go (restores, checkpoints, the device loop), its buffers wander from one
to the other, and the resident set grows for hours while what is in use stays the same. Two arenas are enough: a
worker's bytes are moved in few, large allocations. Where the C library is another, nothing is done.
"""

from __future__ import annotations

import ctypes
import os

ARENAS = 2
_M_ARENA_MAX = -8
"""mallopt(3)."""


def bound_arenas() -> bool:
    """Whether it was done: no arena more is made, what there is stays. MALLOC_ARENA_MAX, where set, is left to rule."""
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_ARENA_MAX, ARENAS))
