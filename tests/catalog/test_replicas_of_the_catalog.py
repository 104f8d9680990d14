"""Several catalogs on one etcd, which demands TLS and a login of narrow rights: one truth, whoever is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import read_error
from services.catalog.settings import CatalogSettings
from tests.catalog.guarded_etcd import guarded_etcd
from tests.catalog.rig import Bucket, Tenant, code, model, registration, running, settings

if TYPE_CHECKING:
    from cli.embedded.seaweed import SeaweedServer

TOKENS = [i // 256 for i in range(3 * 256)] + [5] * 40


def guarded_settings(endpoint: str, folder: Path, s3: SeaweedServer, user: str = "segue") -> CatalogSettings:
    return settings(
        endpoint,
        s3,
        "segue/",
        etcd_user=user,
        etcd_password="secret",
        etcd_ca_file=folder / "ca.pem",
        etcd_cert_file=folder / "client.pem",
        etcd_key_file=folder / "client.key",
        lease_ttl_s=5,
    )


async def test_two_replicas_over_tls_and_a_login_with_rights_on_the_prefix_alone(
    tmp_path: Path, s3_server: SeaweedServer, bucket: Bucket
) -> None:
    async with guarded_etcd(tmp_path) as (endpoint, _):
        wanted = guarded_settings(endpoint, tmp_path, s3_server)
        async with running(wanted) as one, running(wanted) as two, asyncio.timeout(40):
            served = model()
            first = await one.stub.Register(registration("w", served, node="node-a"))
            tenant = Tenant(served.fingerprint)
            chunks = tenant.chain(TOKENS, tail=True)
            await bucket.upload(chunks)
            # Both publish the same at once; each finds what the other wrote.
            request = pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks, node="node-a")
            replies = await asyncio.gather(*(c.stub.Publish(request) for c in (one, two, one, two)))
            assert sum(p.created for reply in replies for p in reply.chunks) == len(chunks)
            for catalog in (one, two):
                async for newest in catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
                    if newest.endpoints:
                        break
                found = await catalog.stub.Lookup(tenant.lookup(TOKENS))
                assert [n.chunk.hash for n in found.nodes] == [c.hash for c in chunks[:3]]
                assert found.tail.chunk.hash == chunks[3].hash
                assert {r.node for r in found.nodes[0].replicas} == {"node-a"}
            # A newer process through the other replica; the older one is told whoever it asks.
            second = await two.stub.Register(registration("w", served))
            assert second.epoch > first.epoch
            alive = await one.stub.KeepAlive(
                pb.KeepAliveRequest(worker="w", epoch=first.epoch, lease_id=first.lease_id)
            )
            assert alive.latest_epoch == second.epoch
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await one.stub.Register(registration("w", served, epoch=first.epoch))
            assert read_error(failure.value).reason == "DUPLICATE_WORKER"
            # A demand set here is watched there.
            demand = pb.Demand(fingerprint=tenant.fingerprint, hash=chunks[0].hash, node="node-a")
            await one.stub.SetDemands(pb.SetDemandsRequest(demands=[demand], ttl_ms=30_000))
            async for asked in two.stub.WatchDemands(pb.WatchDemandsRequest(node="node-a")):
                if asked.demands:
                    break
            assert asked.demands[0].chunk.hash == chunks[0].hash
            # Two collections at once: one runs, or both one after the other; never together.
            outcomes = await asyncio.gather(*(collected(c.stub) for c in (one, two, one, two)))
            assert "done" in outcomes and set(outcomes) <= {"done", "ABORTED"}
            last = pb.PurgeResponse()
            async for report in two.stub.Purge(pb.PurgeRequest(owner=chunks[0].owner)):
                last = report
            assert last.totals.chunks_removed == len(chunks)
            assert not (await one.stub.Lookup(tenant.lookup(TOKENS))).nodes


async def collected(stub: object) -> str:
    try:
        async for report in stub.CollectGarbage(pb.CollectGarbageRequest()):  # type: ignore[attr-defined]
            if report.done:
                return "done"
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "unfinished"


async def test_a_login_without_rights_is_a_broken_catalog(tmp_path: Path, s3_server: SeaweedServer) -> None:
    async with (
        guarded_etcd(tmp_path, prefix="elsewhere/") as (endpoint, _),
        running(guarded_settings(endpoint, tmp_path, s3_server)) as catalog,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await catalog.stub.ListModels(pb.ListModelsRequest())
        assert code(failure) is grpc.StatusCode.INTERNAL
        assert "role" in (failure.value.details() or "")
