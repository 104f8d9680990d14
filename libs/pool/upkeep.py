"""The steps that hold the pool to its policy, done after every event that could have changed something."""

from __future__ import annotations

from .books import Books
from .contours import Contour, Move
from .coverage import Cover, cover, groups_of
from .draining import demotable, sweep
from .effects import Dial, Notice
from .floor import stand_in
from .generation import is_fresh, uncovered
from .inventory import WriterRecord
from .model import Endpoint, EndpointKey
from .refill import Need
from .replacement import Phase


def set_floors(books: Books) -> None:
    """What every endpoint should have now."""
    policy, now = books.policy, books.now
    endpoints = books.roster.dialable()
    busy = {cell for record in books.inventory if record.bound for cell in record.endpoint.cells}
    books.floors.update(policy, books.wanted_cells(), busy, now)
    base = books.floors.targets(policy, endpoints, books.sole(), now)
    if not policy.cell_refill:
        books.targets = base
        return
    short = {}
    for endpoint in endpoints:
        lacking = base[endpoint.key].count - len(_active(books, endpoint.key))
        if lacking > 0 and books.refill.failing(endpoint.key, policy, now):
            short[endpoint.key] = lacking
    books.floors.note_short(short, endpoints, now)
    books.targets = stand_in(base, endpoints, short)


def promote(books: Books) -> None:
    """Warm writers of the pending generation whose cell, cell-family or endpoint lacks coverage serve at once."""
    warm = [record for record in books.inventory if record.contour is Contour.WARM and record.live]
    if not warm:
        return
    found = books.cover()
    for record in warm:
        lacks = not found.endpoints[record.key] or any(
            not found.groups[group] or found.cells[group.cell] < books.policy.survivability_min
            for group in record.endpoint.groups
        )
        if lacks:
            books.activate(record, Move.LACKED_COVERAGE)
            found.add(record)


def shrink(books: Books) -> None:
    """Writers above the floor drain, those without routes only; never below a cell's minimum or an endpoint's last."""
    found: Cover | None = None
    wanted = books.wanted_cells()
    for endpoint in books.roster.dialable():
        target = books.targets[endpoint.key].count
        active = _active(books, endpoint.key)
        surplus = len(active) - target
        if surplus <= 0 or not books.floors.settled(books.policy, endpoint.cells, books.now):
            continue
        if found is None:
            found = books.cover()
        idle = [r for r in active if not r.bound and books.replacements.phase(r.writer) is Phase.OPEN]
        # The unwell ones first, then the youngest: old tunnels have shown that they last.
        for record in sorted(idle, key=lambda record: (not record.degraded, -record.writer))[:surplus]:
            if found.spares((record,), wanted, books.policy.survivability_min):
                found.add(record, -1)
                books.drain(record, Move.SHRUNK)


def drain(books: Books) -> None:
    """Fallbacks whose time is over, and draining writers that go."""
    policy, now, inventory = books.policy, books.now, books.inventory
    # What vanished is still wanted, for as long as its grace lasts.
    wanted = groups_of(books.roster.dialable())
    listed = {endpoint.key for endpoint in books.roster.listed()}
    fallbacks = [record for record in inventory if record.fallback]
    if fallbacks:
        active, serving = cover(inventory, lambda record: record.active), books.cover()
        for record in fallbacks:
            if demotable(record, active, serving, listed, wanted, policy, now):
                inventory.set_fallback(record, False)
                serving.add(record, -1)
    if books.generations.left_missing:
        active = cover(inventory, lambda record: record.active)
        books.generations.left_missing = uncovered(books.generations.left_missing & wanted, active)
    found = sweep(tuple(inventory), policy, now)
    for record in found.warn:
        record.warned = True
        books.out.warn(Notice.DRAIN_TTL, f"writer {record.writer} to {record.key.worker}, {record.bound} routes")
    for record, move in found.close:
        books.close(record, move)


def dial(books: Books) -> float | None:
    """Starts the dials that are needed and allowed; when the next may be started."""
    needs = [*_floor_needs(books), *_pending_needs(books), *_replacements(books)]
    if not needs:
        return None
    chosen, wake_at = books.refill.allowed(needs, books.policy, books.now, books.outage())
    for need in chosen:
        attempt = books.refill.begin(need, books.now)
        if need.replaces is not None:
            books.replacements.reserve(need.replaces, attempt.writer)
            books.rotation.began(need.endpoint.key, books.now)
        books.out.dials.append(Dial(attempt.writer, need.endpoint, need.generation, need.replaces))
    return wake_at


