"""A prompt that kills every worker it meets: how many it takes along, and what becomes of it and of others.

On a cluster of its own of three workers whose test hook `crash_on` is set, and which stay dead.
"""

from __future__ import annotations

import random

import httpx

from prove.checks import Checks
from prove.cut_streams import LOST
from prove.recorded import attempts
from prove.routed import NotCompletedError, Tenant, generate
from prove.stage import Stage, staged
from prove.streams import stream

SEQUENCE = (401, 17, 402, 18, 403)
_WITHIN_S = 60.0
_LENGTH = 300
_SIGKILL = -9


async def deadly(checks: Checks, *, echo: bool, seed: int) -> None:
    """`echo`: without a model, in seconds."""
    hook = {"crash_on": ",".join(map(str, SEQUENCE)), "kv_bytes": "64MiB"}
    async with (
        staged("tiny", echo=echo, workers=3, threads=1, worker_settings=hook, restart=False) as stage,
        httpx.AsyncClient() as http,
    ):
        await _play(checks, stage, http, random.Random(seed))


async def _play(checks: Checks, stage: Stage, http: httpx.AsyncClient, draw: random.Random) -> None:
    cluster = stage.cluster
    ids = [draw.randrange(20, 400) for _ in range(_LENGTH)]
    prompt, other = [*ids, *SEQUENCE], [*ids, 7, 7, 7]
    pids = {name: worker.child.pid for name, worker in cluster.workers.items()}

    seen = await stream(http, cluster.base_url, stage.model, prompt, {"max_tokens": 8})
    said = " ".join(seen.errors)
    checks.check(
        "a prompt that kills its workers fails as INTERNAL, with its id", [seen.status, said], "HTTP 500, its id",
        seen.status == 500 and bool(seen.request_id) and seen.request_id in said,
    )  # fmt: skip
    recorded = await attempts(stage, seen.request_id, lambda found: len(found) >= 2, _WITHIN_S)
    outcomes = [int(one.outcome) for one in recorded]
    checks.check(
        "its attempts, by the recorded decisions", [*outcomes], "two, both lost with their worker",
        len(outcomes) == 2 and set(outcomes) <= {int(one) for one in LOST},
    )  # fmt: skip
    dead = [name for name, worker in cluster.workers.items() if worker.child.exit_code is not None]
    codes = [cluster.workers[name].child.exit_code for name in dead]
    checks.equal("workers it took along, by SIGKILL", codes, [_SIGKILL, _SIGKILL])
    alive = [name for name in cluster.workers if name not in dead]
    checks.equal(
        "the third one's process", [cluster.workers[name].child.pid for name in alive], [pids[n] for n in alive]
    )

    served = await stream(http, cluster.base_url, stage.model, other, {"max_tokens": 8})
    by = served.served.get("worker", "")
    checks.check(
        "the third one serves, a prompt with the same beginning too", [served.status, by], alive,
        not served.faults(other) and [by] == alive,
    )  # fmt: skip
    again = await stream(http, cluster.base_url, stage.model, prompt, {"max_tokens": 8})
    checks.check(
        "the same prompt is refused for a while", [again.status, *again.errors], "HTTP 400, it rests",
        again.status == 400 and "rests" in " ".join(again.errors),
    )  # fmt: skip
    try:
        await generate(stage.facts.router, stage.model, Tenant("another", cluster.tenant_secret), prompt)
        code = "completed"
    except NotCompletedError as error:
        code = str(error)
    checks.check("and so it is from another tenant", code[:300], "it rests", "rests" in code)
    checks.equal(
        "the third one's process, after that", [cluster.workers[n].child.pid for n in alive], [pids[n] for n in alive]
    )
