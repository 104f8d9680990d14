"""Contours: what role a writer plays, and the only ways from one to the next.

    Warm      connected and validated, not for new binds
    Active    preferred for new binds
    Draining  no new regular binds; bound sessions finish

A writer whose tunnel breaks is gone from whichever contour it was in; a Warm one whose generation came to nothing is
given up (it never had a session). All else is in the table, and a move that is not in it is a bug.
"""

from __future__ import annotations

from enum import Enum

from .model import PoolBugError


class Contour(Enum):
    """Where a writer is; GONE is not stored."""

    WARM = "warm"
    ACTIVE = "active"
    DRAINING = "draining"
    GONE = "gone"


class Move(Enum):
    """Why a writer goes from one contour to another."""

    COMMITTED = "committed"  # its generation
    LACKED_COVERAGE = "lacked-coverage"  # its cell or endpoint
    COVERED = "covered"  # by a newer generation's commit
    LEFT_STALE = "left-stale"  # by a commit that could not cover it: a fallback
    ENDPOINT_GONE = "endpoint-gone"
    REPLACED = "replaced"
    SHRUNK = "shrunk"  # the floor asks for fewer
    OPERATOR = "operator"
    SHUTDOWN = "shutdown"
    EMPTIED = "emptied"
    DEADLINE = "deadline"
    THRESHOLD = "threshold"
    AT_ONCE = "at-once"  # the control path: a commit that closes, an operator, the end of the process
    ABANDONED = "abandoned"
    LOST = "lost"


_C, _M = Contour, Move

TABLE: dict[tuple[Contour, Move], Contour] = {
    (_C.WARM, _M.COMMITTED): _C.ACTIVE,
    (_C.WARM, _M.LACKED_COVERAGE): _C.ACTIVE,
    **{
        (_C.ACTIVE, move): _C.DRAINING
        for move in (
            _M.COVERED,
            _M.LEFT_STALE,
            _M.ENDPOINT_GONE,
            _M.REPLACED,
            _M.SHRUNK,
            _M.OPERATOR,
            _M.SHUTDOWN,
        )
    },
    **{(_C.DRAINING, move): _C.GONE for move in (_M.EMPTIED, _M.DEADLINE, _M.THRESHOLD, _M.AT_ONCE)},
    (_C.WARM, _M.ABANDONED): _C.GONE,
    **{(contour, _M.LOST): _C.GONE for contour in (_C.WARM, _C.ACTIVE, _C.DRAINING)},
}


def after(contour: Contour, move: Move) -> Contour:
    """Where the move leads. Raises PoolBugError if there is no such move."""
    try:
        return TABLE[contour, move]
    except KeyError:
        raise PoolBugError(f"no writer goes from {contour.value} by {move.value}") from None
