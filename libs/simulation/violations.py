"""What an invariant says when it is broken."""

from __future__ import annotations


class ViolationError(AssertionError):
    """`invariant` by name; the run adds seed, step and the trace's tail."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant, self.detail = invariant, detail
