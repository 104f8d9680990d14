"""The router's transition table: what can happen to one request, and where that may lead.

Theory of operation
===================

Each request is one automaton; they share only the fair queue, the prompt guard and freed slots. An event is first
*fenced* (is it about the active assignment of a live request, from the worker that has it?), then *classified* into one
of the triggers below, then looked up here. A pair that is not in the table is no transition: from outside it is
fenced as WRONG_PHASE, from our own shell too (a plan or timer may cross a terminal event).

    PLANNING  -- the shell ranks candidates --> OFFERED or HELD or WAITING or the end
    WAITING   -- capacity may have come (WOKEN) --> PLANNING
    HELD      -- its best worker has answered an offer; what it is held for is there, late or lost --> PLANNING
    OFFERED   -- accepted --> ACCEPTED; declined, timed out --> OFFERED (next candidate) or HELD, PLANNING, WAITING
    ACCEPTED  -- first delta --> STREAMING
    STREAMING -- deltas; a loss here means *resume*: PLANNING with the delivered tokens appended

A row names the states its action may leave the request in; the machine checks that after every action. DONE is not
stored: a request that is done is forgotten, and all that comes later is fenced as UNKNOWN_REQUEST.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a request is."""

    PLANNING = "planning"
    WAITING = "waiting"
    HELD = "held"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    DONE = "done"

    __hash__ = object.__hash__  # a member is one object: by default its name is hashed anew each time


class Trigger(Enum):
    """What a fenced event means for its request."""

    PLAN_RANKED = "plan-ranked"
    PLAN_BLOCKED = "plan-blocked"  # nothing feasible now, but waiting may help
    PLAN_IMPOSSIBLE = "plan-impossible"
    WOKEN = "woken"
    WINDOW_OPEN = "window-open"  # the worker it would go to may be sent an offer more
    PREFIX_NEWS = "prefix-news"  # of who computes the prefix it is held for
    HOLD_OVER = "hold-over"  # it was held long enough
    REPLY_ACCEPTED = "reply-accepted"
    REPLY_DECLINED = "reply-declined"
    OFFER_TIMEOUT = "offer-timeout"
    DELTA = "delta"
    RESULT_COMPLETED = "result-completed"
    RESULT_SHORT = "result-short"  # completed, but tokens of it never arrived
    RESULT_FAILED = "result-failed"
    RESULT_CANCELLED = "result-cancelled"  # though nobody here cancelled
    WORKER_LOST = "worker-lost"
    WORKER_RETIRED = "worker-retired"
    ROUTE_DROPPED = "route-dropped"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"

    __hash__ = object.__hash__  # a member is one object: by default its name is hashed anew each time


_P, _T = Phase, Trigger
# What may follow when an attempt has ended without success: the next candidate, at once or once its worker can be
# asked, a new plan, the queue, or the end.
_ONWARD = frozenset({_P.OFFERED, _P.HELD, _P.PLANNING, _P.WAITING, _P.DONE})
_DONE = frozenset({_P.DONE})

TABLE: dict[tuple[Phase, Trigger], frozenset[Phase]] = {
    (_P.PLANNING, _T.PLAN_RANKED): _ONWARD,
    (_P.PLANNING, _T.PLAN_BLOCKED): frozenset({_P.WAITING, _P.PLANNING, _P.DONE}),
    (_P.PLANNING, _T.PLAN_IMPOSSIBLE): _DONE,
    (_P.WAITING, _T.WOKEN): frozenset({_P.PLANNING, _P.DONE}),
    **{
        (_P.HELD, trigger): frozenset({_P.PLANNING, _P.DONE})
        for trigger in (_T.WINDOW_OPEN, _T.PREFIX_NEWS, _T.HOLD_OVER)
    },
    (_P.OFFERED, _T.REPLY_ACCEPTED): frozenset({_P.ACCEPTED}),
    (_P.OFFERED, _T.REPLY_DECLINED): _ONWARD,
    (_P.OFFERED, _T.OFFER_TIMEOUT): _ONWARD,
    # A delta or result may overtake the reply where messages are reordered: it implies acceptance.
    **{(phase, _T.DELTA): frozenset({_P.STREAMING}) for phase in (_P.OFFERED, _P.ACCEPTED, _P.STREAMING)},
    **{
        (phase, trigger): _DONE if trigger is _T.RESULT_COMPLETED else _ONWARD
        for phase in (_P.OFFERED, _P.ACCEPTED, _P.STREAMING)
        for trigger in (
            _T.RESULT_COMPLETED,
            _T.RESULT_SHORT,
            _T.RESULT_FAILED,
            _T.RESULT_CANCELLED,
            _T.WORKER_LOST,
            _T.WORKER_RETIRED,
            _T.ROUTE_DROPPED,
        )
    },
    **{
        (phase, trigger): _DONE
        for phase in (_P.PLANNING, _P.WAITING, _P.HELD, _P.OFFERED, _P.ACCEPTED, _P.STREAMING)
        for trigger in (_T.CANCELLED, _T.DEADLINE)
    },
}
