"""etcd and the object store away, slow, killed: fast refusals with a retry hint, and recovery by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import read_error
from tests.catalog.rig import Bucket, Rig, Tenant, code, hex_id, model, registration, running, settings, until
from tests.catalog.test_watch import own_etcd
from tests.fixtures.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

WITHIN_S = 25.0
TOKENS = [1] * 256


@pytest.fixture
async def proxied(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> AsyncIterator[tuple[Rig, FaultProxy]]:
    """A catalog whose link to etcd can be broken."""
    async with FaultProxy("127.0.0.1", etcd_server.client_port) as proxy:
        wanted = settings(proxy.address, s3_server, prefix, etcd_timeout_s=0.3, lease_ttl_s=5)
        async with running(wanted) as rig:
            await anext(aiter(rig.stub.WatchEndpoints(pb.WatchEndpointsRequest())))
            yield rig, proxy


def every_call(catalog: Rig, tenant: Tenant) -> dict[str, Any]:
    stub = catalog.stub
    replica = pb.Replica(node="n", group="g", state=pb.REPLICA_STATE_READY, content_id=hex_id())
    update = pb.ReplicaUpdate(fingerprint=tenant.fingerprint, hash=hex_id(), replica=replica)
    chunk = pb.ChunkId(fingerprint=tenant.fingerprint, hash=hex_id())
    demand = pb.Demand(fingerprint=tenant.fingerprint, hash=hex_id(), node="n")
    retention = pb.Retention(owner=hex_id(16), idle_days=1)
    return {
        "Register": lambda: stub.Register(registration("w")),
        "KeepAlive": lambda: stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=1, lease_id=1)),
        "Deregister": lambda: stub.Deregister(pb.DeregisterRequest(worker="w", epoch=1)),
        "ResolveName": lambda: stub.ResolveName(pb.ResolveNameRequest(name="gemma")),
        "SetName": lambda: stub.SetName(pb.SetNameRequest(name="gemma")),
        "ListModels": lambda: stub.ListModels(pb.ListModelsRequest()),
        "Lookup": lambda: stub.Lookup(tenant.lookup(TOKENS)),
        "Publish": lambda: stub.Publish(pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=tenant.chain(TOKENS))),
        "SetReplica": lambda: stub.SetReplica(pb.SetReplicaRequest(updates=[update])),
        "SetDemands": lambda: stub.SetDemands(pb.SetDemandsRequest(demands=[demand])),
        "RemoveDemands": lambda: stub.RemoveDemands(pb.RemoveDemandsRequest()),
        "ListDemands": lambda: stub.ListDemands(pb.ListDemandsRequest()),
        "ConfirmRemovals": lambda: stub.ConfirmRemovals(pb.ConfirmRemovalsRequest(node="n")),
        "Pin": lambda: stub.Pin(pb.PinRequest(chunks=[chunk])),
        "Unpin": lambda: stub.Unpin(pb.UnpinRequest(chunks=[chunk])),
        "ListPins": lambda: stub.ListPins(pb.ListPinsRequest()),
        "RecordUse": lambda: stub.RecordUse(pb.RecordUseRequest(chunks=[chunk])),
        "ListChunks": lambda: stub.ListChunks(pb.ListChunksRequest()),
        "SetRetention": lambda: stub.SetRetention(pb.SetRetentionRequest(retention=retention)),
        "ListRetentions": lambda: stub.ListRetentions(pb.ListRetentionsRequest()),
        "CollectGarbage": lambda: ended(stub.CollectGarbage(pb.CollectGarbageRequest(dry_run=True))),
        "Purge": lambda: ended(stub.Purge(pb.PurgeRequest(owner=retention.owner))),
        "Repair": lambda: ended(stub.Repair(pb.RepairRequest(dry_run=True))),
        "Rebuild": lambda: ended(stub.Rebuild(pb.RebuildRequest(fingerprint=tenant.fingerprint))),
        "ListDecisions": lambda: stub.ListDecisions(pb.ListDecisionsRequest()),
        "GetDecision": lambda: stub.GetDecision(pb.GetDecisionRequest(request_id="r")),
    }


async def ended(stream: Any) -> None:
    """Read to its end."""
    async for _ in stream:
        pass


@pytest.mark.parametrize("fault", ["refused", "silent"])
async def test_every_call_fails_fast_with_a_retry_hint_and_works_again(
    proxied: tuple[Rig, FaultProxy], fault: str
) -> None:
    catalog, proxy = proxied
    tenant = Tenant()
    if fault == "refused":
        proxy.refuse = True
        proxy.reset()
    else:
        proxy.blackhole()
    for name, call in every_call(catalog, tenant).items():
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call()
        assert code(failure) is grpc.StatusCode.UNAVAILABLE, name
        assert time.monotonic() - began < 1.5, name
        retry_after_s = read_error(failure.value).retry_after_s
        assert retry_after_s is not None and 0 < retry_after_s < 2
    proxy.heal()
    proxy.reset()
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await catalog.stub.ListModels(pb.ListModelsRequest())
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)


async def test_watchers_keep_the_last_map_and_get_what_they_missed(
    proxied: tuple[Rig, FaultProxy], catalog: Rig
) -> None:
    away, proxy = proxied  # the same prefix as `catalog`
    stream = away.stub.WatchEndpoints(pb.WatchEndpointsRequest())
    assert not (await stream.read()).endpoints
    await catalog.stub.Register(registration("w-1"))
    async with asyncio.timeout(WITHIN_S):
        assert len((await stream.read()).endpoints) == 1
        proxy.refuse = True
        proxy.reset()
        await until(lambda: away.metric("segue_catalog_watch_events_total", event="lost") > 0)
        assert away.metric("segue_catalog_watch_lag_seconds") > 0
        # A newcomer is told the last map known, rather than nothing.
        newcomer = away.stub.WatchEndpoints(pb.WatchEndpointsRequest())
        assert len((await newcomer.read()).endpoints) == 1
        newcomer.cancel()
        await catalog.stub.Register(registration("w-2"))
        proxy.heal()
        while {e.worker for e in (await stream.read()).endpoints} != {"w-1", "w-2"}:
            pass
        await until(lambda: away.metric("segue_catalog_watch_lag_seconds") == 0)
    stream.cancel()


async def test_demands_set_while_the_link_is_cut_arrive_after_it(proxied: tuple[Rig, FaultProxy], catalog: Rig) -> None:
    away, proxy = proxied  # the same prefix as `catalog`
    tenant = Tenant()
    (chunk,) = tenant.chain(TOKENS)
    await catalog.store_facts(tenant.fingerprint, [chunk])
    async with asyncio.timeout(WITHIN_S):
        maps = aiter(away.stub.WatchDemands(pb.WatchDemandsRequest(node="n")))
        assert not (await anext(maps)).demands
        proxy.refuse = True
        proxy.reset()
        wanted = pb.Demand(fingerprint=tenant.fingerprint, hash=chunk.hash, node="n", priority=3)
        await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=[wanted]))
        proxy.heal()
        proxy.reset()
        told = await anext(maps)
        assert [(d.hash, d.priority) for d in told.demands] == [(chunk.hash, 3)]
        stranger = pb.WatchDemandsRequest(node="not a node")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(aiter(away.stub.WatchDemands(stranger)))
        assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_catalog_that_never_saw_etcd_refuses_watchers(s3_server: SeaweedServer, prefix: str) -> None:
    async with FaultProxy("127.0.0.1", 1) as proxy:
        proxy.refuse = True
        async with running(settings(proxy.address, s3_server, prefix, etcd_timeout_s=0.3)) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await rig.stub.WatchEndpoints(pb.WatchEndpointsRequest()).read()
            assert code(failure) is grpc.StatusCode.UNAVAILABLE
            assert proxy.address in (failure.value.details() or "")


async def test_workers_and_maps_over_kill_9_of_etcd(tmp_path: Path, s3_server: SeaweedServer, prefix: str) -> None:
    """Epochs grow, processes attach again under theirs, both replicas' maps end up equal to the truth."""
    async with own_etcd(tmp_path / "etcd") as (server, child):
        if not server.safe_to_kill:
            pytest.skip(f"unsupported here: etcd {server.version} may lose data under SIGKILL")
        wanted = settings(server.endpoint, s3_server, prefix, etcd_timeout_s=1.0, lease_ttl_s=5)
        async with running(wanted) as one, running(wanted) as two:
            streams = [rig.stub.WatchEndpoints(pb.WatchEndpointsRequest()) for rig in (one, two)]
            for stream in streams:
                await stream.read()
            epochs = [(await one.stub.Register(registration("w"))).epoch]
            other = await one.stub.Register(registration("other"))
            for kills in (1, 2):
                child.kill()
                done = await retried(lambda: two.stub.Register(registration("w")))
                epochs.append(done.epoch)
                await child.wait_restarted(kills)
                again = await retried(lambda: one.stub.Register(registration("other", epoch=other.epoch)))
                assert again.epoch == other.epoch
                address = f"10.0.0.{kills}:1"
                last = await retried(lambda address=address: one.stub.Register(registration("w", address=address)))
                epochs.append(last.epoch)
                async with asyncio.timeout(WITHIN_S):
                    for stream in streams:
                        while [(e.worker, e.epoch) for e in (await stream.read()).endpoints] != [
                            ("other", other.epoch),
                            ("w", epochs[-1]),
                        ]:
                            pass
            assert epochs == sorted(set(epochs))
            for stream in streams:
                stream.cancel()


