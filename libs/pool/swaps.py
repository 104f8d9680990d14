"""The steps of a generation: wanted, kept, expired, committed."""

from __future__ import annotations

from .books import Books
from .contours import Contour, Move
from .effects import Notice
from .generation import (
    Assessment,
    GenerationKey,
    Obstacle,
    Pending,
    Trigger,
    assess,
    covers,
    is_fresh,
)
from .inventory import WriterRecord
from .knobs import StaleMode
from .model import EndpointKey


def want(books: Books, trigger: Trigger) -> None:
    """A generation for the taken map; writers of one that this supersedes are accepted for it or given up."""
    taken = books.desired.taken
    if taken is None or not books.generations.active:
        books.out.warn(Notice.SWAP_REFUSED, "there is no map yet")
        return
    before = books.generations.want(trigger, taken, books.now)
    if before is not None:
        _reaccept(books, before)


def drop_pending(books: Books) -> None:
    """The map is again what is committed: nothing is pending any more."""
    before = books.generations.drop()
    if before is not None:
        _orphan(books, before)


def keep(books: Books) -> None:
    """Expiry of the pending generation, and the clock's trigger."""
    generations, policy, now = books.generations, books.policy, books.now
    if generations.lapsed(policy, now):
        pending = generations.pending
        # The clock's own will is formed anew at its next time.
        wanted = pending is not None and bool(pending.triggers - {Trigger.PERIODIC})
        before = generations.renew(now) if wanted else generations.drop()
        assert before is not None
        generations.expired += not wanted
        books.out.warn(Notice.PENDING_EXPIRED, f"generation {before.key.generation}")
        _orphan(books, before)
    if not policy.reinit_interval_s or not generations.active:
        generations.reinit_at = None
    elif generations.reinit_at is None:
        schedule(books)
    elif now >= generations.reinit_at:
        schedule(books)
        if any(record.serving for record in books.inventory):
            want(books, Trigger.PERIODIC)


def schedule(books: Books) -> None:
    """When the clock wants the next generation."""
    policy = books.policy
    spread = policy.reinit_interval_s * policy.reinit_jitter
    books.generations.reinit_at = books.now + policy.reinit_interval_s + books.chance.uniform(-spread, spread)


def used(books: Books) -> frozenset[EndpointKey]:
    """Endpoints of the map that should have writers."""
    return frozenset(
        endpoint.key
        for endpoint in books.roster.listed()
        if endpoint.key not in books.targets or books.targets[endpoint.key].count
    )


def assessment(books: Books) -> Assessment | None:
    """What a commit would find now; None if nothing is pending."""
    pending = books.generations.pending
    if pending is None:
        return None
    return assess(pending, tuple(books.inventory), used(books), books.roster.dialable(), books.policy)


def due(books: Books) -> GenerationKey | None:
    """The generation that could be committed now."""
    found = assessment(books)
    pending = books.generations.pending
    if found is None or pending is None or found.obstacle is not Obstacle.NONE:
        return None
    return pending.key


def commit(books: Books, key: GenerationKey) -> bool:
    """Revalidates everything, then moves every writer to where the new generation wants it: all or nothing."""
    generations = books.generations
    obstacle = generations.validate(key, books.desired.taken, books.policy, books.now)
    found = assessment(books)
    pending = generations.pending
    if obstacle is Obstacle.NONE and found is not None:
        obstacle = found.obstacle
    if obstacle is not Obstacle.NONE or found is None or pending is None:
        generations.refused[obstacle] += 1
        return False
    fresh = {record.writer for record in books.inventory if is_fresh(record, pending)}
    for record in books.inventory:
        if record.standing:
            _place(books, record, record.writer in fresh, found, pending)
    left = frozenset(
        group
        for group in found.missing_groups
        for record in books.inventory
        if group in record.endpoint.groups
        if record.fallback
    )
    generations.commit(found.missing_groups, books.now)
    if found.missing_groups or found.missing_endpoints:
        missing = ", ".join(f"{group.cell}/{group.family}" for group in sorted(found.missing_groups))
        served = f", {len(left)} of them served by stale tunnels" if left else ""
        books.out.warn(Notice.COMMIT_LEFT_MISSING, f"generation {key.generation}: {missing}{served}")
    if books.policy.reinit_interval_s:
        schedule(books)
    return True


def _place(books: Books, record: WriterRecord, fresh: bool, found: Assessment, pending: Pending) -> None:
    number = pending.key.generation
    if fresh:
        record.generation = number
        if record.contour is Contour.WARM:
            books.activate(record, Move.COMMITTED)
        return
    if record.contour is Contour.WARM:
        books.close(record, Move.ABANDONED)
        return
    entry = books.roster.get(record.key)
    if entry is not None and not entry.listed:
        record.generation = number  # it vanished without a drain: its grace is not over
        return
    if covers(found, record):
        books.drain(record, Move.COVERED)
        if books.policy.close_covered:
            books.close(record, Move.AT_ONCE)
        return
    books.drain(record, Move.LEFT_STALE)
    until = books.now + books.policy.stale_ttl_s if books.policy.stale_mode is StaleMode.TTL else None
    books.inventory.set_fallback(record, True, until)


def _reaccept(books: Books, before: Pending) -> None:
    """Another map is wanted: writers to endpoints it lists too are accepted for it, one by one."""
    pending = books.generations.pending
    assert pending is not None
    for record in books.inventory:
        if record.generation != before.key.generation or not record.standing:
            continue
        endpoint = pending.map.by_key.get(record.key)
        if endpoint is not None and not (record.incarnation and record.incarnation < endpoint.incarnation):
            record.generation = pending.key.generation
        else:
            _unclaim(books, record)


def _orphan(books: Books, before: Pending) -> None:
    for record in books.inventory:
        if record.generation == before.key.generation and record.standing:
            _unclaim(books, record)


def _unclaim(books: Books, record: WriterRecord) -> None:
    """Its generation is no more: what serves already goes on in the active one, the rest is given up."""
    if record.contour is Contour.ACTIVE:
        record.generation = books.generations.active
    else:
        books.close(record, Move.ABANDONED)
