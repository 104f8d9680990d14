"""Two tenants on one worker: nothing of one can be found, named or timed by the other.

Prompt by prompt, one tenant asks first and the other probes: once with the very same prompt, once with one that nobody
has ever asked, in either order, with the parts taken by turns. A cache that leaked would answer the first kind sooner.
The same tenant's second time is the positive control, and a difference of 5 % planted into the measured times must be
found by the same test, else it shows nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from minio import Minio

from libs.continuation.keys import parse_key
from libs.continuation.tenancy import owner
from libs.contracts.segue.v1 import catalog_pb2
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.routed import Tenant, generate
from prove.stage import Stage, staged

CLAIM = Claim(
    "4-tenancy",
    "two tenants, same prompt: no shared chunk, no label or log that names the other, 200 TTFTs each way "
    "indistinguishable; a planted 5 % is detected; same tenant: hit",
    seed=44,
)
ALPHA = 0.01
PLANTED = 1.05
_CALL_S = 10.0


@dataclass
class Times:
    """TTFTs in ms: of prompts the other tenant has asked, of fresh ones, and of one's own second time."""

    seen: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


@dataclass
class Found:
    """What happened. `said`: everything the services wrote and exported."""

    times: Times = field(default_factory=Times)
    foreign_tokens: int = 0
    """Cached tokens a tenant was given of a prompt that only the other had asked."""
    hits: int = 0
    said: list[str] = field(default_factory=list)


