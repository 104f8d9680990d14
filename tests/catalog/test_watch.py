"""The watch misses nothing: scripted servers for each rule, a real etcd that is compacted, cut off and killed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from cli.embedded.children import Supervisor
from cli.embedded.etcd import EtcdServer
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError
from services.catalog.etcd.transaction import Delete, GetPrefix, Put
from services.catalog.etcd.watch import Changes, Lost, Resumed, Snapshot, WatchEvent, watch_prefix
from tests.catalog.rig import until
from tests.fixtures.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from tests.catalog.rig import Rig

WITHIN_S = 20.0
Act = Callable[[Any], Awaitable[None]]


def header(revision: int) -> Any:
    return rpc.ResponseHeader(revision=revision)


def created(revision: int) -> Any:
    return rpc.WatchResponse(header=header(revision), created=True)


def batch(header_revision: int, *revisions: int) -> Any:
    events = [rpc.Event(kv=rpc.KeyValue(key=b"p/k", value=b"%d" % r, mod_revision=r)) for r in revisions]
    return rpc.WatchResponse(header=header(header_revision), events=events)


@dataclass
class ScriptedEtcd(rpc_pb2_grpc.KVServicer, rpc_pb2_grpc.WatchServicer):  # type: ignore[misc]
    """Answers listings at given revisions and plays one list of replies per watch, then ends it."""

    listings: deque[int] = field(default_factory=deque)
    scripts: deque[list[Any]] = field(default_factory=deque)
    started_at: list[int] = field(default_factory=list)

    async def Txn(self, request: Any, context: Any) -> Any:
        revision = self.listings.popleft()
        kvs = [rpc.KeyValue(key=b"p/k", value=b"%d" % revision, mod_revision=revision)]
        answer = rpc.ResponseOp(response_range=rpc.RangeResponse(kvs=kvs, count=1))
        return rpc.TxnResponse(header=header(revision), succeeded=True, responses=[answer])

    async def Watch(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        request = await anext(requests)
        self.started_at.append(request.create_request.start_revision)
        if not self.scripts:
            await asyncio.sleep(WITHIN_S)
        for reply in self.scripts.popleft():
            yield reply
        await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted end")

    async def play(self, wanted: int) -> list[WatchEvent]:
        """The first `wanted` events a watch of this server hands out."""
        server = grpc.aio.server()
        rpc_pb2_grpc.add_KVServicer_to_server(self, server)
        rpc_pb2_grpc.add_WatchServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = EtcdClient(f"127.0.0.1:{port}")
        try:
            return await collect(watch_prefix(client, b"p/"), lambda events: len(events) == wanted)
        finally:
            await client.close()
            await server.stop(None)


async def collect(stream: Any, enough: Callable[[list[WatchEvent]], bool]) -> list[WatchEvent]:
    events: list[WatchEvent] = []
    async with asyncio.timeout(WITHIN_S), aclosing(stream):
        async for event in stream:
            events.append(event)
            if enough(events):
                break
    return events


def revisions(events: list[WatchEvent]) -> list[int]:
    return [kv.mod_revision for e in events if isinstance(e, Changes) for _, kv in e.events if kv is not None]


async def test_resumes_after_the_last_event_not_after_the_header() -> None:
    """Replies that catch up on history carry a newer header than their events."""
    etcd = ScriptedEtcd(deque([10]), deque([[created(50), batch(50, 11, 12)], [created(50), batch(50, 13)]]))
    events = await etcd.play(6)
    assert etcd.started_at == [11, 13]
    assert revisions(events) == [11, 12, 13]
    assert [type(e) for e in events] == [Snapshot, Resumed, Changes, Lost, Resumed, Changes]


async def test_a_loss_before_the_first_event_starts_where_the_listing_ended() -> None:
    """Nor does the `created` reply's own revision move the start: what came in between would be skipped."""
    etcd = ScriptedEtcd(deque([10]), deque([[created(40)], [created(60), batch(60, 11)]]))
    events = await etcd.play(5)
    assert etcd.started_at == [11, 11] and revisions(events) == [11]


async def test_compaction_lists_again_without_reporting_a_loss() -> None:
    compacted = rpc.WatchResponse(header=header(90), canceled=True, compact_revision=80)
    etcd = ScriptedEtcd(deque([10, 90]), deque([[created(90), compacted], [created(90), batch(91, 91)]]))
    events = await etcd.play(5)
    assert etcd.started_at == [11, 91]
    assert [type(e) for e in events] == [Snapshot, Resumed, Snapshot, Resumed, Changes]


async def test_an_etcd_restored_from_a_backup_is_listed_again() -> None:
    """It stands at revision 5 and would wait in silence for revision 11."""
    etcd = ScriptedEtcd(deque([10, 5]), deque([[created(5)], [created(5), batch(6, 6)]]))
    events = await etcd.play(4)
    assert etcd.started_at == [11, 6]
    assert [type(e) for e in events] == [Snapshot, Snapshot, Resumed, Changes]


async def test_no_task_is_left_behind_by_lost_streams() -> None:
    """A request generator's task would stay behind with each broken stream; write() has none."""
    etcd = ScriptedEtcd(deque([10]), deque([[created(10)] for _ in range(4)]))
    before = asyncio.all_tasks()
    await etcd.play(9)
    async with asyncio.timeout(WITHIN_S):
        while asyncio.all_tasks() - before:
            await asyncio.wait(asyncio.all_tasks() - before, timeout=0.05)


