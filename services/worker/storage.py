"""Assembles a worker's storage (host memory, chunk directory, peers, object store, restore, checkpoint, measurements).

At start the directory is indexed, the bucket checked (a clear error where it cannot be used) and each tier measured
once. Closed in order: checkpoints, then restores, then what serves peers, then the tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from libs.chunks.errors import TierError
from libs.chunks.local import DirectoryCounts, LocalDirectory
from libs.chunks.memory import HostMemory, MemoryCounts
from libs.chunks.object_store import Bucket, ObjectStore, ObjectStoreCounts
from libs.chunks.peer import PeerClient, PeerCounts
from libs.chunks.tier import Source
from libs.continuation.chain import CHUNK_TOKENS
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import Layout
from libs.controller.protocol import PrefillCost, Tier
from libs.service.errors import StartError
from libs.service.logs import get_logger
from services.worker.checkpoint.capture import Capturer, PageReader, largest_header
from services.worker.checkpoint.checkpointer import ChunkCheckpointer
from services.worker.checkpoint.facts import CatalogFacts
from services.worker.checkpoint.kept import KeptObjects
from services.worker.checkpoint.mover import Mover
from services.worker.checkpoint.replicas import ReplicaCounts, ReplicaReporter
from services.worker.checkpoint.settings import CheckpointMetrics, CheckpointSettings
from services.worker.handlers import MemoryResidency, PageLeases
from services.worker.peers import PeerBook
from services.worker.placement.promoter import Promoter
from services.worker.placement.settings import PlacementCounts, PromoterSettings
from services.worker.placement.uses import UseReporter
from services.worker.restore.local_chunks import ServeCounts, ServedChunks
from services.worker.restore.measurements import StorageMeasurements
from services.worker.restore.memory_journal import MemoryJournal
from services.worker.restore.provider import ContentProvider
from services.worker.restore.restorer import ChunkRestorer
from services.worker.restore.settings import RestoreCounts, RestoreSettings
from services.worker.restore.sources import Tiers
from services.worker.restore.upload import PageWriter, Uploader
from services.worker.restore.whole import WholeRestores

log = get_logger(__name__)

_FLUSH_S = 2.0


class Pages(PageReader, PageWriter, Protocol):
    """The KV store as storage sees it."""


class StorageError(StartError):
    """The worker's storage cannot be used."""


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """The chunk directory: `cap` bytes at most, leaving `keep_free` bytes of its file system to others."""

    path: Path
    cap: int = 20 << 30
    keep_free: int = 1 << 30


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """`directory` None = no local tier. `memory`: bytes of chunks in host memory, 0 = none. `serve_streams`: objects
    sent to peers at a time. `bucket_wait_s`: how long to wait at start for the object store.
    """

    bucket: Bucket
    directory: DirectorySettings | None
    restore: RestoreSettings = field(default_factory=RestoreSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    promoter: PromoterSettings = field(default_factory=PromoterSettings)
    connections: int = 8
    memory: int = 0
    serve_streams: int = 8
    bucket_wait_s: float = 30.0


@dataclass(frozen=True)
class StorageCounts:
    """For the metrics endpoint; each is exported under its own name."""

    memory: MemoryCounts | None
    directory: DirectoryCounts | None
    peers: PeerCounts
    serving: ServeCounts
    store: ObjectStoreCounts
    restore: RestoreCounts
    checkpoint: CheckpointMetrics
    replicas: ReplicaCounts
    placement: PlacementCounts


def _ended(task: asyncio.Task[None]) -> None:
    """These run until they are cancelled: any other end is a bug, and not silent."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task broke", task=task.get_name(), exc_info=error)


class Storage:
    """The parts the shell needs (`services.worker.handlers`), their counters, and the `tiers` it reads and closes."""

    def __init__(
        self,
        restorer: ChunkRestorer,
        checkpointer: ChunkCheckpointer,
        local: ServedChunks,
        memory: MemoryResidency,
        measurements: StorageMeasurements,
        counts: StorageCounts,
        tiers: Sequence[Source],
        reporter: ReplicaReporter | None,
        peers: tuple[PeerClient, PeerBook],
        promoter: Promoter | None,
        uses: UseReporter,
    ) -> None:
        self.restorer, self.checkpointer, self.local, self.measurements = restorer, checkpointer, local, measurements
        self.memory, self.counts = memory, counts
        self.tiers, self._reporter = tiers, reporter
        self.promoter, self.uses = promoter, uses
        self._peers, self.book = peers
        self._tasks = [asyncio.create_task(self.book.run(), name="endpoint map")]
        if reporter is not None:
            self._tasks.append(asyncio.create_task(reporter.run(), name="replica facts"))
        if promoter is not None:
            self._tasks.append(asyncio.create_task(promoter.run(), name="promoter"))
        self._tasks.append(asyncio.create_task(uses.run(), name="uses"))
        for task in self._tasks:
            task.add_done_callback(_ended)

    async def aclose(self) -> None:
        """Nothing writes to a page, a file or the catalog afterwards."""
        await self.checkpointer.aclose()
        await self.restorer.aclose()
        await self.local.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.aclose()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                if self._reporter is not None:
                    await self._reporter.flush()
                await self.uses.flush()
        for tier in self.tiers:
            await asyncio.to_thread(tier.close)


async def open_storage(
    settings: StorageSettings,
    *,
    kv: Pages,
    layout: Layout,
    catalog: grpc.aio.Channel,
    leases: PageLeases,
    prefill: Callable[[], Sequence[PrefillCost]],
    open_peer: Callable[[str], grpc.aio.Channel],
) -> Storage:
    """Inside the event loop that will use it. `prefill`: the runtime's measured costs (`ComputeMeasurements.prefill`).
    `open_peer`: a channel to another worker's HOST:PORT.

    Raises StorageError. The catalog's channel stays the caller's.
    """
    _check_staging(settings.checkpoint.staging_bytes, layout)
    restore_counts, metrics = RestoreCounts(), CheckpointMetrics()
    facts = CatalogFacts(catalog, settings.checkpoint.catalog_timeout_s)
    store = ObjectStore(settings.bucket, connections=settings.connections)
    told = _Told()
    local: LocalDirectory | None = None
    try:
        await asyncio.to_thread(_reach, store, settings.bucket_wait_s)
        if settings.directory is not None:
            local = await asyncio.to_thread(_open_directory, settings.directory, store, told.gone)
    except TierError as error:
        await asyncio.to_thread(store.close)
        raise StorageError(error.message, remedy=error.remedy) from error
    journal = MemoryJournal(layout)
    memory = (
        await asyncio.to_thread(_open_memory, settings.memory, local or store, journal) if settings.memory else None
    )
    reporter: ReplicaReporter | None = None
    promoter: Promoter | None = None
    placement = PlacementCounts()
    uses = UseReporter(catalog, placement)
    if local is not None:
        directory = local
        reporter = ReplicaReporter(
            facts, local.node, lambda key: directory.find(key.fingerprint, key.owner, key.hash, key.group)
        )
        told.reporter = reporter
        promoter = Promoter(catalog, local, memory, store, reporter, settings.promoter, placement)
    node = "" if local is None else local.node
    client = PeerClient(open_peer, limit=settings.restore.fetch_bytes)
    book = PeerBook(catalog, client, node)
    capturer = Capturer(kv, layout, leases, KeptObjects(memory, local))
    tiers = Tiers(memory, local, store, book.peer_of)
    provider = ContentProvider(tiers, settings.restore, restore_counts, told.present)
    uploader = Uploader(kv, settings.restore.fragment_bytes, settings.restore.ring_fragments)
    checkpointer = ChunkCheckpointer(
        layout=layout,
        capturer=capturer,
        mover=Mover(memory, local, store, settings.checkpoint.put_timeout_s),
        facts=facts,
        leases=leases,
        node=node,
        kept=told.present,
        settings=settings.checkpoint,
        metrics=metrics,
    )
    served = ServedChunks(local, memory, streams=settings.serve_streams)
    meters = {Tier.OBJECT: store.meter, Tier.PEER: client.meter}
    meters |= {} if local is None else {Tier.SSD: local.meter}
    meters |= {} if memory is None else {Tier.RAM: memory.meter}
    restores = WholeRestores(meters, uploader.meter)
    storage = Storage(
        ChunkRestorer(layout, provider, uploader, settings.restore, restore_counts, prefill, uses.used, restores),
        checkpointer,
        served,
        journal,
        StorageMeasurements(layout, restores, prefill),
        StorageCounts(
            None if memory is None else memory.counts,
            None if local is None else local.counts,
            client.counts,
            served.counts,
            store.counts,
            restore_counts,
            metrics,
            ReplicaCounts() if reporter is None else reporter.counts,
            placement,
        ),
        [tier for tier in (memory, local, store) if tier is not None],
        reporter,
        (client, book),
        promoter,
        uses,
    )
    if local is not None and reporter is not None:
        await asyncio.to_thread(reporter.announce, local.objects())
    await uploader.probe(layout)
    return storage


def _check_staging(staging_bytes: int, layout: Layout) -> None:
    least = CHUNK_TOKENS * layout.bytes_per_token + sum(
        4 * CHUNK_TOKENS + largest_header(group) for group in layout.groups
    )
    if staging_bytes < least:
        raise StorageError(
            f"staging of {staging_bytes} bytes cannot hold one chunk of this model", remedy=f"give at least {least}"
        )


class _Told:
    """Where the directory's news go. While it is being indexed there is nobody: `objects` says it all afterwards."""

    def __init__(self) -> None:
        self.reporter: ReplicaReporter | None = None

    def present(self, key: ObjectKey) -> None:
        if self.reporter is not None:
            self.reporter.present(key)

    def gone(self, key: ObjectKey) -> None:
        if self.reporter is not None:
            self.reporter.gone(key)


def _reach(store: ObjectStore, within: float) -> None:
    store.check_until(within)
    with suppress(TierError):  # a price that is guessed is better than no worker
        store.probe()


def _open_memory(cap: int, below: LocalDirectory | ObjectStore, journal: MemoryJournal) -> HostMemory:
    def here(key: ObjectKey) -> None:
        journal.here(memory, key)

    memory = HostMemory(
        cap, reload_ms=lambda size: below.meter.price().ms(size), on_here=here, on_gone=journal.gone
    )  # fmt: skip
    memory.probe()
    return memory


def _open_directory(
    settings: DirectorySettings, store: ObjectStore, gone: Callable[[ObjectKey], None]
) -> LocalDirectory:
    local = LocalDirectory(
        settings.path,
        cap=settings.cap,
        keep_free=settings.keep_free,
        reload_ms=lambda size: store.meter.price().ms(size),
        on_gone=gone,
    )
    with suppress(OSError):  # a full disk: the price stays a guess
        local.probe()
    return local
