"""The pool's six invariants over a world, checked around every event the core handles.

Each check reads what the others' owners say: bindings from the registry, coverage from the records before and after,
tokens from the two ends of each route.
"""

from collections import Counter
from collections.abc import Callable

from libs.pool.contours import Contour, Move
from libs.pool.effects import Ready
from libs.pool.events import BeginShutdown, CommitGeneration, DrainWorker, End, Ended, PoolEvent, SetPolicy
from libs.pool.generation import Obstacle
from libs.pool.model import Cell, WriterId
from libs.pool.replacement import Phase
from libs.tunnel import CloseReason
from tests.pool.world import World

# Ends that are no error: all tokens of such a route must have arrived.
QUIET = {CloseReason.DONE}


class Watch:
    """Set as a world's ``watch``."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.watch = self.around
        self.commits = 0
        self.refused = 0

    def around(self, event: PoolEvent, handle: Callable[[], Ready]) -> Ready:
        books = self.world.core.books
        keys = {r.writer: r.key for r in books.inventory}
        serving = {r.writer: r.endpoint.cells for r in books.inventory if r.serving}
        wanted = books.wanted_cells()
        generation = books.generations.active
        before = self.fingerprint() if isinstance(event, CommitGeneration) else None
        # Their worker has said goodbye: it ends them, or the next map that lacks it does.
        leaving = {
            r.writer for r in books.inventory if (entry := books.roster.get(r.key)) is not None and entry.leaving
        }
        retiring = dict(books.replacements.phases())
        ready = handle()
        if isinstance(event, CommitGeneration):
            self.all_or_nothing(event, generation, before, ready)
        if not isinstance(event, BeginShutdown | DrainWorker | SetPolicy):
            lost = leaving | ({event.writer} if isinstance(event, Ended) else set())
            if isinstance(event, Ended) and event.end is End.LEAVING:  # the worker speaks for all of its tunnels
                lost |= {writer for writer, key in keys.items() if key == keys.get(event.writer)}
            self.coverage_kept(serving, wanted & books.wanted_cells(), lost)
        self.successors(retiring)
        return ready

    # 1

    def bindings(self) -> None:
        """At rest of the cleanup worker: one active route per conn_id, and nobody holds what belongs to no route."""
        registry = self.world.registry
        live = [route for entry in registry.tunnels.values() for route in entry.routes.values()]
        ids = Counter(route.conn_id for route in live)
        assert not [conn_id for conn_id, times in ids.items() if times > 1], "two active routes of one conn_id"
        held = registry.snapshot()
        assert held.routes == len(live)
        assert held.cleanups == 0
        assert held.permits == held.routes, "a permit belongs to nobody"
        assert held.bindings == held.routes, "a binding of a route that ended"
        assert registry.counters.handler_errors == 0, "an invariant was violated while a route was cleaned up"

    def counts(self) -> None:
        """At rest of the cleanup worker: the core's counts are the registry's."""
        for record in self.world.records:
            tunnel = self.world.tunnels.get(record.writer)
            routes = len(tunnel.entry.routes) if tunnel is not None else 0
            assert record.bound == routes, f"writer {record.writer} counts {record.bound} routes, holds {routes}"

    # 2

    def no_dangling(self) -> None:
        """No binding names a writer that is gone; whoever was bound to one got exactly one close."""
        alive = set(self.world.registry.tunnels)
        assert {tunnel for tunnel, _ in self.world.registry.bindings} <= alive, "a binding names a lost writer"
        for session in self.world.sessions:
            assert len(session.closes) <= 1, "closed twice"
            gone = session.tunnel.tunnel_id not in alive
            assert not gone or len(session.closes) == 1, "bound to a lost writer and never told"

    # 3

    def coverage_kept(
        self,
        before: dict[WriterId, tuple[Cell, ...]],
        cells: frozenset[Cell],
        lost: set[WriterId],
    ) -> None:
        """No cell fell below its minimum by the pool's own act."""
        books = self.world.core.books
        minimum = books.policy.survivability_min
        now = {r.writer: r for r in books.inventory if r.serving}
        dead = lost | {r.writer for r in books.inventory if r.why is Move.REPLACED and r.closing is Move.AT_ONCE}
        for cell in cells:
            had = sum(cell in served for writer, served in before.items() if writer not in dead)
            has = sum(cell in record.endpoint.cells for record in now.values())
            assert has >= min(minimum, had), (
                f"cell {cell} went from {had} to {has} serving writers by the pool's own act"
            )

    # 4

    def fingerprint(self) -> tuple[object, ...]:
        books = self.world.core.books
        return (
            books.generations.active,
            books.generations.pending,
            tuple((r.writer, r.contour, r.generation, r.fallback, r.closing) for r in books.inventory),
        )

    def all_or_nothing(
        self, event: CommitGeneration, generation: int, before: tuple[object, ...] | None, ready: Ready
    ) -> None:
        """A commit moved the whole pool to its generation, or moved nothing to it."""
        books = self.world.core.books
        if books.generations.active == generation:
            self.refused += 1
            assert before is not None
            assert books.generations.active == before[0]
            pending = {r.writer for r in books.inventory if r.contour is Contour.DRAINING}
            was = {w for w, contour, *_ in before[2] if contour is Contour.DRAINING}  # type: ignore[attr-defined]
            moved = [r for r in books.inventory if r.writer in pending - was]
            assert not [r for r in moved if r.why in (Move.COVERED, Move.LEFT_STALE)], "half a commit"
            return
        self.commits += 1
        assert books.generations.active == event.key.generation, "another generation was committed than asked for"
        taken = books.desired.taken
        assert taken is not None
        assert (taken.hash, taken.revision) == (event.key.map_hash, event.key.revision), "a map that moved on"
        pending_after = books.generations.pending.key.generation if books.generations.pending else generation
        for record in books.inventory:
            if record.live and record.contour is not Contour.DRAINING:
                assert record.generation in (event.key.generation, pending_after), "left behind by a commit"
        assert books.generations.refused[Obstacle.NONE] == 0

    def successors(self, before: dict[WriterId, Phase]) -> None:
        """Retiring is final; Preparing goes nowhere else but Open, Retiring or gone; Retiring takes no binds."""
        for writer, phase in before.items():
            record = self.world.core.books.inventory.get(writer)
            now = self.world.core.books.replacements.phase(writer)
            if phase is Phase.RETIRING and record is not None:
                assert now is Phase.RETIRING
                assert not record.serving

    # 5 and 6

    def tokens(self) -> None:
        """Whoever consumes gets every token in order; a route that ended without an error lacks none."""
        for session in self.world.sessions:
            waiting = b"".join(session.route.inbound._queue)
            if session.route.closed is None or session.route.closed.reason in QUIET:
                assert session.received + waiting == session.sent, "tokens lost, doubled or out of order"
            else:
                assert session.sent.startswith(session.received), "tokens doubled or out of order"
            if not session.stopped and session.closes:
                reason = session.closes[0].reason
                assert reason is not CloseReason.RESOURCE_EXHAUSTED, "a live consumer paid for a stopped one"
