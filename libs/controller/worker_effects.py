"""What a worker machine asks of its shell: page pool, restore, runtime and tunnels. The shell obeys, in order."""

from __future__ import annotations

from dataclasses import dataclass

from libs.controller.protocol import AssignmentId, Delta, GenerationRequest, Offer, OfferReply, Result


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve atomically the offer's incremental demand; answer `ReservationMade` or `ReservationRefused`, always.

    The pool protects the resident part of the prefix, plans eligible durable evictions and counts one page more for a
    shared partial tail. `offer.candidate` says what the router believed to be resident.
    """

    offer: Offer


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the offer on its tunnel."""

    tunnel: int
    reply: OfferReply


@dataclass(frozen=True, slots=True)
class StartRestore:
    """Bring `offer.chain` behind `resident_tokens` into the reserved pages, off the device loop.

    Answer `RestoreDone` or `RestoreFailed`, or, after `Stop`, `Quiesced`.
    """

    offer: Offer
    resident_tokens: int


@dataclass(frozen=True, slots=True)
class StartRun:
    """Queue prefill of `request.tokens[cached_tokens:]` and then decode, one runtime job.

    It answers `LaneGranted` (optional), `PrefillDone`, `TokensDrawn`…, then `Finished` or `RunFailed`, then `Quiesced`.
    """

    assignment: AssignmentId
    request: GenerationRequest
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the running restore or run at its next boundary; answer `Quiesced`, always (also if it just ended)."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class EmitDelta:
    """Send on the assignment's route."""

    tunnel: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class EmitResult:
    """Send on the assignment's route, and close it."""

    tunnel: int
    result: Result


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what is reserved and unused; filled pages stay resident and evictable. Exactly once per reservation."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class Drained:
    """Draining and nothing under way. `cancelled`: how many assignments the end of the grace period cut."""

    cancelled: int


WorkerEffect = Reserve | Reply | StartRestore | StartRun | Stop | EmitDelta | EmitResult | Release | Drained
