"""A result is not acted on before the heartbeat that its worker sent before it.

The heartbeat says what the ended assignment left resident, and whoever hears of the end may send its next turn at
once. On one tunnel the one comes before the other; over two tunnels the result may overtake. So it names the heartbeat,
and waits for it here, within `patience_s`, and no longer than its worker's process lasts. Where the heartbeat was lost
with its tunnel, the first one on the next tunnel is a later one, and says the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE_S = 0.05


@dataclass(slots=True, eq=False)
class _Kept:
    epoch: int
    sequence: int
    then: Callable[[], None]
    timer: asyncio.TimerHandle


class HeartbeatOrder:
    """`missing(worker, epoch, sequence)`: whether this heartbeat of the process is still to come."""

    def __init__(self, missing: Callable[[str, int, int], bool]) -> None:
        self.patience_s = PATIENCE_S
        self._missing = missing
        self._kept: dict[str, list[_Kept]] = {}

    def __len__(self) -> int:
        """Results that wait."""
        return sum(map(len, self._kept.values()))

    def after(self, worker: str, epoch: int, sequence: int, then: Callable[[], None]) -> None:
        """Calls `then` once: now, where that heartbeat was heard or none was named, or when it is."""
        if not sequence or not self._missing(worker, epoch, sequence):
            return then()
        timer = asyncio.get_running_loop().call_later(self.patience_s, self.heard, worker, sequence)
        self._kept.setdefault(worker, []).append(_Kept(epoch, sequence, then, timer))
        return None

    def heard(self, worker: str, sequence: int = 0) -> None:
        """A heartbeat came, or those up to `sequence` are waited for no longer."""
        self._release(
            worker, lambda kept: kept.sequence > sequence and self._missing(worker, kept.epoch, kept.sequence)
        )

    def gone(self, worker: str) -> None:
        """The process is lost, and with it every heartbeat under way."""
        self._release(worker, lambda _kept: False)

    def _release(self, worker: str, stays: Callable[[_Kept], bool]) -> None:
        waiting = self._kept.pop(worker, None)
        if waiting is None:
            return
        still = [kept for kept in waiting if stays(kept)]
        if still:
            self._kept[worker] = still
        for kept in waiting:
            if kept not in still:
                kept.timer.cancel()
                kept.then()