async def retried(call: Any) -> Any:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)


async def test_the_object_store_away_is_unavailable_not_undurable(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, bucket: Bucket
) -> None:
    """A publisher that were told `not durable` would drop a chunk whose bytes are there."""
    async with FaultProxy("127.0.0.1", s3_server.s3_port) as proxy:
        wanted = settings(
            etcd_server.endpoint, s3_server, prefix, s3_endpoint=f"http://{proxy.address}", s3_timeout_s=0.3
        )
        async with running(wanted) as catalog:
            served = model()
            await catalog.stub.Register(registration("w", served))
            tenant = Tenant(served.fingerprint)
            chunks = tenant.chain(TOKENS)
            await bucket.upload(chunks)
            request = pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks)
            for fault in ("refused", "silent"):
                proxy.refuse = fault == "refused"
                proxy.blackhole(fault == "silent")
                began = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await catalog.stub.Publish(request)
                assert code(failure) is grpc.StatusCode.UNAVAILABLE, fault
                assert read_error(failure.value).retry_after_s and time.monotonic() - began < 2
            proxy.heal()
            proxy.reset()
            assert (await catalog.stub.Publish(request)).chunks[0].created


async def test_a_wrong_secret_is_a_broken_catalog_not_a_missing_object(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, bucket: Bucket
) -> None:
    async with running(settings(etcd_server.endpoint, s3_server, prefix, s3_secret_key="wrong")) as catalog:
        served = model()
        await catalog.stub.Register(registration("w", served))
        tenant = Tenant(served.fingerprint)
        chunks = tenant.chain(TOKENS)
        await bucket.upload(chunks)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await catalog.stub.Publish(pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks))
        assert code(failure) is grpc.StatusCode.INTERNAL
        assert "denies access" in (failure.value.details() or "")
