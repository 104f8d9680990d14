"""A peer over a real socket: fenced, bounded on both sides, never a byte from what was given to another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from libs.chunks.errors import (
    AbortedError,
    BusyPeerError,
    MissingObjectError,
    OtherObjectError,
    ServerFailedError,
    SlowTierError,
    StaleEpochError,
    TierError,
    UnreachableError,
)
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.peer import PIECE_BYTES
from libs.chunks.tier import Transfer
from libs.chunks.verified import open_verified
from libs.continuation.layout import LayerGroup
from libs.contracts.segue.v1 import worker_pb2 as pb
from libs.contracts.segue.v1 import worker_pb2_grpc
from tests.chunks.links import Link
from tests.chunks.peers import EPOCH, ServedPeer
from tests.chunks.samples import sample
from tests.fixtures.fault_proxy import Direction

DOWN = frozenset({Direction.DOWN})
# 3 MiB and a little per object: four pieces.
LARGE = LayerGroup(None, 1, 256, "float32", tuple(range(6)))


@pytest.fixture
def large(directory: LocalDirectory):
    encoded, wanted = sample(time.monotonic_ns(), group=LARGE)
    directory.put(encoded.key, encoded.parts, within=10)
    return encoded, wanted


@pytest.fixture
def link(served: ServedPeer) -> Iterator[Link]:
    made = Link(served.server.target)
    yield made
    made.close()


def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    give_up = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up, "it does not come about"
        time.sleep(0.002)


def took(work: Callable[[], object], error: type[TierError]) -> float:
    started = time.monotonic()
    with pytest.raises(error):
        work()
    return time.monotonic() - started


def test_pieces_are_at_most_1_mib_and_make_up_the_whole(served: ServedPeer, large) -> None:
    encoded, wanted = large
    key = wanted.key

    async def ask() -> list[pb.FetchChunkResponse]:
        async with grpc.aio.insecure_channel(served.server.target) as channel:
            request = pb.FetchChunkRequest(
                epoch=EPOCH, fingerprint=key.fingerprint, owner=key.owner, hash=key.hash, group=key.group,
                content_id=key.content_id,
            )  # fmt: skip
            call = worker_pb2_grpc.WorkerStub(channel).FetchChunk(request, timeout=10)
            return [piece async for piece in call]

    pieces = served.here.run(ask())
    assert len(pieces) == 4 and max(len(piece.data) for piece in pieces) == PIECE_BYTES
    assert b"".join(piece.data for piece in pieces) == encoded.to_bytes()
    opened = open_verified(served.peer, wanted, within=10)
    assert bytes(opened.view.data) == encoded.to_bytes()
    assert served.client.counts.read_bytes == encoded.size == served.chunks.counts.served_bytes - encoded.size
    opened.release()


def test_a_stale_epoch_is_refused_with_its_own_error(served: ServedPeer, large) -> None:
    stale = served.at(served.server.target, EPOCH - 1)
    with pytest.raises(StaleEpochError, match=str(EPOCH)):
        open_verified(stale, large[1], within=5)
    with pytest.raises(StaleEpochError):
        stale.stat(large[1].key, within=5)
    assert served.client.counts.stale == 2 and served.chunks.counts.served_bytes == 0


def test_a_successor_at_the_same_address_is_not_taken_for_it(served: ServedPeer, large) -> None:
    open_verified(served.peer, large[1], within=5).release()
    served.servicer.epoch = EPOCH + 1
    with pytest.raises(StaleEpochError):
        open_verified(served.peer, large[1], within=5)
    open_verified(served.at(served.server.target, EPOCH + 1), large[1], within=5).release()


def test_channels_are_used_again(served: ServedPeer, large) -> None:
    for _ in range(3):
        open_verified(served.at(served.server.target), large[1], within=5).release()
        served.peer.stat(large[1].key, within=5)
    assert served.opened == [served.server.target]


def test_what_lies_in_memory_comes_from_there(directory: LocalDirectory) -> None:
    memory = HostMemory(1 << 24)
    served = ServedPeer(directory, memory)
    encoded, wanted = sample(time.monotonic_ns(), group=LARGE)
    try:
        with pytest.raises(MissingObjectError):
            open_verified(served.peer, wanted, within=5)
        memory.put(encoded.key, encoded.parts, within=5)
        open_verified(served.peer, wanted, within=5).release()
        assert memory.counts.read_bytes == encoded.size and directory.counts.read_bytes == 0
        until(lambda: memory.counts.leases == 0)
        assert served.chunks.counts.served == 1 and served.chunks.counts.missing == 1
    finally:
        served.close()


@pytest.mark.parametrize("medium", ["memory", "directory"])
def test_no_byte_from_what_was_given_to_another(directory: LocalDirectory, medium: str) -> None:
    """Taken out in the middle of being sent, its room wanted by another: the lease holds until the last piece."""
    memory = HostMemory(1 << 22)
    served = ServedPeer(directory if medium == "directory" else None, memory if medium == "memory" else None)
    tier = directory if medium == "directory" else memory
    encoded, wanted = sample(time.monotonic_ns(), group=LARGE)
    other, _ = sample(time.monotonic_ns() + 1, group=LARGE)
    tier.put(encoded.key, encoded.parts, within=5)
    key = wanted.key
    request = pb.FetchChunkRequest(
        fingerprint=key.fingerprint, owner=key.owner, hash=key.hash, group=key.group, content_id=key.content_id
    )

    async def read() -> bytes:
        pieces = served.chunks.open(request)
        data = [(await anext(pieces)).data]
        tier.remove(key, within=5)
        try:
            tier.put(other.key, other.parts, within=5)
        except TierError:
            assert medium == "memory"  # its room is not given away before the lease ends
        data += [piece.data async for piece in pieces]
        return b"".join(data)

    try:
        assert served.there.run(read()) == encoded.to_bytes()
        assert tier.counts.leases == 0
        tier.put(other.key, other.parts, within=5)
    finally:
        served.close()


def test_as_many_as_may_be_and_no_more(directory: LocalDirectory, large) -> None:
    served = ServedPeer(directory, streams=1)
    key = large[1].key
    request = pb.FetchChunkRequest(
        fingerprint=key.fingerprint, owner=key.owner, hash=key.hash, group=key.group, content_id=key.content_id
    )
    try:
        pieces = served.chunks.open(request)

        async def first() -> int:
            return len((await anext(pieces)).data)

        assert served.there.run(first()) == PIECE_BYTES
        assert served.chunks.counts.streams == 1 and served.chunks.counts.piece_bytes == PIECE_BYTES
        with pytest.raises(BusyPeerError):
            open_verified(served.peer, large[1], within=5)
        served.there.run(pieces.aclose())
        assert served.chunks.counts.piece_bytes == served.chunks.counts.streams == 0
        open_verified(served.peer, large[1], within=5).release()
        counts = served.chunks.counts
        until(lambda: counts.streams == 0)
        assert (counts.refused, counts.cut, counts.served) == (1, 1, 1) and served.client.counts.busy == 1
    finally:
        served.close()


def test_calls_are_bounded_on_this_side_too(directory: LocalDirectory, large) -> None:
    served = ServedPeer(directory, calls=2)
    most = 0
    try:
        threads = [
            threading.Thread(target=lambda: open_verified(served.peer, large[1], within=20).release()) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, served.client.counts.fetching)
            time.sleep(0.001)
        assert most <= 2 and served.client.counts.gets == 8
        assert served.client.counts.fetching == served.client.counts.fetch_bytes == served.client.counts.waiting == 0
    finally:
        served.close()


def test_abort_ends_it_on_both_sides(served: ServedPeer, link: Link, large) -> None:
    slow = served.at(link.proxy.address)
    link.do(lambda proxy: proxy.blackhole(directions=DOWN))
    transfer = Transfer()
    threading.Timer(0.1, transfer.set).start()
    assert took(lambda: open_verified(slow, large[1], within=20, abort=transfer), AbortedError) < 5
    until(lambda: served.client.counts.fetching == 0)
    link.do(lambda proxy: proxy.heal())
    link.do(lambda proxy: proxy.reset())
    until(lambda: served.chunks.counts.streams == 0)
    assert served.directory.counts.leases == 0


@pytest.mark.parametrize("within", [0.3, 1.0])
def test_silence_is_bounded(served: ServedPeer, link: Link, large, within: float) -> None:
    link.do(lambda proxy: proxy.blackhole(directions=DOWN))
    assert took(lambda: open_verified(served.at(link.proxy.address), large[1], within=within), SlowTierError) < 4
    assert served.client.counts.slow == 1


def test_reset_in_the_middle_of_a_body(served: ServedPeer, link: Link, large) -> None:
    cut = served.at(link.proxy.address)
    link.do(lambda proxy: proxy.cut_after(1_500_000, DOWN))
    transfer = Transfer()
    assert took(lambda: open_verified(cut, large[1], within=10, abort=transfer), UnreachableError) < 10
    assert transfer.moved < large[0].size
    link.do(lambda proxy: proxy.heal())
    opened = open_verified(cut, large[1], within=10)
    assert bytes(opened.view.data) == large[0].to_bytes()
    opened.release()


def test_nobody_listens(served: ServedPeer, large) -> None:
    assert took(lambda: open_verified(served.at("127.0.0.1:9"), large[1], within=2), TierError) < 5
    assert served.client.counts.failed + served.client.counts.slow == 1


class Lying:
    """Sends what no worker should."""

    def __init__(self, pieces: list[pb.FetchChunkResponse]) -> None:
        self.pieces = pieces

    async def open(self, wanted):
        for piece in self.pieces:
            yield piece


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ("other size", OtherObjectError),
        ("gap", ServerFailedError),
        ("too large a piece", ServerFailedError),
        ("too much", ServerFailedError),
        ("too little", UnreachableError),
        ("again and again nothing", ServerFailedError),
    ],
)
def test_a_peer_that_lies_is_found(served: ServedPeer, large, lie: str, error: type[TierError]) -> None:
    data, size = large[0].to_bytes(), large[0].size
    one = PIECE_BYTES

    def piece(offset: int, end: int) -> pb.FetchChunkResponse:
        return pb.FetchChunkResponse(offset=offset, data=data[offset:end], size=size)

    served.servicer.chunks = Lying(
        {
            "other size": [pb.FetchChunkResponse(offset=0, data=data[:10], size=size + 1)],
            "gap": [piece(0, one), piece(2 * one, 3 * one)],
            "too large a piece": [piece(0, one + 1)],
            "too much": [
                piece(0, one), piece(one, 2 * one), piece(2 * one, 3 * one),
                pb.FetchChunkResponse(offset=3 * one, data=bytes(one), size=size),
            ],
            "too little": [piece(0, one)],
            "again and again nothing": [piece(0, 0), piece(0, 0)],
        }[lie]
    )  # fmt: skip
    with pytest.raises(error):
        open_verified(served.peer, large[1], within=5)
