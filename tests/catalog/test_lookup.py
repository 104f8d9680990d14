"""Look-up against a naive model, its sizes, its round trips and what it must not believe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.contracts.segue.v1 import catalog_pb2 as pb
from tests.catalog.rig import FULL, Rig, Tenant, code, hex_id, model, registration

CHUNK = 256


def blocks(ids: Sequence[int], extra: int = 0) -> list[int]:
    """Each id fills one chunk; then `extra` tokens of id 7."""
    return [i for i in ids for _ in range(CHUNK)] + [7] * extra


@pytest.mark.parametrize("known", [0, 1, 99, 100, 101, 250, 399, 400, 401, 650])
async def test_every_existing_node_is_found_and_no_more(catalog: Rig, known: int) -> None:
    tenant, tokens = Tenant(), [i // CHUNK for i in range(660 * CHUNK)]
    chain = tenant.chain(tokens, groups=[FULL])
    await catalog.store_facts(tenant.fingerprint, chain[:known])
    found = await catalog.stub.Lookup(tenant.lookup(tokens))
    assert [node.chunk.hash for node in found.nodes] == [chunk.hash for chunk in chain[:known]]
    assert not found.HasField("tail") and found.revision > 0


@pytest.mark.parametrize("salted", [False, True])
async def test_a_root_stands_for_the_salt(catalog: Rig, salted: bool) -> None:
    tenant, tokens = Tenant(), blocks([1, 2], 48)
    chain = tenant.chain(tokens, tail=True, groups=[FULL])
    await catalog.store_facts(tenant.fingerprint, chain)
    request = tenant.lookup(tokens)
    request.after = chain[0].parent
    if not salted:
        request.tenant_salt = ""
    found = await catalog.stub.Lookup(request)
    assert [node.chunk.hash for node in [*found.nodes, found.tail]] == [chunk.hash for chunk in chain]
    # Nor is the salt needed further on. Under another root there is nothing.
    request = tenant.lookup(tokens, tenant.nodes(tokens)[0])
    request.tenant_salt = ""
    assert [node.chunk.hash for node in (await catalog.stub.Lookup(request)).nodes] == [chain[1].hash]
    other = pb.LookupRequest(fingerprint=tenant.fingerprint, after=hex_id(), tokens=tokens)
    assert not (await catalog.stub.Lookup(other)).nodes


HISTORIES = st.lists(st.integers(1, 2), max_size=4)
TAILS = st.integers(0, 15)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    published=st.lists(st.tuples(HISTORIES, TAILS), max_size=5),
    asked=HISTORIES,
    extra=st.integers(0, 2 * CHUNK + 3),
    known=st.integers(0, 4),
)
async def test_longest_prefix_as_a_naive_model_has_it(
    catalog: Rig, published: list[tuple[list[int], int]], asked: list[int], extra: int, known: int
) -> None:
    tenant = Tenant()
    full: set[tuple[int, ...]] = set()
    tails: set[tuple[int, ...]] = set()
    for ids, tail in published:
        tokens = blocks(ids, 16 * tail)
        await catalog.store_facts(tenant.fingerprint, tenant.chain(tokens, tail=True, groups=[FULL]))
        full |= {tuple(tokens[: CHUNK * (i + 1)]) for i in range(len(ids))}
        if tail:
            tails.add(tuple(tokens))
    tokens = blocks(asked, extra)

    nodes = tenant.nodes(tokens)
    after = nodes[min(known, len(nodes)) - 1] if known and nodes else None
    end = after.end if after else 0
    while end + CHUNK <= len(tokens) and tuple(tokens[: end + CHUNK]) in full:
        end += CHUNK
    first = after.end if after else 0
    possible = [t for t in range(end + 16, end + CHUNK, 16) if t <= len(tokens) and tuple(tokens[:t]) in tails]

    found = await catalog.stub.Lookup(tenant.lookup(tokens, after))
    assert [node.chunk.end for node in found.nodes] == list(range(first + CHUNK, end + 1, CHUNK))
    assert (found.tail.chunk.end if found.HasField("tail") else None) == (max(possible) if possible else None)


@pytest.mark.parametrize(
    ("length", "expected"), [(15, None), (16, 16), (47, 16), (48, 48), (239, 48), (240, 240), (255, 240), (600, 240)]
)
async def test_the_longest_of_several_tails(catalog: Rig, length: int, expected: int | None) -> None:
    tenant = Tenant()
    for tail in (16, 48, 240):
        await catalog.store_facts(tenant.fingerprint, tenant.chain(blocks([1], tail), tail=True, groups=[FULL]))
    # Another conversation's tail under the same node, longer than any of these.
    other = blocks([1]) + [3] * 224
    await catalog.store_facts(tenant.fingerprint, tenant.chain(other, tail=True, groups=[FULL]))
    found = await catalog.stub.Lookup(tenant.lookup(blocks([1], length)))
    assert len(found.nodes) == 1
    assert (found.tail.chunk.end - CHUNK if found.HasField("tail") else None) == expected


async def test_tenants_and_models_never_meet(catalog: Rig) -> None:
    tokens = blocks([1, 2])
    tenant = Tenant()
    await catalog.store_facts(tenant.fingerprint, tenant.chain(tokens, groups=[FULL]))
    assert len((await catalog.stub.Lookup(tenant.lookup(tokens))).nodes) == 2
    for other in (Tenant(fingerprint=tenant.fingerprint), Tenant(salt=tenant.salt)):
        assert not (await catalog.stub.Lookup(other.lookup(tokens))).nodes


@pytest.mark.parametrize(
    "wrong", [{"tokens_sha256": "00" * 32}, {"parent": "11" * 32}, {"start": 512}, {"end": 300}, {"tail": True}]
)
async def test_a_fact_that_does_not_fit_ends_the_chain_and_is_alarmed(catalog: Rig, wrong: dict[str, object]) -> None:
    tenant, tokens = Tenant(), blocks([1, 2, 3])
    chain = tenant.chain(tokens, groups=[FULL])
    for name, value in wrong.items():
        setattr(chain[1], name, value)
    await catalog.store_facts(tenant.fingerprint, chain)
    found = await catalog.stub.Lookup(tenant.lookup(tokens))
    assert [node.chunk.hash for node in found.nodes] == [chain[0].hash]
    assert catalog.metric("segue_catalog_conflicts_total", where="lookup") == 1


async def test_ready_replicas_of_claimed_directories_only(catalog: Rig) -> None:
    served = model()
    tenant, tokens = Tenant(served.fingerprint), blocks([1, 2], 32)
    chain = tenant.chain(tokens, tail=True, groups=[FULL])
    await catalog.store_facts(tenant.fingerprint, chain)
    here, gone = hex_id(16), hex_id(16)

    def update(node: str, state: pb.ReplicaState, index: int) -> pb.ReplicaUpdate:
        content = chain[index].receipts[0].content_id
        replica = pb.Replica(node=node, group=FULL, state=state, content_id=content)
        return pb.ReplicaUpdate(fingerprint=tenant.fingerprint, hash=chain[index].hash, replica=replica)

    ready, copying = pb.REPLICA_STATE_READY, pb.REPLICA_STATE_COPYING
    await catalog.stub.SetReplica(
        pb.SetReplicaRequest(
            updates=[update(here, ready, 0), update(here, copying, 1), update(here, ready, 2), update(gone, ready, 0)]
        )
    )
    await catalog.stub.Register(registration("w-1", served, node=here))
    async for newest in catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
        if newest.endpoints:
            break
    found = await catalog.stub.Lookup(tenant.lookup(tokens))
    nodes = [*found.nodes, found.tail]
    assert [[replica.node for replica in node.replicas] for node in nodes] == [[here], [], [here]]

    await catalog.stub.SetReplica(pb.SetReplicaRequest(updates=[update(here, pb.REPLICA_STATE_REMOVED, 0)]))
    found = await catalog.stub.Lookup(tenant.lookup(tokens))
    assert not found.nodes[0].replicas and found.tail.replicas


async def test_a_long_chain_takes_two_round_trips(catalog: Rig) -> None:
    tenant, tokens = Tenant(), [i // CHUNK for i in range(128 * CHUNK)] + [9] * 255
    await catalog.store_facts(tenant.fingerprint, tenant.chain(tokens, tail=True))
    rounds = 0

    def counting(trip: Any) -> Any:
        async def counted(*asked: object) -> object:
            nonlocal rounds
            rounds += 1
            return await trip(*asked)

        return counted

    catalog.etcd.read = counting(catalog.etcd.read)  # type: ignore[method-assign]
    catalog.etcd.fetch = counting(catalog.etcd.fetch)  # type: ignore[method-assign]
    times = []
    for _ in range(15):
        began = time.perf_counter()
        found = await catalog.stub.Lookup(tenant.lookup(tokens))
        times.append((time.perf_counter() - began) * 1_000)
    assert len(found.nodes) == 128 and found.tail.chunk.end == 128 * CHUNK + 240
    assert rounds == 15 * 2
    # The target is 10 ms on an idle machine; this bound only catches another order of magnitude.
    print(f"look-up of 128 nodes: p50 {statistics.median(times):.1f} ms, min {min(times):.1f} ms")
    assert min(times) < 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "AB" * 32),
        ("fingerprint", ""),
        ("tenant_salt", "ab"),
        ("after", "zz"),
        ("after", "ab" * 32),
        ("start", 256),
        ("start", 3),
        ("tokens", [1 << 31]),
        ("tenant_salt", ""),
    ],
)
async def test_bad_requests_say_which_field(catalog: Rig, field: str, value: object) -> None:
    request = Tenant().lookup(blocks([1]))
    if isinstance(value, list):
        request.tokens[:] = value
    else:
        setattr(request, field, value)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.Lookup(request)
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT
    assert (field if field != "start" else "") in (failure.value.details() or "")


async def test_no_tokens_is_an_empty_answer(catalog: Rig) -> None:
    found = await catalog.stub.Lookup(Tenant().lookup([]))
    assert not found.nodes and not found.HasField("tail") and found.revision > 0
