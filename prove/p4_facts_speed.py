"""How fast facts are: look-ups of long chains, publishing, a conversation's second turn, and a million chunks.

The catalog is a process of its own between this one and etcd. Sequential round trips to etcd are counted from outside,
on a second replica: a link with a known delay is put between it and etcd, and what a look-up takes longer than through
the same link without the delay is divided by it. (The link is a program too, and takes its own part of a millisecond.)
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx

from cli.embedded.children import Child, Supervisor
from cli.embedded.etcd import EtcdServer
from cli.embedded.seaweed import SeaweedServer
from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from prove.checks import Checks
from prove.processes import resident_bytes
from prove.report import Claim, Outcome, Size
from prove.routed import Tenant as Asking
from prove.routed import generate
from prove.stage import Stage, staged
from prove.stores import s3_settings, service
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Put
from services.catalog.facts.keys import Keys
from services.catalog.facts.values import pack
from tests.catalog.rig import Bucket, Tenant, registration
from tests.catalog.rig import model as made_model
from tests.fixtures.fault_proxy import FaultProxy

CLAIM = Claim(
    "4-facts-speed",
    "cold look-up of a 128-node chain: p50 <= 10 ms and <= 3 sequential round trips; second turn: no etcd trip; "
    "publish >= 200 chunks/s; 1,000,000 chunk facts: memory, size, look-up time",
    seed=47,
)
LOOKUP_MS, TRIPS, PUBLISHED = 10.0, 3, 200.0
_NODES, _CHUNK = 128, 256
_DELAY_S = 0.05
_CALL_S = 60.0
_PREFIX = "prove-speed/"


@dataclass(frozen=True)
class _Plan:
    lookups: int
    published: int
    facts: int


@dataclass
class Found:
    """Figures. `many`: of the catalog with a million facts behind it."""

    lookup_ms: list[float] = field(default_factory=list)
    linked_ms: list[float] = field(default_factory=list)
    delayed_ms: list[float] = field(default_factory=list)
    nodes: int = 0
    published_per_s: float = 0.0
    second_turn_lookups: float = -1.0
    second_turn_covered: float = 0.0
    second_turn_hit: int = 0
    many_ms: list[float] = field(default_factory=list)
    many: dict[str, float] = field(default_factory=dict)

    @property
    def trips(self) -> float:
        """Sequential round trips to etcd of one look-up."""
        return (statistics.median(self.delayed_ms) - statistics.median(self.linked_ms)) / (_DELAY_S * 1e3)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    plan = _Plan(200, 2_000, 1_000_000) if size is Size.FULL else _Plan(5, 40, 2_000)
    found = Found()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-facts-")))
        supervisor = await stack.enter_async_context(Supervisor())
        etcd, store = EtcdServer.in_dir(scratch / "etcd"), SeaweedServer.in_dir(scratch / "s3")
        await asyncio.gather(supervisor.start(etcd.spec()), supervisor.start(store.spec()))
        host, _, port = etcd.endpoint.rpartition(":")
        link = await stack.enter_async_context(FaultProxy(host, int(port)))
        near, far = (
            service("catalog", {"etcd_endpoint": address, "etcd_prefix": _PREFIX, **s3_settings(store)}, name=name)
            for name, address in (("catalog", etcd.endpoint), ("catalog behind the link", link.address))
        )
        catalog = await supervisor.start(near[1])
        stub, linked = [
            catalog_pb2_grpc.CatalogStub(await stack.enter_async_context(grpc.aio.insecure_channel(target)))
            for target, _ in (near, far)
        ]
        direct = EtcdClient(etcd.endpoint, timeout_s=30.0)
        stack.push_async_callback(direct.close)
        writer = _Writer(direct, stub)
        await _lookups(writer, plan.lookups, found)
        behind = await supervisor.start(far[1])
        await _delayed(_Writer(direct, linked), link, max(3, plan.lookups // 10), found)
        await supervisor.stop(behind)
        await _publish(writer, Bucket(store), plan.published, found)
        await _million(writer, catalog, etcd, plan, found)
    async with AsyncExitStack() as stack:
        if stage is None:
            stage = await stack.enter_async_context(
                staged("tiny", workers=1, threads=1, worker_settings={"heartbeat_s": "1"})
            )
        await _second_turn(stage, found)
    return judged(found, plan, timed=size is Size.FULL)


class _Writer:
    """Chains as facts, without objects, straight into etcd; and look-ups of them through the catalog."""

    def __init__(self, etcd: EtcdClient, stub: catalog_pb2_grpc.CatalogStub) -> None:
        self.etcd, self.stub, self.keys = etcd, stub, Keys(_PREFIX)
        self.draw = random.Random(CLAIM.seed)

    async def tenant(self) -> Tenant:
        """Of a model that the catalog knows."""
        tenant = Tenant()
        await self.stub.Register(
            registration(f"speed-{tenant.fingerprint[:12]}", made_model(tenant.fingerprint)), timeout=_CALL_S
        )
        return tenant

    def tokens(self, nodes: int) -> list[int]:
        return [self.draw.randrange(200_000) for _ in range(nodes * _CHUNK)]

    async def write(self, tenant: Tenant, chunks: Sequence[catalog_pb2.Chunk]) -> None:
        puts = [Put(self.keys.chunk(tenant.fingerprint, chunk.hash), pack(chunk)) for chunk in chunks]
        for i in range(0, len(puts), 100):
            await self.etcd.transact(success=puts[i : i + 100])

    async def chain(self, tenant: Tenant) -> list[int]:
        """Tokens of a new chain whose nodes are all written."""
        tokens = self.tokens(_NODES)
        await self.write(tenant, tenant.chain(tokens))
        return tokens

    async def look_up(self, tenant: Tenant, tokens: Sequence[int]) -> tuple[float, int]:
        """Milliseconds, and nodes found."""
        request = tenant.lookup(tokens)
        began = time.perf_counter()
        reply = await self.stub.Lookup(request, timeout=_CALL_S)
        return (time.perf_counter() - began) * 1e3, len(reply.nodes)


async def _lookups(writer: _Writer, count: int, found: Found) -> None:
    """Each of a chain that nobody has looked up before."""
    tenant = await writer.tenant()
    for _ in range(count):
        ms, nodes = await writer.look_up(tenant, await writer.chain(tenant))
        found.lookup_ms.append(ms)
        found.nodes = max(found.nodes, nodes)


async def _delayed(writer: _Writer, link: FaultProxy, count: int, found: Found) -> None:
    """The same through the link, with and without its delay by turns."""
    tenant = await writer.tenant()
    for number in range(2 * count):
        tokens = await writer.chain(tenant)
        if number % 2:
            link.delay(_DELAY_S / 2)
        ms, _ = await writer.look_up(tenant, tokens)
        link.heal()
        (found.delayed_ms if number % 2 else found.linked_ms).append(ms)


async def _publish(writer: _Writer, bucket: Bucket, count: int, found: Found) -> None:
    """Chunks whose objects are in the bucket, in batches as workers send them."""
    tenant = await writer.tenant()
    chains = [tenant.chain(writer.tokens(8)) for _ in range(count // 8)]
    await bucket.upload([chunk for chain in chains for chunk in chain])
    gate = asyncio.Semaphore(4)

    async def one(chain: Sequence[catalog_pb2.Chunk]) -> None:
        async with gate:
            request = catalog_pb2.PublishRequest(fingerprint=tenant.fingerprint, chunks=chain)
            await writer.stub.Publish(request, timeout=_CALL_S)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for chain in chains:
            tasks.create_task(one(chain))
    found.published_per_s = 8 * len(chains) / (time.perf_counter() - began)


async def _million(writer: _Writer, catalog: Child, etcd: EtcdServer, plan: _Plan, found: Found) -> None:
    """So many facts of many tenants; then look-ups of some chains among them."""
    before = resident_bytes(catalog.pid)
    tenant, chains = await writer.tenant(), list[list[int]]()
    gate, began = asyncio.Semaphore(8), time.perf_counter()
    template = tenant.chain(writer.tokens(1))[0]

    async def fill(first: int, count: int) -> None:
        async with gate:
            puts: list[Put] = []
            for number in range(first, first + count):
                chunk = catalog_pb2.Chunk()
                chunk.CopyFrom(template)
                chunk.hash = f"{number:064x}"
                puts.append(Put(writer.keys.chunk(tenant.fingerprint, chunk.hash), pack(chunk)))
            await writer.etcd.transact(success=puts)

    looked = plan.lookups // 4 + 1
    async with asyncio.TaskGroup() as tasks:
        for first in range(0, plan.facts - looked * _NODES, 100):
            tasks.create_task(fill(first, 100))
    for _ in range(looked):
        chains.append(await writer.chain(tenant))
    filled = time.perf_counter() - began
    for tokens in chains:
        found.many_ms.append((await writer.look_up(tenant, tokens))[0])
    async with httpx.AsyncClient(timeout=_CALL_S) as http:
        status = (await http.post(f"http://{etcd.endpoint}/v3/maintenance/status", content=b"{}")).json()
    found.many = {
        "facts": plan.facts,
        "filled_s": round(filled, 1),
        "etcd_mib": round(int(status["dbSize"]) / 2**20),
        "catalog_mib": round(resident_bytes(catalog.pid) / 2**20),
        "catalog_grew_mib": round((resident_bytes(catalog.pid) - before) / 2**20),
    }


async def _second_turn(stage: Stage, found: Found) -> None:
    """A chat goes on: its router and worker know all they need."""
    secret = stage.cluster.tenant_secret
    tenant, draw = Asking(f"speed-{random.Random().random()}", secret), random.Random(CLAIM.seed)
    prompt = [draw.randrange(6, 500) for _ in range(900)]
    first = await generate(stage.facts.router, stage.model, tenant, prompt, 8)
    before = await _asked(stage)
    more = [*prompt, *first.tokens, *(draw.randrange(6, 500) for _ in range(20))]
    second = await generate(stage.facts.router, stage.model, tenant, more, 8)
    after = await _asked(stage)
    found.second_turn_lookups = sum(after.values()) - sum(before.values()) - (after["covered"] - before["covered"])
    found.second_turn_covered = after["covered"] - before["covered"]
    found.second_turn_hit = second.usage.cached_tokens


async def _asked(stage: Stage) -> dict[str, float]:
    """The router's look-ups by answer: the only calls to the catalog that a request waits for."""
    async with httpx.AsyncClient(timeout=_CALL_S) as http:
        text = (await http.get(stage.cluster.metrics_urls["router"])).text
    found = re.findall(r'^segue_router_lookups_total\{answer="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {answer: float(count) for answer, count in found}


def judged(found: Found, plan: _Plan, *, timed: bool) -> Outcome:
    """`timed`: the times are held against the limits."""
    checks, p50 = Checks(), statistics.median(found.lookup_ms)
    checks.equal("nodes found", found.nodes, _NODES)
    checks.check("sequential round trips", round(found.trips, 2), f"<= {TRIPS}", 0.5 <= found.trips <= TRIPS + 0.4)
    checks.equal("second turn: look-ups", found.second_turn_lookups, 0.0)
    checks.equal("second turn: look-ups spared", found.second_turn_covered, 1.0)
    checks.check("second turn: cached tokens", found.second_turn_hit, "> 900", found.second_turn_hit > 900)
    checks.equal("facts in etcd", found.many.get("facts"), plan.facts)
    if timed:
        checks.check("cold look-up of 128 nodes, p50 ms", round(p50, 2), f"<= {LOOKUP_MS}", p50 <= LOOKUP_MS)
        per_s = round(found.published_per_s)
        checks.check("chunks published per second", per_s, f">= {PUBLISHED:.0f}", per_s >= PUBLISHED)
    return checks.outcome(
        {
            "lookup_p50_ms": round(p50, 2),
            "published_per_s": round(found.published_per_s),
            "million": {**found.many, "lookup_p50_ms": round(statistics.median(found.many_ms), 2)},
        }
    )
