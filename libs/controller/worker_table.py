"""The worker's transition table: the life of one assignment.

Theory of operation
===================

    (offer) -- checks pass --> RESERVING -- reserved --> RESTORING or QUEUED; refused --> gone
    RESTORING -- done, or failed: what is missing will be prefilled --> QUEUED
    QUEUED    -- lane granted --> PREFILLING
    PREFILLING -- whole input computed --> DECODING
    DECODING  -- tokens ... finished or failed --> ENDING (the result is out; the last iteration still touches pages)
    ENDING    -- quiesced --> gone, and the unused pages are released

Cancel (by the router, a lost tunnel, or the end of a drain) fences at once: from RESERVING to VOIDED, from a running
phase to FENCED. A fenced assignment says nothing more to anybody, but its pages stay reserved until the local
operation has quiesced: releasing them under a running kernel or copy is a use after free.

Live, prefill and decode are one runtime job (`StartRun`); its events move the assignment along. PREFILLING may be
skipped in what the runtime reports (`LaneGranted` is optional). An event that has no row here and comes from our own
side is a bug and raises, except in VOIDED, FENCED and ENDING, or after the end, where late local events are normal
and fenced.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where an assignment is."""

    RESERVING = "reserving"
    VOIDED = "voided"  # cancelled while the reservation was being made
    RESTORING = "restoring"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDING = "ending"  # result sent, operation not yet quiesced
    FENCED = "fenced"  # cancelled, operation not yet quiesced
    GONE = "gone"

    __hash__ = object.__hash__  # a member is one object: by default its name is hashed anew each time


class Trigger(Enum):
    """What an event means for its assignment."""

    RESERVED = "reserved"
    REFUSED = "refused"
    FETCH_STARTED = "fetch-started"
    RESTORED = "restored"
    RESTORE_FAILED = "restore-failed"
    LANE_GRANTED = "lane-granted"
    PREFILLED = "prefilled"
    TOKENS = "tokens"
    FINISHED = "finished"
    RUN_FAILED = "run-failed"
    QUIESCED = "quiesced"
    CANCEL = "cancel"  # by the router, or the grace period's end
    TUNNEL_LOST = "tunnel-lost"

    __hash__ = object.__hash__  # a member is one object: by default its name is hashed anew each time


_P, _T = Phase, Trigger
RUNNING = (_P.RESTORING, _P.QUEUED, _P.PREFILLING, _P.DECODING)

TABLE: dict[tuple[Phase, Trigger], frozenset[Phase]] = {
    (_P.RESERVING, _T.RESERVED): frozenset({_P.RESTORING, _P.QUEUED}),
    (_P.RESERVING, _T.REFUSED): frozenset({_P.GONE}),
    (_P.VOIDED, _T.RESERVED): frozenset({_P.GONE}),
    (_P.VOIDED, _T.REFUSED): frozenset({_P.GONE}),
    (_P.RESTORING, _T.FETCH_STARTED): frozenset({_P.RESTORING}),
    (_P.RESTORING, _T.RESTORED): frozenset({_P.QUEUED}),
    (_P.RESTORING, _T.RESTORE_FAILED): frozenset({_P.QUEUED}),
    (_P.QUEUED, _T.LANE_GRANTED): frozenset({_P.PREFILLING}),
    (_P.QUEUED, _T.PREFILLED): frozenset({_P.DECODING}),
    (_P.PREFILLING, _T.PREFILLED): frozenset({_P.DECODING}),
    (_P.DECODING, _T.TOKENS): frozenset({_P.DECODING}),
    (_P.DECODING, _T.FINISHED): frozenset({_P.ENDING}),
    **{(phase, _T.RUN_FAILED): frozenset({_P.ENDING}) for phase in (_P.QUEUED, _P.PREFILLING, _P.DECODING)},
    (_P.RESERVING, _T.CANCEL): frozenset({_P.VOIDED}),
    (_P.RESERVING, _T.TUNNEL_LOST): frozenset({_P.VOIDED}),
    **{(phase, trigger): frozenset({_P.FENCED}) for phase in RUNNING for trigger in (_T.CANCEL, _T.TUNNEL_LOST)},
    (_P.ENDING, _T.QUIESCED): frozenset({_P.GONE}),
    (_P.FENCED, _T.QUIESCED): frozenset({_P.GONE}),
}
