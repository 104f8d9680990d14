"""Another worker's host memory and chunk directory, read through its `FetchChunk`.

A `Peer` is one process of a worker, named by address and epoch: the epoch fences, so that a successor at the same
address is never taken for it. `PeerClient` belongs to an event loop, on which the pieces are collected; `Peer.get` is
called from worker threads like every tier's and waits for it. Channels are opened once per address and used again.

Bounded on this side by calls and by bytes under way; the peer bounds its own. Nothing is trusted: pieces must be
contiguous and at most 1 MiB, the size what was asked for, and whoever opens the bytes checks every one of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import numpy as np

from libs.chunks.cost import CostMeter, Price
from libs.chunks.errors import (
    AbortedError,
    BusyPeerError,
    MissingObjectError,
    OtherObjectError,
    ServerFailedError,
    SlowTierError,
    StaleEpochError,
    TierClosedError,
    TierError,
    UnreachableError,
)
from libs.chunks.gate import ByteGate
from libs.chunks.tier import Held, MemoryHeld, Stored, TierKind, Transfer
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey
from libs.contracts.segue.v1 import worker_pb2 as pb
from libs.contracts.segue.v1 import worker_pb2_grpc

T = TypeVar("T")

PIECE_BYTES = 1 << 20
_GUESS = Price(latency_ms=2.0, bytes_per_ms=200_000)
_CHANNELS = 64
_PATIENCE_S = 1.0
"""Beyond its deadline, how long a call may take to notice it."""
_NO_CHUNK = ObjectKey("00" * 32, "00" * 16, "00" * 32, "none", "00" * 32)


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class PeerCounts:
    """Counters of reading from peers."""

    gets: int = _counter("Objects read from peers")
    read_bytes: int = _counter("Bytes read from peers, those of ended reads included")
    fetching: int = _counter("Objects being read from peers", "gauge")
    fetch_bytes: int = _counter("Bytes of objects being read from peers", "gauge")
    waiting: int = _counter("Reads from peers that wait for a slot or for room", "gauge")
    missing: int = _counter("Objects that a peer did not have any more")
    stale: int = _counter("Reads refused because the peer is another process by now")
    busy: int = _counter("Reads refused because the peer serves as many as it may")
    failed: int = _counter("Reads from peers that failed otherwise")
    slow: int = _counter("Reads from peers that ran out of time")
    rejected: int = _counter("Objects from peers whose bytes were damaged")


class PeerClient:
    """Made inside the event loop that carries the calls.

    open_channel: to HOST:PORT (`libs.service.channel`). calls, limit: calls and bytes of objects under way.
    """

    def __init__(
        self, open_channel: Callable[[str], grpc.aio.Channel], *, calls: int = 8, limit: int = 128 << 20
    ) -> None:
        self._open_channel = open_channel
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(calls)
        self._gate = ByteGate(limit)
        self._channels: OrderedDict[str, tuple[grpc.aio.Channel, worker_pb2_grpc.WorkerStub]] = OrderedDict()
        self._users: dict[str, int] = {}
        self._closed = False
        self.meter = CostMeter(_GUESS)
        self.counts = PeerCounts()

    def peer(self, address: str, epoch: int) -> Peer:
        """The worker process at HOST:PORT."""
        return Peer(self, address, epoch)

    async def probe(self, peer: Peer, within: float = 2.0) -> None:
        """Measures the way to a peer by asking it for what nobody has. Raises TierError."""
        started = self._loop.time()
        if await self.stat(peer, _NO_CHUNK, within) is None:
            self.meter.observe(1, (self._loop.time() - started) * 1e3)

    async def fetch(
        self, peer: Peer, key: ObjectKey, size: int, within: float, transfer: Transfer | None
    ) -> memoryview:
        """The object's bytes. Raises TierError."""
        what = f"get of {key.text} from {peer.address}"
        async with _Deadline(within, what):
            self.counts.waiting += 1
            try:
                await self._slots.acquire()
                try:
                    await self._gate.acquire(size)
                except BaseException:
                    self._slots.release()
                    raise
            finally:
                self.counts.waiting -= 1
            self.counts.fetching += 1
            self.counts.fetch_bytes = self._gate.used
            try:
                data = await self._collect(peer, key, size, within, transfer)
            finally:
                self.counts.fetching -= 1
                self._slots.release()
                self._gate.release(size)
                self.counts.fetch_bytes = self._gate.used
        self.counts.gets += 1
        return data

    async def _collect(
        self, peer: Peer, key: ObjectKey, size: int, within: float, transfer: Transfer | None
    ) -> memoryview:
        target = np.empty(size, np.uint8).data
        at = 0
        with self._stub(peer) as stub:
            call = stub.FetchChunk(_request(peer, key), timeout=within)
            try:
                async for piece in call:
                    if piece.size != size:
                        raise OtherObjectError(
                            f"{peer.address} has {piece.size} bytes of {key.text} where {size} were expected",
                            remedy="take another source",
                        )
                    count = len(piece.data)
                    if piece.offset != at or count > PIECE_BYTES or not 0 < count <= size - at:
                        raise ServerFailedError(
                            f"{peer.address} sent {count} bytes at {piece.offset} where {at} was next",
                            remedy="check the peer's version",
                        )
                    target[at : at + count] = piece.data
                    at += count
                    self.counts.read_bytes += count
                    if transfer is not None:
                        transfer.came(count)
            except grpc.aio.AioRpcError as error:
                raise self._translated(error, peer, key) from error
            finally:
                call.cancel()
        if at != size:
            raise UnreachableError(
                f"{peer.address} ended {key.text} after {at} of {size} bytes", remedy="take another source"
            )
        return target

    async def stat(self, peer: Peer, key: ObjectKey, within: float) -> Stored | None:
        """Its size there, or None."""
        request = _request(peer, key)
        request.length = 1
        async with _Deadline(within, f"stat of {key.text} at {peer.address}"):
            with self._stub(peer) as stub:
                call = stub.FetchChunk(request, timeout=within)
                try:
                    async for piece in call:
                        return Stored(piece.size)
                    return Stored(0)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        return None
                    raise self._translated(error, peer, key) from error
                finally:
                    call.cancel()

    def _stub(self, peer: Peer) -> _Used:
        if self._closed:
            raise TierClosedError("the peer client is closed", remedy="open it again")
        found = self._channels.pop(peer.address, None)
        if found is None:
            channel = self._open_channel(peer.address)
            found = channel, worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._channels[peer.address] = found
        return _Used(self, peer.address, found[1])

    def enter(self, address: str) -> None:
        """A call begins on the address's channel."""
        self._users[address] = self._users.get(address, 0) + 1

    def leave(self, address: str) -> None:
        """It has ended: channels above the bound that nobody uses are closed, the longest unused first."""
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
        idle = [known for known in self._channels if known not in self._users]
        for known in idle[: max(0, len(self._channels) - _CHANNELS)]:
            channel, _ = self._channels.pop(known)
            self._loop.create_task(channel.close(None), name=f"close {known}")

    def _translated(self, error: grpc.aio.AioRpcError, peer: Peer, key: ObjectKey) -> TierError:
        where = f"{key.text} from {peer.address}: {error.details() or error.code().name}"
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                self.counts.missing += 1
                return MissingObjectError(where, remedy="take another source")
            case grpc.StatusCode.FAILED_PRECONDITION:
                self.counts.stale += 1
                return StaleEpochError(where, remedy="read the endpoint map again")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.counts.busy += 1
                return BusyPeerError(where, remedy="take another source")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return SlowTierError(where, remedy="check the peer's load and the network")
            case grpc.StatusCode.UNAVAILABLE:
                self.counts.failed += 1
                return UnreachableError(where, remedy="check the peer and the network")
            case _:
                self.counts.failed += 1
                return ServerFailedError(where, remedy="check the peer's log")

    def call(self, work: Callable[[], object], within: float, what: str, transfer: Transfer | None) -> object:
        """From a thread: runs a coroutine of this client on its loop. Raises TierError."""
        if self._closed or self._loop.is_closed():
            raise TierClosedError("the peer client is closed", remedy="open it again")
        future: Future[object] = asyncio.run_coroutine_threadsafe(work(), self._loop)  # type: ignore[arg-type]
        try:
            if transfer is None:
                return future.result(within + _PATIENCE_S)
            with transfer.ending(future.cancel):
                return future.result(within + _PATIENCE_S)
        except CancelledError:
            raise AbortedError(f"{what} was aborted", remedy="nobody waits for it") from None
        except TimeoutError as error:
            future.cancel()
            raise SlowTierError(f"{what} took too long", remedy="check the peer and the network") from error

    async def aclose(self) -> None:
        """Ends what is under way and closes the channels."""
        self._closed = True
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        for channel in channels:
            await channel.close(None)


