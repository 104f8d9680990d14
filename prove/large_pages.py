"""Large pages under a process's memory. Linux only; elsewhere, and where the kernel has none, nothing happens.

A process that looks up millions of keys all over its memory waits for the translation of their addresses as long as for
the keys, more so on a virtual machine. Pages of 2 MiB make the translations 512 times as few.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_KEPT = 1 << 30  # bytes of a block of memory, and of what is free at the end, up to which nothing is given back
ENVIRONMENT = {
    "GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={_KEPT}:glibc.malloc.trim_threshold={_KEPT}",
}
"""Of a process: large blocks of memory are given large pages as soon as they are made, and are kept."""

_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_OWN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 ", re.ASCII)  # of no file, writable


def collapse() -> None:
    """Puts what memory there is now on large pages, as far as whole ones fit. The allocator of small objects gets its
    memory in parts that are smaller: only afterwards they are neighbours.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _OWN.match(line)
        if found is None or "[stack" in line:
            continue
        begin, end = -(-int(found[1], 16) // _PAGE) * _PAGE, int(found[2], 16) // _PAGE * _PAGE
        if end > begin:
            libc.madvise(begin, end - begin, _COLLAPSE)
