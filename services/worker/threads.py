"""Threads that must not compete with decode for the cores."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 10


def low_priority() -> None:
    """Lowers the calling thread's own share of the processor (on Linux, niceness belongs to a thread)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
