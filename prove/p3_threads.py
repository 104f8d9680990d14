"""Two worker processes of one fingerprint, with other numbers of compute threads, take turns with one chat's chunks.

Each turn goes to the process that did not serve the last one, with the chain that the catalog knows by then. So each
restores what the other computed, and computes on top of it; the reference judges every turn. The processes have a
catalog of their own, so that no router meddles.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from cli.demo.facts import describe
from cli.embedded.children import Child
from cli.embedded.models import default_cache, prepare
from libs.continuation.chain import TAIL_TOKENS
from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from prove.checks import Checks
from prove.judging import Generation, Judge
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.stores import Stores, service, stores

CLAIM = Claim(
    "3-threads",
    "two workers of one fingerprint, started apart with 1 and 2 threads, continue each other's chunks, exactly",
    seed=39,
)
_THREADS = (1, 2)
_TURN_S = 300.0
_DURABLE_S = 60.0
_MORE = 20


@dataclass(frozen=True)
class _Plan:
    chats: int
    turns: int
    new: int
    prompt: int
    kv_bytes: str


@dataclass
class Turn:
    """One answer of one worker. `after`: how many turns of its chat came before."""

    after: int
    prompt: list[int]
    output: list[int]
    usage: common_pb2.Usage


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    full = size is Size.FULL
    plan = _Plan(20, 4, 32, 620, "1GiB") if full else _Plan(1, 3, 8, 300, "32MiB")
    with tempfile.TemporaryDirectory(prefix="segue-threads-") as scratch:
        async with stores(stage, Path(scratch)) as own:
            if stage is not None:
                return await _prove(own, stage.folder, Path(scratch), plan)
            folder = await prepare("gemma3-270m", default_cache(), lambda _doing, _done: None)
            return await _prove(own, folder, Path(scratch), plan)


async def _prove(own: Stores, folder: Path, scratch: Path, plan: _Plan) -> Outcome:
    targets = await _start(own, folder, scratch, plan)
    known = [await describe(target) for target in targets]
    checks = Checks()
    checks.equal("fingerprints", len({one.models[0].fingerprint for one in known}), 1)
    checks.equal("processes", len({one.endpoint.epoch for one in known}), len(targets))
    turns = await _play(Prose(folder, CLAIM.seed), own.catalog, targets, known[0].models[0].fingerprint, plan)
    restored = [turn.usage.restored_tokens for turn in turns if turn.after]
    checks.check("tokens restored from the other's chunks", min(restored), "> 0 in every turn", min(restored) > 0)
    cases = [Generation(str(number), turn.prompt, turn.output) for number, turn in enumerate(turns)]
    tally = await Judge(folder).judge(cases)
    checks.check("exact", tally.figures(), "no wrong token", tally.exact)
    return checks.outcome({"turns": len(turns), "restored_tokens": sum(restored), "threads": list(_THREADS)})


async def _start(own: Stores, folder: Path, scratch: Path, plan: _Plan) -> list[str]:
    """A worker for each number of threads; their targets."""
    targets: list[str] = []
    children: list[Child] = []
    for threads in _THREADS:
        settings = {
            "worker": f"threads-{threads}",
            "name": "threads",
            "catalog": own.catalog,
            "model": str(folder),
            "device": "cpu",
            "threads": str(threads),
            "kv_bytes": plan.kv_bytes,
            "chunk_dir": str(scratch / f"threads-{threads}"),
            **own.s3,
        }
        target, spec = service("worker", settings, name=f"worker-{threads}", threads=threads)
        targets.append(target)
        children.append(own.supervisor.spawn(spec))
    for child in children:
        await child.wait_ready()
    return targets


async def _play(prose: Prose, catalog: str, targets: Sequence[str], fingerprint: str, plan: _Plan) -> list[Turn]:
    turns: list[Turn] = []
    async with grpc.aio.insecure_channel(catalog) as channel:
        facts = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        for chat in range(plan.chats):
            salt, tokens = secrets.token_hex(32), prose.prompt(plan.prompt + chat)
            chain: list[catalog_pb2.Node] = []
            for number in range(plan.turns):
                turn = await _turn(targets[(chat + number) % len(targets)], tokens, plan.new, salt, chain, number)
                turns.append(turn)
                tokens = [*turn.prompt, *turn.output]
                chain = await _durable(facts, fingerprint, salt, tokens[:-1])
                tokens += prose.continuation(_MORE)
    return turns


async def _turn(
    target: str, tokens: list[int], new: int, salt: str, chain: Sequence[catalog_pb2.Node], after: int
) -> Turn:
    request = common_pb2.GenerationRequest(
        request_id=secrets.token_hex(8), tokens=tokens, max_new_tokens=new, tenant_salt=salt
    )
    output: list[int] = []
    result = worker_pb2.Result()
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        # What is resident here from an earlier turn connects to the chain; the rest of it is restored.
        async for event in stub.Generate(
            worker_pb2.WorkerGenerateRequest(request=request, chain=chain), timeout=_TURN_S
        ):
            output += event.delta.tokens
            if event.HasField("result"):
                result = event.result
    return Turn(after, tokens, output, result.usage)


async def _durable(
    facts: catalog_pb2_grpc.CatalogStub, fingerprint: str, salt: str, processed: Sequence[int]
) -> list[catalog_pb2.Node]:
    """The chain of a turn, once the catalog has all of it. Raises TimeoutError."""
    wanted = len(processed) // TAIL_TOKENS * TAIL_TOKENS
    request = catalog_pb2.LookupRequest(fingerprint=fingerprint, tenant_salt=salt, tokens=processed)
    give_up = time.monotonic() + _DURABLE_S
    while True:
        found = await facts.Lookup(request, timeout=5)  # type: ignore[misc]
        nodes = [*found.nodes, *([found.tail] if found.HasField("tail") else [])]
        if nodes and nodes[-1].chunk.end >= wanted:
            return nodes
        if time.monotonic() > give_up:
            raise TimeoutError(f"{wanted} tokens durable: not within {_DURABLE_S:g} s")
        await asyncio.sleep(0.05)
