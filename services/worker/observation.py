"""What a worker is and observes of itself, as values: what heartbeats, `Describe` and its registration say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from libs.contracts.segue.v1 import catalog_pb2, worker_pb2
from libs.controller.catalog_facts import Endpoint, Model
from libs.controller.protocol import Gone, Heartbeat, PrefillCost, Resident, Tier
from libs.controller.wire_fields import to_proto
from services.worker.endpoint.interpreter import Interpreter
from services.worker.handlers import ComputeMeasurements, LocalChunks, MemoryResidency, TierMeasurements
from services.worker.pages.pool import PagePool


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is. `address`: where its tunnels are accepted; `bytes_per_token`: over all groups, at full
    length.
    """

    worker: str
    epoch: int
    address: str
    zone: str
    family: str
    node: str
    name: str
    model: Model
    lanes: int
    bytes_per_token: int
    capacity_pages: int

    def endpoint(self) -> Endpoint:
        """As registered."""
        return Endpoint(
            self.worker,
            self.epoch,
            self.address,
            self.zone,
            self.family,
            (self.model.fingerprint,),
            self.capacity_pages,
            self.node,
        )


@dataclass(frozen=True, slots=True)
class Told:
    """What a router knows of the resident prefixes: up to versions of both journals, and these running prefills."""

    version: int
    inflight: frozenset[str]
    memory: int


class Observer:
    """Builds observations from the parts that own the facts."""

    def __init__(
        self,
        identity: Identity,
        pool: PagePool,
        compute: ComputeMeasurements,
        tiers: TierMeasurements,
        memory: MemoryResidency,
    ) -> None:
        self.identity = identity
        self._pool, self._compute, self._tiers, self._memory = pool, compute, tiers, memory

    def heartbeat(self, interpreter: Interpreter, sequence: int, told: Told | None) -> tuple[Heartbeat, Told]:
        """The observation now, with what changed since `told`; and what its hearer then knows.

        A snapshot where `told` is None or lies too far back.
        """
        identity, machine = self.identity, interpreter.machine
        changes = self._pool.changes(told.version if told else None)
        # A snapshot is one for both: who forgets the one forgets the other.
        memory = self._memory.since(told.memory if told and not changes.snapshot else None)
        if memory.snapshot and not changes.snapshot:
            changes = self._pool.changes(None)
        prefill, load = tuple(self._compute.prefill()), interpreter.load()
        resident = [Resident(digest, end, Tier.GPU, name) for digest, (end, name) in changes.came.items()]
        inflight = [found for found in self._inflight(prefill) if found.hash not in changes.came]
        resident += [
            Resident(digest, held.end, Tier.RAM, held.fingerprint, groups=held.groups)
            for digest, held in memory.came.items()
        ]
        gone = [Gone(digest, Tier.GPU) for digest in changes.went]
        gone += [Gone(digest, Tier.RAM) for digest in memory.went]
        if told is not None and not changes.snapshot:
            ended = told.inflight - {found.hash for found in inflight}
            gone += [Gone(digest, Tier.INFLIGHT) for digest in sorted(ended)]
        beat = Heartbeat(
            worker=identity.worker,
            epoch=machine.epoch,
            sequence=sequence,
            node=identity.node,
            draining=machine.draining,
            load=load,
            lanes=identity.lanes,
            page_tokens=self._pool.sizes.page,
            max_context=identity.model.max_context,
            models=(identity.model.fingerprint,),
            prefill=prefill,
            decode=tuple(self._compute.decode()),
            tiers=tuple(self._tiers.tiers()),
            resident=(*resident, *inflight),
            gone=tuple(gone),
            snapshot=changes.snapshot,
            bytes_per_token=identity.bytes_per_token,
        )
        return beat, Told(changes.version, frozenset(found.hash for found in inflight), memory.version)

    def _inflight(self, prefill: tuple[PrefillCost, ...]) -> Iterator[Resident]:
        """Boundaries that running prefills will pass, and when: what is still to be computed, at the measured cost."""
        for found in self._pool.inflight():
            cost = next((cost for cost in prefill if found.end <= cost.up_to_tokens), prefill[-1] if prefill else None)
            ms_per_token = cost.ms_per_token if cost is not None else 1.0
            yield Resident(found.hash, found.end, Tier.INFLIGHT, found.fingerprint, found.remaining * ms_per_token)

    def describe(self, interpreter: Interpreter, chunks: LocalChunks) -> worker_pb2.DescribeResponse:
        """Describe's answer: everything, with a snapshot of the resident prefixes."""
        beat, _ = self.heartbeat(interpreter, 0, None)
        disk, counts = chunks.disk(), interpreter.checkpointer.counts()
        endpoint, model, observation = to_proto(self.identity.endpoint()), to_proto(self.identity.model), to_proto(beat)
        assert isinstance(endpoint, catalog_pb2.Endpoint)
        assert isinstance(model, catalog_pb2.Model)
        assert isinstance(observation, worker_pb2.Heartbeat)
        answer = worker_pb2.DescribeResponse(
            endpoint=endpoint,
            models=[model],
            observation=observation,
            disk_bytes=disk.used,
            disk_cap_bytes=disk.cap,
            checkpoints_pending=counts.pending,
            checkpoints_dropped=counts.dropped,
        )
        for name, pages in self._pool.pages().items():
            answer.pages[name].MergeFrom(to_proto(pages))  # type: ignore[arg-type]
        for assignment in interpreter.machine.assignments():
            answer.assignments.add(request_id=assignment.request_id, attempt=assignment.attempt)
        return answer
