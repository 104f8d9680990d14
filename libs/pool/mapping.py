"""The steps that concern the map: taking it, letting vanished endpoints lapse, operators' drains."""

from __future__ import annotations

from .books import Books
from .contours import Move
from .coverage import cells_of
from .desired import DesiredMap
from .effects import Notice
from .generation import Trigger
from .model import Endpoint, EndpointKey
from .swaps import drop_pending, want


def settle(books: Books) -> None:
    """Take the map that was read, if it holds still."""
    desired = books.desired
    refused_before = desired.empty_since
    taken = desired.settle(books.policy, any(record.live for record in books.inventory), books.now)
    if desired.empty_since is not None and refused_before is None:
        books.out.warn(Notice.EMPTY_MAP_REFUSED, f"revision {desired.revision_read}")
    if taken is not None:
        _take(books, taken)


def lapse(books: Books) -> None:
    """Vanished endpoints whose grace is over go, as far as no cell falls below its minimum by it."""
    for key in _lapsing(books):
        books.roster.lapse(key)
        books.out.warn(Notice.ENDPOINT_LAPSED, f"{key.worker} at {key.address}")
        books.forget([key])


def drain_worker(books: Books, worker: str, address: str, drained: bool) -> None:
    """An operator's word: it stands above coverage."""
    keys = [e.endpoint.key for e in books.roster if e.endpoint.worker == worker and address in ("", e.endpoint.address)]
    for key in keys:
        books.roster.drain(key, drained)
        if not drained:
            books.refill.renew(key)
            continue
        books.cancel(books.refill.of_endpoint(key))
        for record in books.inventory.of_endpoint(key):
            books.withdraw(record, Move.OPERATOR)
        if books.roster.get(key) is None:
            books.forget([key])


def goodbye(books: Books, key: EndpointKey) -> None:
    """A worker closed its tunnel because it leaves."""
    if books.roster.goodbye(key):
        books.forget([key])


def supersede(books: Books, endpoint: Endpoint) -> None:
    """Writers known to lead to a process before this one are worth nothing."""
    for record in books.inventory.of_endpoint(endpoint.key):
        if record.learnt and record.incarnation < endpoint.incarnation:
            record.superseded = True
            books.evict(record, Move.REPLACED)


def _take(books: Books, taken: DesiredMap) -> None:
    changes = books.roster.apply(taken, books.now)
    for endpoint in changes.altered:
        books.inventory.relist(endpoint)
        supersede(books, endpoint)
    for key in (*changes.renewed, *changes.returned):
        books.refill.renew(key)
    for key in changes.returned:
        books.out.warn(Notice.ENDPOINT_RETURNED, f"{key.worker} at {key.address}")
    for key in changes.vanished:
        books.out.warn(Notice.ENDPOINT_VANISHED, f"{key.worker} at {key.address}")
    books.forget(changes.gone)
    generations = books.generations
    if not generations.active:
        if taken.endpoints:
            generations.bootstrap(taken, books.now)
        return
    committed = generations.committed
    pending = generations.pending
    if committed is not None and committed.hash == taken.hash and not (pending is not None and pending.fresh):
        drop_pending(books)
    else:
        want(books, Trigger.MAP)


def _lapsing(books: Books) -> list[EndpointKey]:
    """Of those whose grace is over, all that whoever stays can do without: in the map or in its grace, it still wants
    its cells covered, whether or not it has tunnels of its own. Who vanished last stays first."""
    going = books.roster.overdue(books.policy, books.now)
    if not going:
        return going
    found = books.cover()
    while going:
        wanted = cells_of(endpoint for endpoint in books.roster.dialable() if endpoint.key not in going)
        writers = [record for key in going for record in books.inventory.of_endpoint(key) if record.serving]
        lost = found.short_without(writers, wanted, books.policy.survivability_min)
        if not lost:
            break
        needed = {record.key for record in writers if lost.intersection(record.endpoint.cells)}
        going.remove(next(key for key in reversed(going) if key in needed))
    return going
