"""The steps that concern tunnels coming and going: publication, failed dials, losses."""

from __future__ import annotations

from .books import Books
from .contours import Move
from .effects import Notice
from .events import End
from .inventory import WriterRecord
from .mapping import goodbye, supersede
from .model import EndpointKey, WriterId
from .refill import Attempt
from .replacement import Phase


def connected(books: Books, writer: WriterId) -> None:
    """A validated tunnel asks to be published: under the publication guard, in one step with what it replaces."""
    attempt = books.refill.end(writer)
    if attempt is None or not _current(books, attempt):
        books.refill.counts.stale += attempt is not None
        books.replacements.release(writer)
        books.out.refused.append(writer)
        return
    key = attempt.endpoint.key
    books.refill.connected(key)
    books.roster.reached(key)
    entry = books.roster.get(key)
    assert entry is not None
    # Its cells are those of the map as it is now.
    record = WriterRecord(writer, entry.endpoint, attempt.generation, books.now, attempt.endpoint.incarnation)
    victim = _retire_victim(books, attempt)
    books.inventory.add(record, books.now)
    if victim or record.generation == books.generations.active:
        books.activate(record, Move.COMMITTED)
    books.out.published.append(writer)


def failed(books: Books, writer: WriterId) -> None:
    """A dial came to nothing."""
    attempt = _over(books, writer)
    if attempt is None:
        return
    key = attempt.endpoint.key
    if books.roster.get(key) is None:
        return
    if books.refill.failed(key, books.policy, key in books.outage(), books.chance, books.now):
        _warn_quarantined(books, key)


def abandoned(books: Books, writer: WriterId) -> None:
    """A dial was given up here."""
    if _over(books, writer) is not None:
        books.refill.counts.abandoned += 1


def ended(books: Books, writer: WriterId, end: End) -> None:
    """A writer is gone, with its routes. Whoever prepared its successor is released."""
    record = books.inventory.remove(writer, books.now)
    if record is None:
        return
    books.replacements.gone(writer)
    key = record.key
    entry = books.roster.get(key)
    if entry is None:
        books.inventory.forget_losses([key])
    if record.closing is not None or entry is None:
        return
    if end is End.LEAVING:
        books.refill.left(key, books.policy, books.now)
        goodbye(books, key)
    elif end is End.LOST and not entry.drained:
        outage = key in books.outage()
        if books.refill.broke(key, record.opened_at, books.policy, outage, books.chance, books.now):
            _warn_quarantined(books, key)


def identified(books: Books, writer: WriterId, incarnation: int) -> None:
    """The process behind a writer has said which it is."""
    record = books.inventory.get(writer)
    if record is None or incarnation <= 0:
        return
    books.inventory.identify(record, incarnation)
    entry = books.roster.get(record.key)
    if entry is not None:
        supersede(books, entry.endpoint)


def probed(books: Books, key: EndpointKey, succeeded: bool) -> None:
    """A probe is over: an endpoint that answers rests no longer."""
    books.probes.ended(key, succeeded)
    if succeeded:
        books.refill.renew(key)


def _current(books: Books, attempt: Attempt) -> bool:
    """Whether the dial's generation and endpoint are still what they were: stale tasks publish nothing."""
    entry = books.roster.get(attempt.endpoint.key)
    if not books.running or entry is None or entry.drained:
        return False
    if attempt.endpoint.incarnation < entry.endpoint.incarnation:
        return False
    if attempt.generation == books.generations.active:
        return True
    pending = books.generations.pending
    return (
        pending is not None
        and attempt.generation == pending.key.generation
        and attempt.endpoint.key in pending.map.by_key
    )


def _retire_victim(books: Books, attempt: Attempt) -> bool:
    """The predecessor, if there is one, moves to Retiring before the successor is registered. Whether one did."""
    if attempt.replaces is None:
        return False
    victim = books.inventory.get(attempt.replaces)
    if victim is None or not victim.active or books.replacements.phase(victim.writer) is not Phase.PREPARING:
        books.replacements.release(attempt.writer)
        return False
    if books.replacements.commit(attempt.writer) != victim.writer:
        return False
    books.drain(victim, Move.REPLACED)
    return True


def _over(books: Books, writer: WriterId) -> Attempt | None:
    books.replacements.release(writer)
    return books.refill.end(writer)


def _warn_quarantined(books: Books, key: EndpointKey) -> None:
    books.out.warn(Notice.QUARANTINED, f"{key.worker} at {key.address} for {books.policy.quarantine_s:g} s")
