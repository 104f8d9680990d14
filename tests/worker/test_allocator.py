"""That threads which allocate at once share two arenas, in a process of its own: arenas once made stay."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from services.worker.allocator import ARENAS

_COUNTED = """
import ctypes, os, sys, tempfile, threading
from services.worker.allocator import bound_arenas
if sys.argv[1] == "bound" and not bound_arenas():
    sys.exit("not bound")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(40_000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as told:
    stream = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(told.read().count(b"<heap nr="))
"""


def _arenas(how: str) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _COUNTED, how]
    return int(subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="unsupported here: no glibc")
def test_threads_share_the_arenas() -> None:
    assert _arenas("bound") <= ARENAS
    assert _arenas("as it is") > ARENAS
