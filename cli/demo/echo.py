"""The same path without a model: observation, ranking, offer, decline, acceptance, deltas, result, loss and resume.

Echo workers run the real controller, page pool, endpoint and tunnels with declared costs, so this takes seconds.
There are no bytes, hence no checkpoint and no restore.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable

from cli.demo.facts import Facts
from cli.demo.record import PAGE_TOKENS, Record, Turn
from cli.demo.scenario import demo_text
from cli.demo.talk import Answer, Talker
from cli.embedded.cluster import Cluster

ECHO_SETTINGS = {"max_control_tasks": "4"}
"""Of the echo workers: few enough that a burst is declined by one and taken by another."""
BURST = 24
STREAM_TOKENS = 64
KILL_AFTER = 20
_DECLINES = re.compile(r"^segue_router_declines_total\{[^}]*\}\s+([0-9.e+]+)", re.MULTILINE)


async def run_echo(cluster: Cluster, talker: Talker, facts: Facts, say: Callable[[str], None]) -> Record:
    """All scenes on a ready echo cluster."""
    record = Record()
    ids = (await talker.tokenize(demo_text()))[:600]

    say("observation and ranking")
    ranked = (await facts.explain(ids)).ranked
    workers = sorted({candidate.worker for candidate in ranked})
    record.check("every worker is ranked", workers, sorted(cluster.workers), workers == sorted(cluster.workers))

    say("offer, acceptance, deltas, result: cold, then resident")
    cold = await _turn(record, talker, "cold", "computed", ids, 16, 0)
    follow = cold.answer.served.prompt_token_ids + cold.answer.served.token_ids + ids[:8]
    record.waits_ms["cold resident"] = await facts.resident(follow)
    resident = await _turn(record, talker, "resident", "same worker", follow, 16, len(cold.answer.processed))
    computed = resident.answer.served.computed_tokens
    limit = resident.new_tokens + PAGE_TOKENS
    record.check("a resident turn computes the new tokens", computed, limit, computed <= limit)

    say("a burst: declines, and other candidates")
    before = await _declines(cluster)
    burst = await asyncio.gather(*(talker.complete(ids[: 40 + n], 24) for n in range(BURST)))
    declined = await _declines(cluster) - before
    served = sorted({answer.served.worker for answer in burst})
    record.check("declined offers", declined, "> 0", declined > 0)
    record.check("a burst reaches every worker", served, sorted(cluster.workers), served == sorted(cluster.workers))
    record.check("and all are answered", len(burst), BURST, all(len(one.served.token_ids) == 24 for one in burst))

    say("kill -9 in mid-stream: the stream goes on")
    killed = await _turn_with_kill(record, cluster, talker, ids)
    whole = await talker.complete(ids, STREAM_TOKENS)
    same = killed.answer.served.token_ids == whole.served.token_ids
    killed.exact = same
    both = killed.answer.served.workers
    record.check("one stream over two workers", list(both), "2 workers", len(set(both)) == 2)
    record.check("the same tokens as undisturbed", same, True, same)
    return record


async def _turn(
    record: Record, talker: Talker, name: str, what: str, ids: list[int], tokens: int, history: int
) -> Turn:
    turn = Turn(name, what, await talker.complete(ids, tokens), history)
    record.turns.append(turn)
    return turn


async def _turn_with_kill(record: Record, cluster: Cluster, talker: Talker, ids: list[int]) -> Turn:
    from cli.demo.facts import describe

    killed: list[str] = []

    async def kill_once(pieces: int) -> None:
        if pieces < KILL_AFTER or killed:
            return
        for worker in cluster.workers.values():
            if (await describe(worker.target)).assignments:
                killed.append(worker.name)
                worker.child.kill()
                return

    answer: Answer = await talker.complete(ids, STREAM_TOKENS, kill_once)
    turn = Turn("killed", "in mid-stream", answer, 0)
    record.turns.append(turn)
    return turn


async def _declines(cluster: Cluster) -> float:
    def read() -> float:
        with urllib.request.urlopen(cluster.metrics_urls["router"], timeout=5) as reply:  # noqa: S310
            return sum(float(count) for count in _DECLINES.findall(reply.read().decode()))

    return await asyncio.to_thread(read)