def paired_p(ones: Sequence[float], others: Sequence[float], factor: float = 1.0) -> float:
    """Two-sided p that ``ones[i] * factor`` and ``others[i]`` differ in the mean of their logarithms (paired t-test).

    Pairs are measured one after the other, so that what comes and goes on the machine falls on both; the logarithm
    makes a delay of one call weigh no more than it is long. With 30 pairs and more Student's t is all but normal.
    """
    ratios = [math.log(one * factor / other) for one, other in zip(ones, others, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    if error == 0.0:
        return 1.0 if statistics.mean(ratios) == 0.0 else 0.0
    return 2 * (1 - statistics.NormalDist().cdf(abs(statistics.mean(ratios)) / error))


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    found, length, rounds = Found(), 1_500, 600
    async with AsyncExitStack() as stack:
        if stage is None:
            settings = {"kv_bytes": "256MiB", "heartbeat_s": "1"}
            stage = await stack.enter_async_context(
                staged(
                    "tiny", workers=1, threads=1, worker_settings=settings,
                    sink=lambda name, line: found.said.append(f"{name}: {line}"),
                )
            )  # fmt: skip
        if size is Size.SLICE:
            length, rounds = 600, 4
        secret = stage.cluster.tenant_secret
        draw = random.Random(CLAIM.seed)
        tenants = [Tenant(f"tenant-{draw.randbytes(6).hex()}", secret) for _ in range(2)]
        prompts = await _measure(stage, tenants, length, rounds, draw, found)
        for child in (stage.cluster.catalog, stage.cluster.router, *(w.child for w in stage.cluster.workers.values())):
            found.said += child.tail
        found.said += await _exported(stage)
        owned = await _chunks(stage, tenants, prompts)
    return judged(found, tenants, owned, timed=size is Size.FULL)


async def _measure(
    stage: Stage, tenants: Sequence[Tenant], length: int, rounds: int, draw: random.Random, found: Found
) -> list[list[int]]:
    """All rounds; the prompts that both have asked."""

    def prompt() -> list[int]:
        return [draw.randrange(6, 500) for _ in range(length)]

    prompts: list[list[int]] = []
    router, times = stage.facts.router, found.times
    for number in range(rounds):
        first, second = tenants if number % 2 == 0 else reversed(tenants)
        shared = prompt()
        prompts.append(shared)
        await generate(router, stage.model, first, shared)
        probes = [(shared, times.seen), (prompt(), times.fresh)]
        for tokens, into in probes if draw.random() < 0.5 else reversed(probes):
            answer = await generate(router, stage.model, second, tokens)
            into.append(answer.ttft_ms)
            found.foreign_tokens += answer.usage.cached_tokens
        again = await generate(router, stage.model, first, shared)
        times.again.append(again.ttft_ms)
        found.hits += again.usage.cached_tokens > 0
    return prompts


async def _exported(stage: Stage) -> list[str]:
    """Metrics of every service, and every span."""
    workers = {name: worker.metrics_url for name, worker in stage.cluster.workers.items()}
    async with httpx.AsyncClient(timeout=_CALL_S) as http:
        metrics = [(await http.get(url)).text for url in {**stage.cluster.metrics_urls, **workers}.values()]
    return [*metrics, *(str(span) for span in stage.spans.spans)]


async def _chunks(stage: Stage, tenants: Sequence[Tenant], prompts: Sequence[list[int]]) -> list[set[str]]:
    """The hashes each tenant's prompts have in the catalog, and in the bucket."""
    resolved = await stage.facts.catalog.ResolveName(catalog_pb2.ResolveNameRequest(name=stage.model), timeout=_CALL_S)
    fingerprint = resolved.models[0].fingerprint
    found: list[set[str]] = []
    server = stage.cluster.s3_server
    store = Minio(server.endpoint, server.access_key, server.secret_key, secure=False)

    def listed(prefix: str) -> set[str]:
        keys = (one.object_name for one in store.list_objects(server.bucket, prefix=prefix, recursive=True))
        return {parse_key(key).hash for key in keys if key}

    for tenant in tenants:
        hashes = await asyncio.to_thread(listed, f"v1/{fingerprint}/{owner(tenant.salt)}/")
        for prompt in prompts:
            asked = catalog_pb2.LookupRequest(
                fingerprint=fingerprint, tenant_salt=tenant.salt, tokens=prompt[: len(prompt) // 256 * 256]
            )
            reply = await stage.facts.catalog.Lookup(asked, timeout=_CALL_S)
            hashes |= {node.chunk.hash for node in reply.nodes}
        found.append(hashes)
    return found


def judged(found: Found, tenants: Sequence[Tenant], owned: Sequence[set[str]], *, timed: bool) -> Outcome:
    """`timed`: enough was measured for the test to say something."""
    checks, times = Checks(), found.times
    checks.check("chunks of each tenant", [len(one) for one in owned], "> 0", all(owned))
    checks.equal("chunks of both", len(owned[0] & owned[1]), 0)
    checks.equal("cached tokens of the other's prompts", found.foreign_tokens, 0)
    checks.check("own prompts: hits", found.hits, f"all {len(times.again)}", 0 < found.hits == len(times.again))
    # Two services may well tell tenants apart in what they account; neither name nor salt may be in what they export.
    names = [word for tenant in tenants for word in (tenant.name, tenant.salt)]
    leaks = [f"{word[:20]} in {text[:200]!r}" for text in found.said for word in names if word in text]
    checks.check("names or salts in logs, labels and spans", leaks[:5], [], bool(found.said) and not leaks)
    figures = {
        "texts_searched": len(found.said),
        "seen_ms": _figures(times.seen), "fresh_ms": _figures(times.fresh), "again_ms": _figures(times.again),
    }  # fmt: skip
    if timed:
        p = paired_p(times.seen, times.fresh)
        planted = [paired_p(times.seen, times.fresh, factor) for factor in (PLANTED, 1 / PLANTED)]
        checks.check("TTFTs each way", min(len(times.seen), len(times.fresh)), ">= 400", len(times.seen) >= 400)
        checks.check("p of equal means, seen and fresh", round(p, 4), f">= {ALPHA}", p >= ALPHA)
        checks.check("p with 5 % planted", [f"{one:.2g}" for one in planted], f"< {ALPHA}", max(planted) < ALPHA)
        own = paired_p(times.again, times.fresh)
        checks.check("p of one's own second time", f"{own:.2g}", f"< {ALPHA}", own < ALPHA)
    return checks.outcome(json.loads(json.dumps(figures)))


def _figures(times: Sequence[float]) -> dict[str, float]:
    if len(times) < 2:
        return {"n": len(times)}
    return {
        "n": len(times),
        "mean": round(statistics.mean(times), 3),
        "median": round(statistics.median(times), 3),
        "deviation": round(statistics.stdev(times), 3),
    }
