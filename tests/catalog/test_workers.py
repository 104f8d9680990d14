"""Epochs, leases, duplicates, models and names."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import read_error
from services.catalog.etcd.transaction import Get, Put
from services.catalog.facts.endpoints import map_hash
from services.catalog.facts.workers import Workers
from tests.catalog.rig import Rig, code, endpoint, model, registration, running, settings

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

WITHIN_S = 20.0


async def map_with(catalog: Rig, workers: set[str]) -> pb.EndpointMap:
    """The first map with exactly these workers."""
    async with asyncio.timeout(WITHIN_S):
        async for newest in catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
            if {listed.worker for listed in newest.endpoints} == workers:
                found: pb.EndpointMap = newest
                return found
    raise AssertionError("the stream ended")


async def test_epochs_increase_strictly_and_start_at_the_clock(catalog: Rig) -> None:
    before = time.time_ns() // 1_000_000
    epochs = [(await catalog.stub.Register(registration("w"))).epoch for _ in range(20)]
    assert epochs == sorted(set(epochs)) and epochs[0] >= before


async def test_epochs_increase_when_the_clock_goes_back(catalog: Rig) -> None:
    times = iter([5_000, 4_000, 4_000, 9_000])
    workers = Workers(catalog.etcd, catalog.keys, lease_ttl_s=5, now_ms=lambda: next(times))
    epochs = [(await workers.register(endpoint("w"), [], [], 0)).epoch for _ in range(4)]
    assert epochs == [5_000, 5_001, 5_002, 9_000]


async def test_processes_that_register_in_the_same_millisecond_get_distinct_epochs(catalog: Rig) -> None:
    workers = Workers(catalog.etcd, catalog.keys, lease_ttl_s=5, now_ms=lambda: 5_000)
    done = await asyncio.gather(*(workers.register(endpoint("w"), [], [], 0) for _ in range(6)))
    assert sorted(registered.epoch for registered in done) == list(range(5_000, 5_006))


async def test_keepalive_of_an_endpoint_that_was_removed_says_so(catalog: Rig) -> None:
    """Its lease may still live: extending that alone would keep a worker that nobody can find."""
    done = await catalog.stub.Register(registration("w"))
    await catalog.stub.Deregister(pb.DeregisterRequest(worker="w", epoch=done.epoch))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=done.epoch, lease_id=done.lease_id))
    assert code(failure) is grpc.StatusCode.NOT_FOUND


async def test_concurrent_registrations_of_one_id_get_distinct_epochs_and_the_largest_stands(catalog: Rig) -> None:
    replies = await asyncio.gather(*(catalog.stub.Register(registration("w")) for _ in range(8)))
    epochs = [reply.epoch for reply in replies]
    assert len(set(epochs)) == 8
    newest = await map_with(catalog, {"w"})
    while newest.endpoints[0].epoch != max(epochs):
        newest = await map_with(catalog, {"w"})
    (stored,) = (await catalog.etcd.read([Get(catalog.keys.epoch("w"))])).found
    assert int(stored[0].value) == max(epochs)


async def test_a_silent_worker_leaves_the_map_and_attaches_again_under_its_epoch(catalog: Rig) -> None:
    served = model()
    first = await catalog.stub.Register(registration("w", served))
    assert first.ttl_ms == 2_000
    await map_with(catalog, {"w"})
    await map_with(catalog, set())
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=first.epoch, lease_id=first.lease_id))
    assert code(failure) is grpc.StatusCode.NOT_FOUND
    again = await catalog.stub.Register(registration("w", served, epoch=first.epoch))
    assert again.epoch == first.epoch and again.lease_id != first.lease_id
    assert (await map_with(catalog, {"w"})).endpoints[0].epoch == first.epoch


async def test_keepalive_keeps_a_worker_beyond_its_lease(catalog: Rig) -> None:
    done = await catalog.stub.Register(registration("w"))
    until_at = time.monotonic() + 3.0  # a lease and a half
    while time.monotonic() < until_at:
        alive = await catalog.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=done.epoch, lease_id=done.lease_id))
        assert (alive.ttl_ms, alive.latest_epoch) == (2_000, done.epoch)
        await asyncio.sleep(0.3)
    assert len((await map_with(catalog, {"w"})).endpoints) == 1


async def test_an_older_duplicate_is_refused_and_the_newer_left_alone(catalog: Rig) -> None:
    old = await catalog.stub.Register(registration("w", address="10.0.0.1:1"))
    new = await catalog.stub.Register(registration("w", address="10.0.0.2:2"))
    alive = await catalog.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=old.epoch, lease_id=old.lease_id))
    assert alive.latest_epoch == new.epoch > old.epoch
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.Register(registration("w", epoch=old.epoch))
    assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION
    details = read_error(failure.value)
    assert details.reason == "DUPLICATE_WORKER" and details.values["latest_epoch"] == str(new.epoch)
    removed = await catalog.stub.Deregister(pb.DeregisterRequest(worker="w", epoch=old.epoch))
    assert not removed.removed
    listed = (await map_with(catalog, {"w"})).endpoints[0]
    assert (listed.epoch, listed.address) == (new.epoch, "10.0.0.2:2")


async def test_the_lease_of_an_older_process_does_not_take_the_newer_endpoint_along(catalog: Rig) -> None:
    old = await catalog.stub.Register(registration("w"))
    new = await catalog.stub.Register(registration("w"))
    await catalog.etcd.revoke_lease(old.lease_id)
    alive = await catalog.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=new.epoch, lease_id=new.lease_id))
    assert alive.ttl_ms == 2_000
    assert (await map_with(catalog, {"w"})).endpoints[0].epoch == new.epoch


async def test_a_process_attaches_again_after_etcd_forgot_its_epoch(catalog: Rig) -> None:
    """As after a restore from an older backup."""
    done = await catalog.stub.Register(registration("w"))
    await catalog.etcd.transact(success=[Put(catalog.keys.epoch("w"), b"17")])
    again = await catalog.stub.Register(registration("w", epoch=done.epoch))
    assert again.epoch == done.epoch
    assert (await catalog.stub.Register(registration("w"))).epoch > done.epoch


async def test_deregister_removes_at_once_and_twice_is_fine(catalog: Rig) -> None:
    done = await catalog.stub.Register(registration("w"))
    await map_with(catalog, {"w"})
    ask = pb.DeregisterRequest(worker="w", epoch=done.epoch)
    assert (await catalog.stub.Deregister(ask)).removed
    await map_with(catalog, set())
    assert not (await catalog.stub.Deregister(ask)).removed
    assert (await catalog.stub.Register(registration("w"))).epoch > done.epoch


async def test_maps_are_sorted_and_equal_maps_have_equal_hashes(catalog: Rig) -> None:
    for worker in ("b", "a", "a.1", "c"):
        await catalog.stub.Register(registration(worker))
    newest = await map_with(catalog, {"a", "a.1", "b", "c"})
    assert newest.hash == map_hash(list(newest.endpoints)) and newest.revision > 0
    changed = list(newest.endpoints)
    changed[0].address = "10.9.9.9:9"
    assert map_hash(changed) != newest.hash


async def test_every_watcher_of_a_replica_sees_the_newest_map_over_one_etcd_watch(catalog: Rig) -> None:
    streams = [catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()) for _ in range(20)]
    for stream in streams:
        assert not (await stream.read()).endpoints
    for i in range(5):
        await catalog.stub.Register(registration(f"w-{i}"))

    async def last(stream: object) -> int:
        async with asyncio.timeout(WITHIN_S):
            while len((seen := await stream.read()).endpoints) < 5:  # type: ignore[attr-defined]
                pass
        return len(seen.endpoints)

    assert await asyncio.gather(*(last(stream) for stream in streams)) == [5] * 20
    assert catalog.metric("segue_catalog_endpoint_watchers") == 20
    assert catalog.metric("segue_catalog_watch_events_total", event="snapshot") == 1
    for stream in streams:
        stream.cancel()


async def test_two_replicas_serve_one_truth(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, catalog: Rig
) -> None:
    async with running(settings(etcd_server.endpoint, s3_server, prefix, lease_ttl_s=2)) as other:
        done = await catalog.stub.Register(registration("w"))
        alive = await other.stub.KeepAlive(pb.KeepAliveRequest(worker="w", epoch=done.epoch, lease_id=done.lease_id))
        assert alive.latest_epoch == done.epoch
        assert (await other.stub.Register(registration("w"))).epoch > done.epoch
        one, two = await map_with(catalog, {"w"}), await map_with(other, {"w"})
        while one.hash != two.hash:
            one, two = await map_with(catalog, {"w"}), await map_with(other, {"w"})


async def test_registration_makes_models_and_names_known(catalog: Rig) -> None:
    one, two = model(), model()
    await catalog.stub.Register(registration("w-1", one))
    await catalog.stub.Register(registration("w-2", two, one))
    resolved = await catalog.stub.ResolveName(pb.ResolveNameRequest(name="gemma"))
    assert list(resolved.models) == [one, two]
    listing = await catalog.stub.ListModels(pb.ListModelsRequest())
    assert [(n.name, list(n.fingerprints)) for n in listing.names] == [("gemma", [one.fingerprint, two.fingerprint])]
    assert list(listing.models) == sorted([one, two], key=lambda m: m.fingerprint)
    assert list((await map_with(catalog, {"w-1", "w-2"})).endpoints[1].models) == [two.fingerprint, one.fingerprint]


async def test_concurrent_registrations_lose_no_name(catalog: Rig) -> None:
    models = [model() for _ in range(8)]
    await asyncio.gather(*(catalog.stub.Register(registration(f"w-{i}", m)) for i, m in enumerate(models)))
    resolved = await catalog.stub.ResolveName(pb.ResolveNameRequest(name="gemma"))
    assert {m.fingerprint for m in resolved.models} == {m.fingerprint for m in models}


async def test_one_fingerprint_has_one_description(catalog: Rig) -> None:
    known = model(max_context=4_096)
    await catalog.stub.Register(registration("w", known))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.Register(registration("w-2", model(known.fingerprint, variant="cuda.1")))
    assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION and "variant" in (failure.value.details() or "")
    assert {e.worker for e in (await map_with(catalog, {"w"})).endpoints} == {"w"}
    # What an operator chooses per start may change.
    await catalog.stub.Register(registration("w", model(known.fingerprint, max_context=8_192)))
    resolved = await catalog.stub.ResolveName(pb.ResolveNameRequest(name="gemma"))
    assert resolved.models[0].max_context == 8_192


async def test_set_name_reorders_refuses_strangers_and_removes(catalog: Rig) -> None:
    one, two = model(), model()
    await catalog.stub.Register(registration("w", one, two))
    order = [two.fingerprint, one.fingerprint]
    await catalog.stub.SetName(pb.SetNameRequest(name="org/gemma-3", fingerprints=order))
    resolved = await catalog.stub.ResolveName(pb.ResolveNameRequest(name="org/gemma-3"))
    assert [m.fingerprint for m in resolved.models] == order
    stranger = "ee" * 32
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.SetName(pb.SetNameRequest(name="gemma", fingerprints=[stranger, one.fingerprint]))
    assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION
    assert stranger in (failure.value.details() or "") and one.fingerprint not in (failure.value.details() or "")
    await catalog.stub.SetName(pb.SetNameRequest(name="org/gemma-3"))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.ResolveName(pb.ResolveNameRequest(name="org/gemma-3"))
    assert code(failure) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("worker", registration("a/b")),
        ("worker", registration("")),
        ("address", registration("w", address="nowhere")),
        ("address", registration("w", address="::1:70")),
        ("family", registration("w", family="ipx")),
        ("node", registration("w", node="a/b")),
        ("chunk_tokens", registration("w", model(chunk_tokens=128))),
        ("fingerprint", registration("w", model("XY" * 32))),
        ("names", pb.RegisterRequest(endpoint=endpoint("w"), models=[model()])),
        ("name", registration("w", model(), name="two words")),
    ],
)
async def test_bad_registrations_say_which_field(catalog: Rig, field: str, request_: pb.RegisterRequest) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.Register(request_)
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT
    assert read_error(failure.value).values["field"] == field


async def test_an_ipv6_address_is_fine(catalog: Rig) -> None:
    await catalog.stub.Register(registration("w", address="[::1]:7001", family="ipv6"))
