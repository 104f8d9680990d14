"""Two address families of one cell, and a cell that has one endpoint only: what its loss looks like and what mends it.

Workers are processes and are killed; times are short here, what is judged is which strategy acted.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from libs.pool.knobs import PoolPolicy
from libs.pool.model import CellTarget, WorkerTarget
from prove.checks import Checks
from prove.pooled import LIMIT_S, ZERO, EchoProcess, Pooled, echoing, pooled, until
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.rig import CALM

CLAIM = Claim(
    "6-families",
    "endpoints on 127.0.0.1 and [::1]: losing one family shows as a missing cell-family and is refilled; the only "
    "endpoint of a cell: outage mode, shadow and probe work",
)
FOUR, SIX = "127.0.0.1", "[::1]"
SOLE = replace(CALM, quarantine_failures=2, quarantine_s=3_600.0, fast_retries=0, probe_interval_s=0.1)
"""Whoever is quarantined stays so, unless a probe ends it."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. Where there is no IPv6 the claim cannot pass: it says so and counts it."""
    del stage
    full = size is Size.FULL
    rounds = 5 if full else 1
    checks, details = Checks(), dict[str, JsonValue]()
    if (why := without_ipv6()) is None:
        async with echoing(1, (FOUR, SIX)) as workers:
            for lost in (SIX, FOUR) * rounds if full else (SIX,):
                await family_lost(checks, workers, lost)
    else:
        details["unsupported here"] = {f"IPv6: {why}": 1}
        checks.check("both families", f"unsupported here: {why}", "IPv6 on the loopback", False)
    async with echoing(2) as workers:
        for _ in range(rounds):
            await outage(checks, workers[0], (True, False) if full else (True,))
            await shadow(checks, workers[0])
            if full:
                await probe(checks, workers)
    return checks.outcome(details)


def without_ipv6() -> str | None:
    """Why there is none here."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return str(error)
    return None


async def family_lost(checks: Checks, workers: list[EchoProcess], lost: str) -> None:
    """One of the two is killed and comes back."""
    gone = next(worker for worker in workers if worker.host == lost)
    stays = next(worker for worker in workers if worker.host != lost)
    family = "ipv6" if lost == SIX else "ipv4"
    async with pooled(workers, CALM) as made:
        await until(lambda: dict(made.pool.status().pool.by_family) == {"ipv4": 2, "ipv6": 2})
        checks.equal(f"{family}: missing before", missing(made), [])
        await gone.kill()
        await until(lambda: bool(missing(made)))
        checks.equal(f"{family}: missing once it is killed", missing(made), [f"A/{family}"])
        checks.equal(f"{family}: ready without it", made.pool.readiness.ready, True)
        route = await made.pool.bind(CellTarget("A"), b"echo")
        checks.equal(f"{family}: served by the other", (await route.receive(LIMIT_S)).decode(), "echo")
        route.close()
        await until(lambda: made.active(stays) == 4)
        checks.equal(f"{family}: the other endpoint stands in", made.active(stays), 4)
        await gone.start()
        made.observe_all()
        await until(lambda: made.active(gone) == 2)
        checks.equal(f"{family}: missing once it is back", missing(made), [])
        await until(lambda: dict(made.pool.status().pool.by_family) == {"ipv4": 2, "ipv6": 2})
        route = await made.pool.bind(WorkerTarget(gone.name), b"echo")
        checks.equal(f"{family}: serves again", (await route.receive(LIMIT_S)).decode(), "echo")
        route.close()
        checks.equal(f"{family}: held by the pool", await made.rest(), ZERO)


def missing(made: Pooled) -> list[str]:
    """Cell-families without a serving writer."""
    return [f"{group.cell}/{group.family}" for group in made.pool.status().pool.missing_groups]


async def outage(checks: Checks, worker: EchoProcess, modes: Sequence[bool] = (True, False)) -> None:
    """The only endpoint is away for longer than would quarantine it: with outage mode it is dialled on, and found."""
    for mode in modes:
        policy = replace(SOLE, outage_mode=mode, probes=False)
        async with pooled([worker], policy) as made:
            await made.full()
            await worker.kill()
            await until(lambda: made.pool.status().pool.dial_failures >= 6 or bool(made.pool.status().pool.quarantined))
            told = made.pool.status().pool
            checks.equal(f"outage mode {mode}: quarantined", told.quarantined, 0 if mode else 1)
            await worker.start()
            if mode:
                await made.full()
                checks.equal("outage mode: comes back by itself", made.pool.readiness.ready, True)
            else:
                # The map knows of a new process now; without it, or outage mode, or a probe, nobody would look.
                made.observe_all()
                await made.full()
            checks.equal(f"outage mode {mode}: held by the pool", await made.rest(), ZERO)


async def shadow(checks: Checks, worker: EchoProcess) -> None:
    """Spare writers, rotated one at a time, never fewer than asked for while it happens."""
    policy = replace(SOLE, shadow_writers=1, shadow_rotation_s=0.2)
    async with pooled([worker], policy) as made:
        await made.full(3)
        first = {writer.writer for writer in made.pool.writers()}
        least = 3

        def rotated() -> bool:
            nonlocal least
            least = min(least, made.active(worker))
            return not first & {writer.writer for writer in made.pool.writers()}

        await until(rotated)
        counts = made.pool._core.books.replacements.counts
        checks.check("shadows: replacements committed", counts.committed, ">= 3", counts.committed >= 3)
        checks.equal("shadows: fewest active meanwhile", least, 3)
        made.pool.set_policy(replace(policy, shadow_writers=0))
        await made.full(2)
        checks.equal("shadows: held by the pool", await made.rest(), ZERO)


async def probe(checks: Checks, workers: list[EchoProcess]) -> None:
    """One of two is quarantined for an hour; a probe finds that it is back."""
    worker = workers[0]
    policy: PoolPolicy = replace(SOLE, outage_mode=False)
    async with pooled(workers, policy) as made:
        await made.full()
        await worker.kill()
        await until(lambda: made.pool.status().pool.quarantined == 1)
        before = made.pool.status().pool.probes
        await until(lambda: made.pool.status().pool.probes >= before + 3)
        checks.equal("probes: of one that is away change nothing", made.pool.status().pool.quarantined, 1)
        await worker.start()
        await until(lambda: made.active(worker) == 2)
        checks.equal("probes: quarantined once it is back", made.pool.status().pool.quarantined, 0)
        checks.equal("probes: held by the pool", await made.rest(), ZERO)
