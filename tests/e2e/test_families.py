"""Two worker processes of one model, one on 127.0.0.1 and one on [::1], the latter killed, restarted and drained."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

from cli.embedded.ports import free_ports
from libs.contracts.segue.v1 import pool_pb2
from prove.router_pool import router_of, shown, until
from prove.stage import Stage, staged
from tests.e2e.chats import complete, prompt
from tests.worker.conftest import Process

STREAMS, TOKENS = 6, 300
OTHER = "six"


def over_ipv6(stage: Stage) -> Process:
    listen, metrics = free_ports(2)
    return Process(
        "worker",
        {
            "worker": OTHER, "name": stage.model, "echo": "true", "catalog": stage.cluster.catalog_target,
            "listen": f"[::1]:{listen}", "metrics_listen": f"127.0.0.1:{metrics}",
        },
    )  # fmt: skip


def serving(pool: pool_pb2.PoolStatus) -> Counter[str]:
    """Active tunnels by family."""
    return Counter(one.family for one in pool.writers if one.contour == "active")


def whole(pool: pool_pb2.PoolStatus) -> bool:
    active = serving(pool)
    return not pool.missing and active["ipv4"] >= 2 and active["ipv6"] >= 2


async def test_a_family_lost_is_missing_in_its_cell_and_refilled_and_no_stream_is_altered() -> None:
    async with staged("tiny", echo=True, workers=1) as stage, router_of(stage) as router:
        six = over_ipv6(stage)
        try:
            await six.start().until_ready()
            await until(router, whole)
            (cell,) = (await shown(router)).cells
            prompts = [prompt(100 + n, seed=n) for n in range(STREAMS)]
            alone = [await complete(stage, ids, TOKENS) for ids in prompts]
            begun = 0

            async def kill(pieces: int) -> None:
                nonlocal begun
                begun += pieces == 8
                if pieces == 8 and begun == STREAMS:
                    six.kill(signal.SIGKILL)

            together = await asyncio.gather(*(complete(stage, ids, TOKENS, None, kill) for ids in prompts))
            for before, after in zip(alone, together, strict=True):
                assert after.served.token_ids == before.served.token_ids
            moved = [answer for answer in together if OTHER in answer.served.workers]
            assert moved and all(len(answer.served.workers) == 2 for answer in moved), "killed in mid-stream"
            await until(router, lambda pool: bool(pool.missing))
            pool = await shown(router)
            assert [(one.cell, one.family) for one in pool.missing] == [(cell, "ipv6")]
            assert pool.readiness == "ready" and not pool.missing_cells
            await six.start().until_ready()
            await until(router, whole)
            assert (await complete(stage, prompts[0], TOKENS)).served.token_ids == alone[0].served.token_ids
            # Who leaves in order is not missed.
            six.kill(signal.SIGTERM)
            await until(router, lambda pool: {one.worker for one in pool.endpoints} == {"worker-0"})
            assert not (await shown(router)).missing
        finally:
            six.stop()
