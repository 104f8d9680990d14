"""Memory on large pages is the same memory, on fewer pages."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from prove import large_pages

SUMMED = Path("/proc/self/smaps_rollup")


def on_large_pages() -> int:
    """KiB of this process."""
    found = re.search(r"AnonHugePages: +(\d+) kB", SUMMED.read_text())
    return int(found[1]) if found else 0


@pytest.mark.skipif(not SUMMED.exists(), reason="unsupported here: the kernel does not tell of large pages")
def test_what_is_collapsed_holds_what_it_held() -> None:
    wanted = random.Random(3).randbytes(24 << 20)
    held = bytearray(wanted)
    before = on_large_pages()
    large_pages.collapse()
    assert held == wanted
    if on_large_pages() <= before:
        pytest.skip("unsupported here: the kernel gives no large pages")
    assert on_large_pages() - before >= 8 << 10


def test_where_there_are_none_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("asked the kernel"))
    large_pages.collapse()
