"""The shell's one clock: monotonic time in ms, as the pure machines take it.

Not the event loop's: uvloop's is in whole ms and stands still for the length of one turn, which is a tenth of a short
request's time to first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs owned background work: `Service.spawn`. Its crash ends the service."""


def now_ms() -> float:
    """Since any moment."""
    return time.monotonic() * 1_000