class Peer:
    """The peer tier: one worker process. Cheap; its client holds everything."""

    kind = TierKind.PEER

    def __init__(self, client: PeerClient, address: str, epoch: int) -> None:
        self._client, self.address, self.epoch = client, address, epoch
        self._closed = False

    @property
    def meter(self) -> CostMeter:
        """Of all peers together: which of them is slow shows by hedging."""
        return self._client.meter

    def get(self, key: ObjectKey, size: int, *, within: float, abort: Transfer | None = None) -> Held:
        """See `Source.get`. Never on the client's own event loop."""
        self._check_open()
        what = f"get of {key.text} from {self.address}"
        if abort is not None and abort.is_set():
            raise AbortedError(f"{what} was aborted", remedy="nobody waits for it")
        try:
            data = self._client.call(lambda: self._client.fetch(self, key, size, within, abort), within, what, abort)
        except SlowTierError:
            self._client.counts.slow += 1
            raise
        assert isinstance(data, memoryview)
        return MemoryHeld(data)

    def stat(self, key: ObjectKey, *, within: float) -> Stored | None:
        """See `Source.stat`."""
        self._check_open()
        what = f"stat of {key.text} at {self.address}"
        found = self._client.call(lambda: self._client.stat(self, key, within), within, what, None)
        assert found is None or isinstance(found, Stored)
        return found

    def reject(self, key: ObjectKey, error: ObjectError) -> None:
        """Counted only: the peer finds the damage itself when it reads its own."""
        self._client.counts.rejected += 1

    def probe(self, within: float = 2.0) -> None:
        """See `PeerClient.probe`."""
        self._check_open()
        self._client.call(lambda: self._client.probe(self, within), within, f"probe of {self.address}", None)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"peer {self.address} is closed", remedy="open it again")

    def close(self) -> None:
        """Idempotent. The channel stays with the client."""
        self._closed = True


class _Used:
    """A stub in use: its channel is not closed meanwhile."""

    def __init__(self, client: PeerClient, address: str, stub: worker_pb2_grpc.WorkerStub) -> None:
        self._client, self._address, self._stub = client, address, stub

    def __enter__(self) -> worker_pb2_grpc.WorkerStub:
        self._client.enter(self._address)
        return self._stub

    def __exit__(self, *_: object) -> None:
        self._client.leave(self._address)


class _Deadline:
    """`asyncio.timeout` that ends in SlowTierError."""

    def __init__(self, within: float, what: str) -> None:
        self._timeout, self._what = asyncio.timeout(within), what

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError as late:
            raise SlowTierError(f"{self._what} took too long", remedy="check the peer and the network") from late


def _request(peer: Peer, key: ObjectKey) -> pb.FetchChunkRequest:
    return pb.FetchChunkRequest(
        epoch=peer.epoch,
        fingerprint=key.fingerprint,
        owner=key.owner,
        hash=key.hash,
        group=key.group,
        content_id=key.content_id,
    )
