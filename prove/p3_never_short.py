"""An accepted request never fails for want of pages: random mixes on a pool 95 % full, and with one page left out.

The check is the one that would catch the bug: with the page for the copy of a partial tail left out of the demand,
mixes fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prove.checks import Checks
from prove.page_mixes import OCCUPIED, kinds, play
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from services.worker.pages.admission import Admission
from services.worker.pages.residency import Match

CLAIM = Claim(
    "3-never-short",
    "2,000 random mixes at 95 % occupancy with forks and shared tails: no accepted request lacks a page; without the "
    "copy-on-write page some do",
    seed=35,
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    mixes = 2_000 if size is Size.FULL else 10
    first = CLAIM.seed * 1_000_000
    counts = play(range(first, first + mixes))
    checks = Checks()
    checks.check("accepted requests that ran short", [*counts.failures], [], not counts.failures)
    checks.check("occupancy", round(counts.least_occupied, 3), f">= {OCCUPIED}", counts.least_occupied >= OCCUPIED)
    checks.check("forks inside a page", counts.partial, ">= mixes", counts.partial >= mixes)
    checks.check("refused for want of pages", counts.refused, "> 0", counts.refused > 0)
    with without_the_copied_page():
        missed = play(range(first, first + mixes), stop_at=10)
    checks.check("failures without the copy-on-write page", kinds(missed.failures), "> 0", bool(missed.failures))
    details = {
        "mixes": counts.mixes,
        "accepted": counts.accepted,
        "refused": counts.refused,
        "forks": counts.forks,
        "partial": counts.partial,
        "leases": counts.leases,
        "cancelled": counts.cancelled,
        "evicted_pages": counts.evicted_pages,
    }
    return checks.outcome(details)


@contextmanager
def without_the_copied_page() -> Iterator[None]:
    """The planted bug: a branch that begins inside a page counts that page as its own already."""
    honest = Admission._first_new

    def too_few(self: Admission, match: Match | None, claims: bool) -> int:
        return honest(self, match, claims) if match is None else -(-match.boundary // self._sizes.page)

    Admission._first_new = too_few  # type: ignore[method-assign]
    try:
        yield
    finally:
        Admission._first_new = honest  # type: ignore[method-assign]
