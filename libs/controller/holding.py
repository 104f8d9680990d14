"""Whether a request should wait for a long prefix that others are computing, instead of computing it too. Pure.

Theory of operation
===================

A hundred requests that begin alike and meet eight idle workers: to each of them an idle worker promises its first token
as soon as waiting beside a busy one does, so each of the eight would compute the beginning. Seven times its computing
time is lost to everybody who comes next, and nobody is the better for it. So once `prefix_copies` workers compute a
prefix (or have it in their pages where nobody can fetch it yet), a request whose best way would compute it anew is
*held* by its router:

- only where that is worth it: computing takes `hold_least_ms` or more and `hold_gain` times as long as fetching it from
  a peer, which the worker can do and which its own break-even allows;
- as long as predicted, and `hold_grace_ms` for the copy to memory and the word of it, and in all never longer than the
  request would have taken to its first token by computing it alone on an idle worker. Then it goes on as it would have.

When the prefix can be fetched, those that were held are *dealt*: the workers that need not compute it, as far as the
slowest is not behind the best by more than computing the prefix by `deal_gain`, take turns by the seat each request was
given when it was first held. By time alone the worker that has it would take nearly all: it answers at once while the
others fetch; and then it decodes for all while they idle.

Who comes a moment later, joins who computes it or finds it there, is dealt likewise while many come: to the worker that
has been given the fewest (`herds`). Where nobody but one worker could serve them, since the others cannot fetch it yet,
the next that is dealt to another computes it once more, up to `prefix_copies`: for that one it takes no longer than by
itself, and all that follow have two workers to go to.

Two routers know nothing of each other. Who would compute a long prefix that nobody has draws near ties by the name of
its first new chunk, not by its own: so both choose the same workers, and there are `prefix_copies` in all and not each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.continuation.chain import CHUNK_TOKENS
from libs.controller import table as rows
from libs.controller.bounds import Prefixes
from libs.controller.fleet import Fleet
from libs.controller.herds import Member
from libs.controller.knobs import PolicyKnobs
from libs.controller.policy import Draw, band_ms
from libs.controller.protocol import Tier
from libs.controller.router_events import Herd, Hold
from libs.controller.table import SOURCES, Table
from libs.controller.ways import Way

_PEER = SOURCES.index(Tier.PEER)
_GPU = len(SOURCES)  # the place of staging in a table's tiers
_READABLE = frozenset({Tier.RAM, Tier.SSD})  # from there peers read


@dataclass(frozen=True, slots=True)
class _Led:
    """What one worker has of a chain, or will have: up to `end`. `boundaries`: ends, names and arrivals."""

    end: int
    slot: int
    boundaries: Sequence[tuple[int, str, float]]

    def at(self, end: int) -> tuple[int, str, float]:
        """The least boundary from there on."""
        return min(one for one in self.boundaries if one[0] >= end)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one variant: its length and the bytes of a token, how many workers could take it, who has what,
    and what is known of it from before.
    """

    length: int
    token_bytes: int
    able: int
    prefixes: Prefixes
    fleet: Fleet
    table: Table
    now_ms: float
    knobs: PolicyKnobs
    herd: Herd | None


def hold(of: Request, best: Way, ways: Sequence[Way]) -> Hold | None:
    """Why the best way should not be taken yet; None = it should. `ways`: all that were found."""
    herd = of.herd
    if herd is not None and best.boundary >= herd.tokens:
        # It is there: but can the others fetch it, or only its leaders serve it?
        if herd.patience_ms <= 0 or _spreads(of, herd, ways):
            return None
        return _hold(of, best, 0)
    return _hold(of, best, best.boundary)


def worth_asking(prefixes: Prefixes, herd: Herd | None) -> bool:
    """Whether anything here has something to say of a plan."""
    return herd is not None or bool(prefixes.coming)


def drawn(of: Request, best: Way, ways: Sequence[Way]) -> Draw | None:
    """How a request that was held draws its worker; None = it was not held."""
    herd = of.herd
    if herd is None:
        return None
    if best.boundary < herd.tokens or not _spreads(of, herd, ways):
        return Draw(herd.prefix)
    return Draw(herd.prefix, herd.seat, herd.tokens * best.terms.prefill_ms / of.knobs.deal_gain, herd.tokens)