async def test_a_server_that_never_creates_the_watch_is_given_up_in_time() -> None:
    etcd = ScriptedEtcd(deque([10]), deque())
    etcd.scripts.append([])

    async def silent(requests: Any, context: Any) -> AsyncIterator[Any]:
        etcd.started_at.append(0)
        await asyncio.sleep(WITHIN_S)
        yield created(10)

    etcd.Watch = silent  # type: ignore[method-assign, assignment]
    events = await etcd.play(2)
    assert [type(e) for e in events] == [Snapshot, Lost]


async def test_a_real_watch_over_cut_connections_and_compaction(catalog: Rig) -> None:
    """What happens while the connection is away is caught up; where history is gone, the snapshot holds it."""
    prefix = catalog.keys.prefix.encode() + b"x/"
    host, _, port = catalog.etcd.endpoint.rpartition(":")
    put = lambda i: catalog.etcd.transact(success=[Put(prefix + b"%03d" % i, b"%d" % i)])  # noqa: E731
    async with FaultProxy(host, int(port)) as proxy:
        client = EtcdClient(proxy.address)
        stream = watch_prefix(client, prefix)
        try:
            seen = [(await put(0)).revision]
            events = await collect_some(stream, lambda es: isinstance(es[-1], Resumed))
            proxy.refuse = True
            proxy.reset()
            await collect_some(stream, lambda es: isinstance(es[-1], Lost))
            seen += [(await put(i)).revision for i in range(1, 20)]
            proxy.heal()
            events = await collect_some(stream, lambda es: bool(revisions(es)) and revisions(es)[-1] == seen[-1])
            assert revisions(events) == seen[1:]

            proxy.refuse = True
            proxy.reset()
            await collect_some(stream, lambda es: isinstance(es[-1], Lost))
            await catalog.etcd.transact(success=[Delete(prefix + b"000")])
            last = (await put(20)).revision
            await compact(catalog.etcd, last)
            proxy.heal()
            events = await collect_some(stream, lambda es: isinstance(es[-1], Snapshot))
            assert [kv.key for kv in events[-1].found] == [prefix + b"%03d" % i for i in range(1, 21)]
            after = (await put(21)).revision
            events = await collect_some(stream, lambda es: isinstance(es[-1], Changes))
            assert revisions(events) == [after]
        finally:
            await stream.aclose()
            await client.close()


async def collect_some(stream: Any, enough: Callable[[list[Any]], bool]) -> list[Any]:
    """As `collect`, but the stream goes on."""
    events: list[Any] = []
    async with asyncio.timeout(WITHIN_S):
        while not events or not enough(events):
            events.append(await anext(stream))
    return events


async def compact(client: EtcdClient, revision: int) -> None:
    await client._kv.Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=5)


@asynccontextmanager
async def own_etcd(folder: Path) -> AsyncIterator[tuple[EtcdServer, Any]]:
    async with Supervisor() as supervisor:
        server = EtcdServer.in_dir(folder)
        yield server, await supervisor.start(server.spec())


async def test_a_real_watch_over_kill_9(tmp_path: Path) -> None:
    """Every acknowledged write is delivered exactly once, in order, over two kills under load."""
    async with own_etcd(tmp_path / "etcd") as (server, child):
        if not server.safe_to_kill:
            pytest.skip(f"unsupported here: etcd {server.version} may lose data under SIGKILL")
        client = EtcdClient(server.endpoint, timeout_s=1.0)
        acknowledged: list[int] = []
        stop = asyncio.Event()

        async def put(key: bytes) -> int:
            """Until it is acknowledged: the load goes on at a bounded rate while etcd is away."""
            while True:
                try:
                    return (await client.transact(success=[Put(key, b"v")])).revision
                except EtcdError:
                    await asyncio.sleep(0.02)

        async def write() -> None:
            i = 0
            while not stop.is_set():
                i += 1
                acknowledged.append(await put(b"p/%06d" % i))
            await put(b"p/last")

        async def more_than(count: int) -> None:
            goal = len(acknowledged) + count
            await until(lambda: len(acknowledged) >= goal)

        async def kill_twice() -> None:
            for kills in (1, 2):
                await more_than(200)
                child.kill()
                await child.wait_restarted(kills)
            await more_than(50)
            stop.set()

        stream = watch_prefix(client, b"p/")
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                events = await collect_some(stream, lambda es: isinstance(es[-1], Resumed))
                tasks.create_task(write())
                tasks.create_task(kill_twice())
                delivered: list[int] = []
                last: bytes = b""
                while last != b"p/last":
                    event = await anext(stream)
                    assert not isinstance(event, Snapshot)
                    delivered += revisions([event])
                    last = event.events[-1][0] if isinstance(event, Changes) else last
            found = (await client.transact(success=[GetPrefix(b"p/")])).reads[0]
        finally:
            await stream.aclose()
            await client.close()
        assert isinstance(events[0], Snapshot)
        assert delivered == sorted(set(delivered))
        assert set(acknowledged) <= set(delivered)
        # A key that was put again after a lost acknowledgement stands with its last revision only.
        assert {kv.mod_revision for kv in found if kv.key != b"p/last"} <= set(delivered)
