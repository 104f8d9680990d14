"""What a bind can come to other than a route. All carry what was asked for and what to do about it."""

from __future__ import annotations

from .model import CellTarget, Target
from .readiness import Readiness, Refusal


class PoolError(Exception):
    """Base of the pool's errors to its user."""


class NoCoverageError(PoolError):
    """No tunnel can take the bind, and policy says not to wait (any longer)."""

    def __init__(self, target: Target, why: Refusal, readiness: Readiness, waited_s: float) -> None:
        super().__init__(
            f"no tunnel to {spell(target)} ({why.value}, waited {waited_s:.1f} s; the pool is {readiness}):"
            " offer it to another worker, or try again later"
        )
        self.target, self.why, self.readiness, self.waited_s = target, why, readiness, waited_s


class PoolClosingError(NoCoverageError):
    """The pool is shutting down: nothing is bound any more."""


class GoDirectError(PoolError):
    """No tunnel can take the bind, and policy says to go round the pool: make a call of your own for this request."""

    def __init__(self, target: Target) -> None:
        super().__init__(f"no tunnel to {spell(target)}: policy is a direct call for this one request")
        self.target = target


def spell(target: Target) -> str:
    """For people."""
    if isinstance(target, CellTarget):
        return f"any worker of cell {target.cell}"
    return f"worker {target.worker}" + (f" as process {target.incarnation}" if target.incarnation else "")