def joined(of: Request, best: Way, ways: Sequence[Way], member: Member | None) -> Draw | None:
    """How one of many that were not held draws its worker: dealt as those, if that spares it a long computation, but
    whom it is dealt to is decided when the near ties are known (`policy.seated`).
    """
    if member is None or member.seat < of.knobs.herd_least:
        return None
    spared_ms = best.boundary * best.terms.prefill_ms
    if spared_ms < of.knobs.hold_least_ms:
        return None
    # A worker that would compute a part of it again is none to deal to; and who goes on where the herd has nothing in
    # common any more is no reason to compute that once more.
    tokens = best.boundary // CHUNK_TOKENS * CHUNK_TOKENS
    dealt = Draw(member.prefix, 0, spared_ms / of.knobs.deal_gain, tokens)
    if tokens > member.end or not _wants_copy(of, ways, tokens, best.ttft_ms + dealt.band_ms):
        return dealt
    alone_ms = of.length * best.terms.prefill_ms + best.terms.first_ms
    return Draw(member.prefix, 0, max(0.0, band_ms(alone_ms, of.knobs) - best.ttft_ms))


def _wants_copy(of: Request, ways: Sequence[Way], tokens: int, last_ms: float) -> bool:
    """Whether one worker alone would serve the herd, as others can neither fetch the prefix nor compute it already."""
    copies = min(of.knobs.prefix_copies, of.able)
    takers = {way.terms.slot for way in ways if way.boundary >= tokens and way.ttft_ms <= last_ms}
    return len(takers) < copies and len(_led(of, tokens - 1)) < copies


def leads(of: Request, best: Way, full_end: int) -> bool:
    """Whether it would compute so much that others may come to wait for it."""
    return (full_end - best.boundary) * best.terms.prefill_ms >= of.knobs.hold_least_ms


def _spreads(of: Request, herd: Herd, ways: Sequence[Way]) -> bool:
    """Whether any worker that does not have it in its pages can read it."""
    device = of.prefixes.device
    return any([way.boundary >= herd.tokens and way.link >= 0 and device[way.terms.slot] < herd.tokens for way in ways])


def _hold(of: Request, best: Way, least: int) -> Hold | None:
    knobs, terms = of.knobs, best.terms
    led = _led(of, least)
    # Who was held already waits on if only one of them is left: nobody else need compute it.
    copies = min(knobs.prefix_copies, of.able) if of.herd is None else 1
    if not copies or len(led) < copies:
        return None
    end = led[copies - 1].end
    leaders = [one for one in led if one.end >= end]
    if of.herd is None and not any([one.slot in of.prefixes.coming for one in leaders]):
        return None  # nobody computes it: nothing is coming
    compute_ms = (end - least) * terms.prefill_ms
    if compute_ms < max(knobs.hold_least_ms, knobs.hold_gain * _fetch_ms(of, terms.slot, end - least)):
        return None
    views = [view for one in leaders if (view := of.fleet.view(of.fleet.index.names[one.slot])) is not None]
    if not any([cost.tier in _READABLE for view in views for cost in view.heartbeat.tiers]):
        return None
    alone_ms = (of.length - least) * terms.prefill_ms + terms.first_ms
    patience_ms = alone_ms if of.herd is None else of.herd.patience_ms
    remaining_ms = max(0.0, min([one.at(end)[2] for one in leaders]) - of.now_ms)
    if remaining_ms > patience_ms:
        return None
    wait_ms = min(remaining_ms + knobs.hold_grace_ms, patience_ms)
    named = tuple(sorted([(view.worker, view.heartbeat.epoch) for view in views]))
    return Hold(led[copies - 1].at(end)[1], end, named, wait_ms, alone_ms) if wait_ms > 0 else None


def _led(of: Request, least: int) -> list[_Led]:
    """Who has more than `least`, or will have it: the most first. What is overdue is not coming."""
    prefixes, late = of.prefixes, of.now_ms - of.knobs.hold_grace_ms
    found: dict[int, list[tuple[int, str, float]]] = {}
    for slot, boundaries in prefixes.coming.items():
        coming = [one for one in boundaries if one[0] > least and one[2] >= late]
        if coming:
            found[slot] = coming
    for slot in np.nonzero(prefixes.device > least)[0].tolist():
        end = int(prefixes.device[slot])
        found.setdefault(slot, []).append((end, prefixes.names[end], of.now_ms))
    led = [_Led(max(boundaries)[0], slot, boundaries) for slot, boundaries in found.items()]
    return sorted(led, key=lambda one: (-one.end, one.slot))


def _fetch_ms(of: Request, slot: int, tokens: int) -> float:
    """Of so many tokens from a peer into the worker's pages; it would never do it: infinite."""
    values, size = of.table.columns[slot], tokens * of.token_bytes
    if values[rows.ORDER + _PEER] >= rows.NO_WAY or tokens < values[rows.BREAK_EVEN + _PEER]:
        return float("inf")
    load_ms = values[rows.LATENCY + _PEER] + size * values[rows.PER_BYTE + _PEER]
    return load_ms + values[rows.LATENCY + _GPU] + size * values[rows.PER_BYTE + _GPU]
