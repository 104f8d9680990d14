"""Errors of the page pool. `PageStateError` is a bug of ours; `InsufficientPagesError` and `PrefixGoneError` are
answers.
"""

from __future__ import annotations

from collections.abc import Mapping


class PageStateError(AssertionError):
    """A page was about to do something its state does not allow, or the books do not balance."""

    def __init__(self, group: str, page: int, problem: str) -> None:
        super().__init__(f"page {page} of {group}: {problem}")
        self.group = group
        self.page = page


class IntegrityError(AssertionError):
    """`check_integrity` found the listed contradictions."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems[:20]))
        self.problems = problems


class ReservationError(Exception):
    """Base of refusals: nothing was reserved and nothing evicted."""


class InsufficientPagesError(ReservationError):
    """The demand exceeds what is free plus what may be evicted. Numbers are pages, by group."""

    def __init__(self, demand: Mapping[str, int], free: Mapping[str, int], evictable: Mapping[str, int]) -> None:
        lacking = ", ".join(
            f"{group}: {count} needed, {free[group]} free, {evictable[group]} evictable"
            for group, count in demand.items()
            if count > free[group] + evictable[group]
        )
        some = ", ".join(f"{group}: {count} needed, {free[group]} free" for group, count in demand.items())
        super().__init__(lacking or f"{some}; what could be evicted frees too little of what is shared")
        self.demand, self.free, self.evictable = dict(demand), dict(free), dict(evictable)


class PrefixGoneError(ReservationError):
    """The prefix the offer counts on is not resident (any more)."""

    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(f"{wanted} resident tokens wanted, {found} found")
        self.wanted, self.found = wanted, found


class UnknownReservationError(KeyError):
    """No such reservation: it was never made, or was released."""
