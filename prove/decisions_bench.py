"""Decisions timed one by one: a large fleet, long chains, a few workers with some of each in their device pages.

Every chunk is durable in the object store and on three SSDs; every worker has measured costs of its own and reports
every tier. Hashing the chain is timed apart: the router does it once a request, before it asks the catalog.
"""

from __future__ import annotations

import random
import time

from libs.continuation import chain as chains
from libs.controller import candidates
from libs.controller.catalog_facts import Chunk, LayerGroup, Model, Node, Receipt, Replica, ReplicaState
from libs.controller.discovery import Observed
from libs.controller.fleet import Fleet
from libs.controller.protocol import (
    DecodeCost,
    GenerationRequest,
    Heartbeat,
    Load,
    Pages,
    PrefillCost,
    Resident,
    Tier,
    TierCost,
)

CHUNKS, RESIDENT = 64, 20
_GROUP = LayerGroup("full-kv8-d128-bfloat16", tuple(range(32)), 0, 8, 128, "bfloat16")
_MODEL = Model("ab" * 32, (_GROUP,), chains.CHUNK_TOKENS, max_context=131_072)
_SALT = "cd" * 32


def measure(workers: int, requests: int, rounds: int) -> dict[str, float]:
    """Milliseconds: quantiles of a decision on the wall and of processor time, and the mean of hashing a chain."""
    draw = random.Random(64)
    fleet = Fleet()
    asked, entries, hashed = [], [], []
    held: dict[int, list[Resident]] = {}
    length = CHUNKS * chains.CHUNK_TOKENS + 3
    for number in range(requests):
        tokens = tuple([draw.randrange(50_000) for _ in range(length)])
        request = GenerationRequest(f"r{number}", "m", tokens, length, 64, tenant_salt=_SALT)
        began = time.perf_counter()
        entry = candidates.variant(_MODEL, request)
        hashed.append(time.perf_counter() - began)
        for worker in draw.sample(range(workers), min(RESIDENT, workers)):
            depth = draw.randint(1, CHUNKS)
            held.setdefault(worker, []).extend(
                Resident(link.hash, link.end, Tier.GPU, _MODEL.fingerprint) for link in entry.chain.chunks[:depth]
            )
        asked.append(request)
        entries.append(candidates.Variant(_MODEL, entry.chain, _durable(entry.chain, workers, draw)))
    for worker in range(workers):
        beat = _heartbeat(worker, tuple(held.get(worker, ())), draw)
        fleet.observe(Observed(beat, True, True), 0.0)
    walls, times = list[float](), list[float]()
    for turn in range(rounds + 1):
        for request, entry in zip(asked, entries, strict=True):
            began, worked = time.perf_counter(), time.thread_time()
            plan = candidates.plan(request, (entry,), fleet, 0.0)
            times.append(time.thread_time() - worked)
            walls.append(time.perf_counter() - began)
            assert plan.ranked
        if turn == 0:  # makes the columns
            walls.clear()
            times.clear()
    return {
        "p50": _quantile(walls, 0.5),
        "p99": _quantile(walls, 0.99),
        "cpu_p50": _quantile(times, 0.5),
        "cpu_p99": _quantile(times, 0.99),
        "hashing": round(sum(hashed) / len(hashed) * 1e3, 3),
    }


def _quantile(seconds: list[float], share: float) -> float:
    return round(sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))] * 1e3, 3)


def _durable(chain: chains.Chain, workers: int, draw: random.Random) -> tuple[Node, ...]:
    disks = [f"node-{worker}" for worker in draw.sample(range(workers), min(3, workers))]
    size = 2 * len(_GROUP.layers) * _GROUP.kv_heads * _GROUP.head_dim * 2 * chains.CHUNK_TOKENS
    replicas = tuple(Replica(disk, _GROUP.name, ReplicaState.READY, "c") for disk in disks)
    receipts = (Receipt(_GROUP.name, "b", "k", "e", size, "c"),)
    return tuple(
        [Node(Chunk(one.hash, one.parent, one.start, one.end, receipts=receipts), replicas) for one in chain.chunks]
    )


def _heartbeat(worker: int, resident: tuple[Resident, ...], draw: random.Random) -> Heartbeat:
    return Heartbeat(
        worker=f"w{worker}",
        epoch=1,
        sequence=1,
        node=f"node-{worker}",
        load=Load(
            draw.uniform(0, 400),
            decoding=draw.randint(0, 8),
            pages=Pages(20_000, 10_000, resident=10_000, evictable=9_000),
        ),
        lanes=16,
        page_tokens=16,
        max_context=131_072,
        models=(_MODEL.fingerprint,),
        prefill=tuple(PrefillCost(1 << power, draw.uniform(0.1, 0.2)) for power in (9, 13, 17)),
        decode=(DecodeCost(1, 10.0), DecodeCost(16, 30.0)),
        tiers=tuple(
            TierCost(tier, draw.uniform(0.1, 9.0), draw.uniform(1e6, 1e7), 64)
            for tier in (Tier.GPU, Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT)
        ),
        resident=resident,
        bytes_per_token=131_072,
    )
