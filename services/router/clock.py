"""The shell's one clock: the event loop's monotonic time in ms, as the pure machines take it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs owned background work: `Service.spawn`. Its crash ends the service."""


def now_ms() -> float:
    """Of the running loop."""
    return asyncio.get_running_loop().time() * 1_000
