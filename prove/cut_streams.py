"""Streams whose worker or router is killed under them: one aimed at a round, strangers beside it.

Every stream is first played undisturbed, to learn a stop string that lies behind the kill, and what is to be expected.
Whoever was killed must be back and known to every router before the next round.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import httpx

from cli.demo.facts import describe
from cli.embedded.children import Child
from cli.embedded.cluster import Cluster, WorkerHandle
from libs.contracts.segue.v1 import catalog_pb2, router_pb2, router_pb2_grpc
from prove.judging import Generation
from prove.prose import Prose
from prove.recorded import Attempts, attempts
from prove.stage import Stage
from prove.streams import Piece, Seen, stream

_Holder = Callable[[str], Awaitable[Child | None]]

_BACK_S = 120.0
_CALL_S = 5.0
_DECISION_S = 30.0
_STRANGERS = 2
LOST = (catalog_pb2.ATTEMPT_OUTCOME_WORKER_LOST, catalog_pb2.ATTEMPT_OUTCOME_ROUTE_DROPPED)


@dataclass(frozen=True)
class Way:
    """How a stream is drawn. `sampling`: as the API and cli/reference.py both have it; `stops`: ends at a string."""

    name: str
    sampling: dict[str, object] = field(default_factory=dict)
    stops: bool = False


_DRAWN: dict[str, object] = {"temperature": 0.75, "top_p": 0.875}
_PENALTIES: dict[str, object] = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
WAYS = (
    Way("greedy"),
    Way("sampled", _DRAWN),
    Way("greedy, stop string", stops=True),
    Way("sampled, penalties", {**_DRAWN, **_PENALTIES}),
    Way("greedy, penalties", _PENALTIES),
    Way("sampled, penalties, stop string", {**_DRAWN, **_PENALTIES}, stops=True),
)


@dataclass
class Cut:
    """One stream. `missed`: why it does not count as one that was cut; `faults`: what a client would complain of."""

    group: str
    way: Way
    prompt: list[int]
    body: dict[str, object]
    expected: Seen
    seen: Seen = field(default_factory=Seen)
    before: int = 0
    """Pieces that had come when the kill was sent."""
    missed: list[str] = field(default_factory=list)

    @property
    def stop(self) -> str:
        return str(self.body.get("stop", ""))

    @property
    def faults(self) -> list[str]:
        wrong = self.seen.faults(self.prompt)
        if self.seen.finish_reasons != self.expected.finish_reasons and self.seen.tokens == self.expected.tokens:
            wrong.append(f"finished by {self.seen.finish_reasons}, undisturbed by {self.expected.finish_reasons}")
        if self.stop and (self.stop in self.seen.text or self.seen.finish_reasons != ["stop"]):
            wrong.append(f"{self.seen.finish_reasons} with a stop string in sight")
        return wrong

    def generation(self, number: int) -> Generation:
        """For the reference."""
        how = {name: value for name, value in self.body.items() if name not in ("stop", "max_tokens")}
        return Generation(f"{self.group}-{number}", self.prompt, self.seen.tokens, how or None)


class Rounds:
    """On one cluster. `least`: pieces before a kill; `new`: tokens of a stream, of which a kill leaves half."""

    def __init__(self, stage: Stage, http: httpx.AsyncClient, new: int, longest: int, seed: int) -> None:
        self.stage, self._http, self._new, self._longest = stage, http, new, longest
        self._prose, self._draw = Prose(stage.folder, seed), random.Random(seed)

    async def worker_killed(self, number: int) -> list[Cut]:
        """kill -9 of the worker that decodes the aimed stream; the aimed one first."""

        async def holder(request_id: str) -> Child | None:
            found = [one for one in self.stage.cluster.workers.values() if await _runs(one, request_id)]
            return found[0].child if found else None

        return await self._round(number, "worker killed", holder)

    async def router_killed(self, number: int) -> list[Cut]:
        """kill -9 of the router that has the aimed stream."""
        cluster = self.stage.cluster

        async def holder(_request_id: str) -> Child | None:
            streaming = [await self._streaming(url) for url in cluster.router_metrics_urls]
            return cluster.routers[streaming.index(max(streaming))] if any(streaming) else None

        # Alone: a router says how many streams it has, not which.
        return await self._round(number, "router killed", holder, strangers=0)

    async def _round(self, number: int, group: str, holder: _Holder, strangers: int = _STRANGERS) -> list[Cut]:
        cuts = [await self.planned(group, WAYS[(number + other) % len(WAYS)]) for other in range(1 + strangers)]
        aimed, killed = cuts[0], list[Child]()
        at = self._draw.randint(3, max(3, self._new // 3))

        async def kill(request_id: str, pieces: int) -> None:
            if pieces < at or killed:
                return
            child = await holder(request_id)
            if child is None or child.pid is None:
                aimed.missed.append("nobody was found to have it")
            else:
                child.kill()
                aimed.before = pieces
            killed.extend([child] if child is not None else [])

        before = {child: child.restarts for child in self._children()}
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.play(cut, kill if cut is aimed else None)) for cut in cuts
            ]  # fmt: skip
        for cut, task in zip(cuts, running, strict=True):
            cut.seen = task.result()
        for child in killed:
            await child.wait_restarted(before[child] + 1, _BACK_S)
            if child.exit_code != -9:
                aimed.missed.append(f"{child.spec.name} ended with {child.exit_code}, not by the kill")
        await whole(self.stage.cluster)
        if not aimed.before or aimed.seen.pieces <= aimed.before:
            aimed.missed.append(f"killed after {aimed.before} of {aimed.seen.pieces} pieces")
        if group == "worker killed" and (made := await self._attempts(aimed.seen)) < 2:
            aimed.missed.append(f"{made} attempts")
        if group == "router killed" and aimed.seen.routers < 2:
            aimed.missed.append(f"submitted to {aimed.seen.routers} routers")
        return cuts

    def _children(self) -> list[Child]:
        cluster = self.stage.cluster
        return [*cluster.routers, *(worker.child for worker in cluster.workers.values())]

    async def play(self, cut: Cut, piece: Piece | None = None) -> Seen:
        stage = self.stage
        return await stream(self._http, stage.cluster.base_url, stage.model, cut.prompt, cut.body, piece)

    async def planned(self, group: str, way: Way) -> Cut:
        """A prompt that the model does not end early, and for a way that stops at a string one from its last part."""
        while True:
            prompt = self._prose.prompt(self._draw.randint(24, self._longest))
            body: dict[str, object] = {**way.sampling, "max_tokens": self._new}
            if "temperature" in way.sampling:
                body["seed"] = self._draw.getrandbits(63)
            cut = Cut(group, way, prompt, body, Seen())
            cut.expected = await self.play(cut)
            if cut.expected.finish_reasons != ["length"] or cut.expected.faults(prompt):
                continue
            if not way.stops:
                return cut
            text, length = cut.expected.text, len(cut.expected.text)
            stop = text[length * 3 // 4 : length * 3 // 4 + 4]
            if len(stop) == 4 and text.find(stop) == length * 3 // 4:
                body["stop"] = stop
                cut.expected = await self.play(cut)
                return cut

    async def _attempts(self, seen: Seen) -> int:
        """As the answer says; who ends a stream at a stop string may not have heard, then as the decision says."""
        if seen.attempts:
            return seen.attempts
        made = await attempts(self.stage, seen.request_id, _lost, _DECISION_S)
        return max(one.attempt for one in made) + (len(made) == 1) if _lost(made) else 0

    async def _streaming(self, url: str) -> float:
        text = (await self._http.get(url, timeout=_CALL_S)).text
        lines = [line for line in text.splitlines() if line.startswith("segue_router_active{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _lost(made: Attempts) -> bool:
    return any(attempt.outcome in LOST for attempt in made)


async def _runs(worker: WorkerHandle, request_id: str) -> bool:
    try:
        said = await describe(worker.target)
    except grpc.aio.AioRpcError:
        return False
    return any(one.request_id == request_id for one in said.assignments)


async def whole(cluster: Cluster, within: float = _BACK_S) -> None:
    """Until every worker is ready and every router hears the process that runs now. Raises TimeoutError."""
    async with asyncio.timeout(within):
        for worker in cluster.workers.values():
            await worker.child.wait_ready(within)
        for router in cluster.routers:
            await router.wait_ready(within)
        epochs = {name: (await describe(one.target)).endpoint.epoch for name, one in cluster.workers.items()}
        for target in cluster.router_targets:
            async with grpc.aio.insecure_channel(target) as channel:
                stub = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
                while not await _hears(stub, epochs):  # noqa: ASYNC110 - a router tells nobody
                    await asyncio.sleep(0.05)


async def _hears(router: router_pb2_grpc.RouterStub, epochs: dict[str, int]) -> bool:
    asked = router_pb2.ListWorkersRequest()
    known = await router.ListWorkers(asked, timeout=_BACK_S, wait_for_ready=True)
    heard = {one.endpoint.worker: one.heartbeat.epoch for one in known.workers if one.listed and one.tunnels}
    return all(heard.get(name) == epoch for name, epoch in epochs.items())


def figures(cuts: Sequence[Cut]) -> dict[str, object]:
    """For a report."""
    same = sum(cut.seen.tokens == cut.expected.tokens for cut in cuts)
    return {
        "streams": len(cuts), "as_undisturbed": same, "killed_after_pieces": [cut.before for cut in cuts if cut.before],
        "missed": [f"{cut.way.name}: {why}" for cut in cuts for why in cut.missed],
    }  # fmt: skip
