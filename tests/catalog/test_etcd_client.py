"""The thin client: limits, deadlines, no blind repetition, leases, authentication, TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from cli.embedded.ports import free_ports
from services.catalog.etcd.backoff import Backoff
from services.catalog.etcd.client import EtcdClient, Login, Tls
from services.catalog.etcd.errors import (
    EtcdCompactedError,
    EtcdDeniedError,
    EtcdError,
    EtcdLeaseError,
    EtcdUnavailableError,
)
from services.catalog.etcd.transaction import Exists, Get, GetPrefix, Put, Unchanged, prefix_end
from services.catalog.etcd.watch import Changes, Snapshot, watch_prefix
from services.catalog.facts.errors import ContendedError
from services.catalog.facts.races import ATTEMPTS, attempts
from tests.catalog.guarded_etcd import guarded_etcd
from tests.catalog.rig import Rig
from tests.fixtures.fault_proxy import FaultProxy


async def test_compare_and_swap(catalog: Rig) -> None:
    key = catalog.keys.prefix.encode() + b"k"
    put, get = Put(key, b"1"), Get(key)
    first = await catalog.etcd.transact(compare=[Unchanged(key, 0)], success=[put], failure=[get])
    assert first.succeeded
    second = await catalog.etcd.transact(compare=[Unchanged(key, 0)], success=[put], failure=[get])
    assert not second.succeeded and second.reads[0][0].mod_revision == first.revision
    assert (await catalog.etcd.transact(compare=[Exists(key)])).succeeded
    assert not (await catalog.etcd.transact(compare=[Exists(key + b"?")])).succeeded


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 250])
async def test_reads_are_cut_into_transactions_that_etcd_takes(catalog: Rig, count: int) -> None:
    prefix = catalog.keys.prefix.encode()
    keys = [prefix + b"%04d" % i for i in range(count)]
    for i in range(0, count, 100):
        await catalog.etcd.transact(success=[Put(key, key) for key in keys[i : i + 100]])
    result = await catalog.etcd.read([Get(key) for key in keys])
    assert [kvs[0].value for kvs in result.found] == keys and result.revision > 0
    (everything,) = (await catalog.etcd.read([GetPrefix(prefix)])).found
    assert [kv.key for kv in everything] == keys


async def test_a_transaction_over_the_limit_is_refused_before_it_is_sent(catalog: Rig) -> None:
    with pytest.raises(ValueError, match="101 operations"):
        await catalog.etcd.transact(success=[Get(b"x")] * 101)


def test_prefix_ends() -> None:
    assert prefix_end(b"a/") == b"a0" and prefix_end(b"a\xff") == b"b"
    with pytest.raises(ValueError, match="no end"):
        prefix_end(b"\xff")


async def test_a_scan_is_one_snapshot_in_pages_until_it_is_compacted(catalog: Rig) -> None:
    root = catalog.keys.prefix.encode()
    keys = [b"%bscan/%03d" % (root, i) for i in range(25)]
    revision = (await catalog.etcd.transact(success=[Put(key, b"old") for key in keys])).revision
    pages = []
    async for page in catalog.etcd.scan(root + b"scan/", at_revision=revision, page=10):
        pages.append([kv.key for kv in page])
        assert {kv.value for kv in page} == {b"old"}
        await catalog.etcd.transact(success=[Put(key, b"new") for key in keys])
    assert pages == [keys[:10], keys[10:20], keys[20:]]
    after = [kv.key async for page in catalog.etcd.scan(root + b"scan/", after=keys[22]) for kv in page]
    assert after == keys[23:]
    newest = (await catalog.etcd.read([])).revision
    await catalog.etcd._kv.Compact(rpc.CompactionRequest(revision=newest), timeout=5)
    with pytest.raises(EtcdCompactedError):
        async for _ in catalog.etcd.scan(root + b"scan/", at_revision=revision):
            pass


async def test_leases(catalog: Rig) -> None:
    lease, ttl_s = await catalog.etcd.grant_lease(60)
    assert ttl_s == 60 and await catalog.etcd.extend_lease(lease) == 60
    await catalog.etcd.revoke_lease(lease)
    assert await catalog.etcd.extend_lease(lease) == 0
    with pytest.raises(EtcdLeaseError):
        await catalog.etcd.transact(success=[Put(b"x", b"", lease)])
    with pytest.raises(EtcdLeaseError):
        await catalog.etcd.revoke_lease(lease)


async def test_an_absent_etcd_fails_fast_by_name() -> None:
    (port,) = free_ports(1)
    client = EtcdClient(f"127.0.0.1:{port}")
    for ask in (client.read([]), client.grant_lease(5), client.extend_lease(1)):
        began = time.monotonic()
        with pytest.raises(EtcdUnavailableError, match=f"127.0.0.1:{port}"):
            await ask
        assert time.monotonic() - began < 1.0
    await client.close()


async def test_a_silent_etcd_fails_at_the_deadline(catalog: Rig) -> None:
    host, _, port = catalog.etcd.endpoint.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        client = EtcdClient(proxy.address, timeout_s=0.3)
        await client.read([])
        proxy.blackhole()
        for ask in (client.read([]), client.grant_lease(5), client.extend_lease(1)):
            began = time.monotonic()
            with pytest.raises(EtcdUnavailableError):
                await ask
            assert time.monotonic() - began < 1.0
        await client.close()


async def test_a_write_whose_reply_is_lost_is_never_sent_again(catalog: Rig) -> None:
    """The server commits, then the reply is lost: one request, one error, and a read tells the outcome."""
    key = catalog.keys.prefix.encode() + b"counted"
    sent = 0

    class LosesReplies(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]
        async def Txn(self, request: Any, context: Any) -> Any:
            nonlocal sent
            sent += 1
            await catalog.etcd._kv.Txn(request)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost after the commit")

    server = grpc.aio.server()
    rpc_pb2_grpc.add_KVServicer_to_server(LosesReplies(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = EtcdClient(f"127.0.0.1:{port}")
    with pytest.raises(EtcdUnavailableError):
        await client.transact(compare=[Unchanged(key, 0)], success=[Put(key, b"mine")])
    assert sent == 1
    (found,) = (await catalog.etcd.read([Get(key)])).found
    assert found[0].value == b"mine"
    await client.close()
    await server.stop(None)


async def test_attempts_are_bounded() -> None:
    made = []
    with pytest.raises(ContendedError):
        async for attempt in attempts("a test"):
            made.append(attempt)  # noqa: PERF401 - what was made before the error counts
    assert made == list(range(ATTEMPTS))


def test_backoff_grows_to_its_limit_with_jitter() -> None:
    def pauses() -> list[float]:
        backoff = Backoff(first=0.1, limit=1.0)
        return [backoff.next_pause() for _ in range(8)]

    runs = [pauses() for _ in range(50)]
    for i, ceiling in enumerate([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]):
        column = [run[i] for run in runs]
        assert min(column) > 0
        assert ceiling / 2 < max(column) <= ceiling
        assert len(set(column)) > 40


# Authentication and TLS, against an etcd that demands both.


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[str, Tls]]:
    """(endpoint, the TLS material) of an etcd with client certificates and a user root:secret."""
    async with guarded_etcd(tmp_path) as (endpoint, tls):
        yield endpoint, tls


async def test_login_over_tls_and_a_token_that_went_stale(guarded: tuple[str, Tls]) -> None:
    endpoint, tls = guarded
    client = EtcdClient(endpoint, tls=tls, login=Login("root", "secret"))
    await client.transact(success=[Put(b"p/1", b"")])
    lease, _ = await client.grant_lease(60)
    assert await client.extend_lease(lease) == 60

    stream = watch_prefix(client, b"p/")
    async with asyncio.timeout(20):
        while not isinstance(await anext(stream), Snapshot):
            pass
        # As after a restart of etcd, whose simple tokens live in its memory.
        client._token = "stale.1"
        assert (await client.transact(success=[Put(b"p/2", b"")])).succeeded
        assert client._token != "stale.1"
        client._token = "stale.2"
        while not isinstance(await anext(stream), Changes):
            pass
    await stream.aclose()
    await client.close()


@pytest.mark.parametrize("login", [None, Login("root", "wrong"), Login("nobody", "secret")])
async def test_wrong_logins_are_denied_not_unavailable(guarded: tuple[str, Tls], login: Login | None) -> None:
    endpoint, tls = guarded
    client = EtcdClient(endpoint, tls=tls, login=login)
    with pytest.raises(EtcdDeniedError, match="user, password"):
        await client.read([Get(b"x")])
    await client.close()


async def test_without_the_right_certificates_nothing_is_said(guarded: tuple[str, Tls]) -> None:
    endpoint, tls = guarded
    for wrong in (None, Tls(tls.ca)):
        client = EtcdClient(endpoint, tls=wrong, login=Login("root", "secret"), timeout_s=1.0)
        with pytest.raises(EtcdError):
            await client.read([Get(b"x")])
        await client.close()
