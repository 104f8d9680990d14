"""All of the pool's state, each piece with its one owner, and the few things that several pieces need of each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .contours import Contour, Move
from .coverage import Cover, cells_of, cover, sole_endpoints
from .desired import Desired
from .effects import CloseWriter, Outbox
from .floor import Floors, FloorTarget
from .generation import Generations
from .inventory import Inventory, WriterRecord
from .knobs import PoolPolicy
from .model import Cell, Chance, EndpointKey, PoolBugError
from .picker import Picker
from .probes import Probes
from .readiness import Gate
from .refill import Attempt, Refill
from .replacement import Phase, Replacements
from .roster import Roster
from .rotation import Rotation
from .shutdown import Shutdown, Stage


@dataclass(slots=True)
class Books:
    """``now`` and ``out`` are those of the event being handled."""

    policy: PoolPolicy
    chance: Chance
    desired: Desired = field(default_factory=Desired)
    roster: Roster = field(default_factory=Roster)
    inventory: Inventory = field(default_factory=Inventory)
    floors: Floors = field(default_factory=Floors)
    refill: Refill = field(default_factory=Refill)
    probes: Probes = field(default_factory=Probes)
    replacements: Replacements = field(default_factory=Replacements)
    rotation: Rotation = field(default_factory=Rotation)
    generations: Generations = field(default_factory=Generations)
    gate: Gate = field(default_factory=Gate)
    shutdown: Shutdown = field(default_factory=Shutdown)
    picker: Picker = field(default_factory=Picker)
    targets: dict[EndpointKey, FloorTarget] = field(default_factory=dict)
    out: Outbox = field(default_factory=Outbox)
    now: float = 0.0

    @property
    def running(self) -> bool:
        """Whether binds and dials are allowed at all."""
        return self.shutdown.stage is Stage.RUNNING

    def cover(self) -> Cover:
        """Coverage by what serves now."""
        return cover(self.inventory)

    def wanted_cells(self) -> frozenset[Cell]:
        """Cells that must stay covered: of endpoints in effect that nobody has drained."""
        return cells_of(self.roster.dialable())

    def sole(self) -> frozenset[EndpointKey]:
        """Endpoints that are the only one of a cell."""
        return sole_endpoints(self.roster.dialable())

    def outage(self) -> frozenset[EndpointKey]:
        """Endpoints in outage mode: the only ones of a cell, and those of a cell that nothing serves."""
        if not self.policy.outage_mode:
            return frozenset()
        found = self.cover()
        endpoints = self.roster.dialable()
        bare = {endpoint.key for endpoint in endpoints if not all(found.cells[cell] for cell in endpoint.cells)}
        return self.sole() | bare

    def drain(self, record: WriterRecord, move: Move) -> None:
        """Active -> Draining."""
        self.inventory.move(record, move, self.now)
        record.warned = False

    def close(self, record: WriterRecord, move: Move) -> None:
        """Towards the end of its tunnel."""
        self.inventory.close(record, move)
        self.out.closes.append(CloseWriter(record.writer, move))

    def retire(self, record: WriterRecord, move: Move) -> None:
        """It is wanted no more: Active, it drains by this move; Warm, it has nothing to finish."""
        if record.active:
            self.drain(record, move)
        elif record.live and record.contour is Contour.WARM:
            self.close(record, Move.ABANDONED)

    def withdraw(self, record: WriterRecord, move: Move) -> None:
        """The same, and not even as the last resort is it taken."""
        self.retire(record, move)
        if record.fallback:
            self.inventory.set_fallback(record, False)

    def evict(self, record: WriterRecord, move: Move) -> None:
        """Out of whichever contour it is in, at once; ``move`` says why, where it was Active."""
        self.retire(record, move)
        if record.live:
            self.close(record, Move.AT_ONCE)

    def activate(self, record: WriterRecord, move: Move) -> None:
        """Warm -> Active."""
        self.inventory.move(record, move, self.now)
        self.out.bindable = True

    def cancel(self, attempts: Iterable[Attempt]) -> None:
        """Dials that are wanted no more. Their ends come back as DialAbandoned."""
        self.out.cancels.extend(attempt.writer for attempt in attempts)

    def forget(self, keys: Iterable[EndpointKey]) -> None:
        """Endpoints in effect no more: their dials end, their writers drain."""
        keys = list(keys)
        for key in keys:
            self.cancel(self.refill.of_endpoint(key))
            for record in self.inventory.of_endpoint(key):
                self.retire(record, Move.ENDPOINT_GONE)
        self.refill.forget(keys)
        self.rotation.forget(keys)
        self.inventory.forget_losses(keys)

    def check_integrity(self) -> None:
        """Raises PoolBugError if any two pieces disagree."""
        self.inventory.check()
        self.roster.check()
        self.refill.check()
        self.replacements.check()
        self.generations.check(self.desired.taken)
        current = self.generations.current
        for record in self.inventory:
            if record.standing and record.generation not in current:
                raise PoolBugError(
                    f"writer {record.writer} is {record.contour.value} in generation {record.generation},"
                    f" not {sorted(current)}"
                )
            if record.active and self.roster.get(record.key) is None:
                raise PoolBugError(f"writer {record.writer} is Active, its endpoint {record.key} not in effect")
            if record.writer in self.refill.attempts:
                raise PoolBugError(f"writer {record.writer} is published and still being dialled")
        for victim, phase in self.replacements.phases().items():
            found = self.inventory.get(victim)
            if found is None:
                raise PoolBugError(f"writer {victim} is {phase.value}, but gone")
            if phase is Phase.RETIRING and found.contour is not Contour.DRAINING:
                raise PoolBugError(f"writer {victim} is Retiring and {found.contour.value}")
        for successor, victim in self.replacements:
            if successor not in self.refill.attempts:
                raise PoolBugError(f"writer {victim} is reserved for {successor}, which nobody dials")
        if self.generations.active and self.generations.committed is None:
            raise PoolBugError("a generation is active without a map")
