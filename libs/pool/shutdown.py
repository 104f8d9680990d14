"""The order of the end: stop admission -> drain or close -> release."""

from __future__ import annotations

from enum import Enum

from .model import PoolBugError


class Stage(Enum):
    """How far the end has come."""

    RUNNING = "running"
    DRAINING = "draining"  # no binds, no dials; routes may end by themselves until the deadline
    CLOSING = "closing"  # every writer is being closed
    RELEASED = "released"  # nothing is left


_ORDER = list(Stage)


class Shutdown:
    """The owner of the stage; it only ever goes forward."""

    def __init__(self) -> None:
        self.stage = Stage.RUNNING
        self.deadline: float | None = None

    def begin(self, grace_s: float, now: float) -> bool:
        """Stop admission; false if that had been done. A second call can only bring the deadline forward."""
        deadline = now + grace_s
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)
        if self.stage is not Stage.RUNNING:
            return False
        self._to(Stage.DRAINING)
        return True

    def step(self, bound: int, left: int, now: float) -> Stage:
        """Where things are. ``bound``: routes; ``left``: writers and dials not over yet."""
        if self.stage is Stage.DRAINING and (not bound or (self.deadline is not None and now >= self.deadline)):
            self._to(Stage.CLOSING)
        if self.stage is Stage.CLOSING and not left:
            self._to(Stage.RELEASED)
        return self.stage

    def _to(self, stage: Stage) -> None:
        if _ORDER.index(stage) != _ORDER.index(self.stage) + 1:
            raise PoolBugError(f"the end goes from {self.stage.value} to {stage.value}")
        self.stage = stage