def prune(books: Books) -> None:
    """Dials for a generation that is neither active nor pending, or whose victim is gone, are given up."""
    current = books.generations.current
    preparing = {successor for successor, _victim in books.replacements}
    books.cancel(
        attempt
        for attempt in books.refill.attempts.values()
        if attempt.generation not in current or (attempt.replaces is not None and attempt.writer not in preparing)
    )


def probe(books: Books) -> None:
    """Endpoints without writers and dials that rest or have no floor."""
    unused = [
        endpoint
        for endpoint in books.roster.dialable()
        if not any(record.live for record in books.inventory.of_endpoint(endpoint.key))
        and not books.refill.of_endpoint(endpoint.key)
        and (books.refill.quarantined(endpoint.key, books.now) or not books.targets[endpoint.key].count)
    ]
    due = set(books.probes.due(books.policy, [endpoint.key for endpoint in unused], books.now))
    books.out.probes.extend(endpoint for endpoint in unused if endpoint.key in due)


def _active(books: Books, key: EndpointKey) -> list[WriterRecord]:
    return [record for record in books.inventory.of_endpoint(key) if record.active]


def _floor_needs(books: Books) -> list[Need]:
    """What the active generation lacks: endpoints it has committed to, and vanished ones in their grace."""
    generations = books.generations
    committed = generations.committed.by_key if generations.committed is not None else {}
    needs = []
    for entry in books.roster:
        endpoint = entry.endpoint
        if entry.drained or (entry.listed and endpoint.key not in committed):
            continue
        under_way = sum(
            attempt.generation == generations.active and attempt.replaces is None
            for attempt in books.refill.of_endpoint(endpoint.key)
        )
        lacking = books.targets[endpoint.key].count - len(_active(books, endpoint.key)) - under_way
        needs += [Need(endpoint, generations.active)] * max(0, lacking)
    return _spread(needs)


def _pending_needs(books: Books) -> list[Need]:
    """What the pending generation lacks of its own floor."""
    pending = books.generations.pending
    if pending is None:
        return []
    number = pending.key.generation
    counted = {number} if pending.fresh else {number, books.generations.active}
    needs = []
    for endpoint in books.roster.listed():
        if endpoint.key not in pending.map.by_key:
            continue
        fresh = sum(is_fresh(record, pending) for record in books.inventory.of_endpoint(endpoint.key))
        under_way = sum(
            attempt.generation in counted
            and attempt.replaces is None
            and attempt.endpoint.incarnation >= endpoint.incarnation
            for attempt in books.refill.of_endpoint(endpoint.key)
        )
        lacking = books.targets[endpoint.key].count - fresh - under_way
        needs += [Need(endpoint, number)] * max(0, lacking)
    return _spread(needs)


def _replacements(books: Books) -> list[Need]:
    policy = books.policy
    if not policy.replace_degraded_s and not policy.shadow_writers:
        return []
    sole = books.sole()
    preparing = {books.refill.attempts[successor].endpoint.key for successor, _ in books.replacements}
    needs = []
    for endpoint in books.roster.listed():
        if endpoint.key in preparing:
            continue
        open_ones = [
            record for record in _active(books, endpoint.key) if books.replacements.phase(record.writer) is Phase.OPEN
        ]
        victim = books.rotation.victim(policy, endpoint.key, open_ones, endpoint.key in sole, books.now)
        if victim is not None:
            needs.append(Need(endpoint, books.generations.active, victim.writer))
    return needs


def _spread(needs: list[Need]) -> list[Need]:
    """Every endpoint's first before anybody's second: where dials are rationed, coverage comes before floors."""
    seen: dict[EndpointKey, int] = {}
    ranked: list[tuple[int, Endpoint, Need]] = []
    for need in needs:
        rank = seen[need.endpoint.key] = seen.get(need.endpoint.key, -1) + 1
        ranked.append((rank, need.endpoint, need))
    ranked.sort(key=lambda item: (item[0], item[1].key))
    return [need for _, _, need in ranked]
