"""The demo's five scenes, on real workers, real stores and a real model.

(a) a cold chat turn; (b) the next turn, resident; (c) kill -9 of the worker: the next turn at the other one, restored
from the object store; (d) the killed worker returns, the other one is drained: chats that lie on the returned worker's
disk go on from there, the first chat from disk and object store; (e) kill -9 in mid-stream: the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from cli.demo import exact
from cli.demo.facts import Facts, describe, drain, drop_from_page_cache
from cli.demo.record import PAGE_TOKENS, Record, Turn
from cli.demo.talk import Answer, Talker
from cli.embedded.cluster import Cluster, WorkerHandle

COLD_TOKENS = 1_500
REPLY_TOKENS = 32
CHUNK_TOKENS = 256
DISK_CHUNKS = 6
"""Chunks of history of the chats of scene (d): 6 x 256 tokens and a bit."""
EXTRA_TOKENS = (0, 1, 255)
STREAM_TOKENS = 96
KILL_AFTER = 24
"""Pieces after which scene (e) kills: at least as many tokens; enough are left to go."""
TTFT_OBJECT = 1 / 5
TTFT_DISK = 1 / 8


class ScenarioFailedError(RuntimeError):
    """The demo could not bring about what it meant to show."""


@dataclass
class _Chat:
    """A continuation by token ids: its first turn, and then the next."""

    name: str
    first: Turn
    ids: list[int]


class Scenario:
    """One run against one cluster. `say` tells a person what is going on."""

    def __init__(self, cluster: Cluster, talker: Talker, facts: Facts, say: Callable[[str], None]) -> None:
        self.record = Record()
        self._cluster = cluster
        self._talker = talker
        self._facts = facts
        self._say = say
        self._messages: list[dict[str, str]] = []

    async def run(self) -> Record:
        """All scenes, then the judgement."""
        a, b = await self._cold_and_resident()
        home = self._cluster.workers[b.answer.served.worker]
        other = next(worker for worker in self._cluster.workers.values() if worker is not home)
        chats = await self._chats_at(home, other)
        c = await self._restored_elsewhere(home, a, b)
        d = await self._from_disk(home, self._cluster.workers[c.answer.served.worker], chats, c)
        e = await self._killed_in_mid_stream()
        await self._judge_exactness()
        self._check_scenes(a, b, c, d, chats, e)
        return self.record

    async def _cold_and_resident(self) -> tuple[Turn, Turn]:
        self._say(f"(a) a chat of about {COLD_TOKENS} tokens, cold")
        text = await self._text_of(COLD_TOKENS)
        self._messages = [{"role": "user", "content": text + "\n\nWho was the old man?"}]
        a = self._keep("a", "cold", await self._talker.chat(self._messages, REPLY_TOKENS), 0)
        await self._durable("a", a.answer)
        self.record.waits_ms["a resident"] = await self._facts.resident(a.answer.processed)
        self._say("(b) the next turn, resident on the same worker")
        b = await self._next_turn("b", "resident", a, "And what was wrong with the clock?")
        return a, b

    async def _chats_at(self, home: WorkerHandle, other: WorkerHandle) -> list[_Chat]:
        """Chats whose every token is processed at `home`, because the other worker is drained meanwhile."""
        self._say(f"(d) three more chats, cold, at {home.name} ({other.name} is drained meanwhile)")
        epoch = (await describe(other.target)).endpoint.epoch
        await drain(other.target)
        await self._facts.worker_gone(other.name)
        chats = [await self._chat(extra) for extra in EXTRA_TOKENS]
        await self._return(other, epoch)
        return chats

    async def _chat(self, extra: int) -> _Chat:
        """A chat of exactly DISK_CHUNKS x 256 + extra processed tokens."""
        name = f"256·{DISK_CHUNKS}" + (f"+{extra}" if extra else "")
        prompt = DISK_CHUNKS * CHUNK_TOKENS + extra + 1 - REPLY_TOKENS
        text = await self._talker.tokenize(f"A copy of the book, for reader {extra}.\n" + demo_text() * 2)
        answer = await self._talker.complete(text[:prompt], REPLY_TOKENS)
        if len(answer.processed) != prompt + REPLY_TOKENS - 1:
            raise ScenarioFailedError(f"the chat of {name} tokens ended after {len(answer.processed)}")
        turn = self._keep(f"d0 {name}", "cold", answer, 0)
        return _Chat(name, turn, answer.served.prompt_token_ids + answer.served.token_ids)

    async def _return(self, worker: WorkerHandle, epoch: int) -> None:
        """Ends a drained worker's process and waits until its successor is heard."""
        worker.child.kill()
        await self._facts.worker_heard(worker.name, newer_than=epoch)

    async def _restored_elsewhere(self, home: WorkerHandle, a: Turn, b: Turn) -> Turn:
        self._say("(c) waiting until the tail is durable")
        await self._durable("b", b.answer)
        self._say(f"(c) kill -9 of {home.name}; the next turn at the other worker, from the object store")
        drop_from_page_cache(self._cluster.spec.state / "s3")
        home.child.kill()
        await home.child.wait_crashed()
        await self._facts.worker_gone(home.name)
        return await self._next_turn("c", "killed, object store", b, "Did the brig come back?")

    async def _from_disk(self, home: WorkerHandle, other: WorkerHandle, chats: list[_Chat], c: Turn) -> list[Turn]:
        self._say("(d) waiting until the first chat is durable and the killed worker is back")
        await self._durable("c", c.answer)
        before = chats[0].first.answer.served.epoch
        back = await self._facts.worker_heard(home.name, newer_than=before)
        after = back.heartbeat.epoch
        self.record.check("(d) the killed worker's epoch grew", after, f"> {before}", after > before)
        for chat in chats:
            await self._facts.durable(chat.first.answer.processed, node=back.heartbeat.node)
            at_home = chat.first.answer.served.worker == home.name
            self.record.check(f"(d0 {chat.name}) ran there", chat.first.answer.served.worker, home.name, at_home)
        self._say(f"(d) draining {other.name}")
        drained = await drain(other.target)
        self.record.check("(d) the drain was clean", drained.unpublished, 0, drained.clean and not drained.unpublished)
        await self._facts.worker_gone(other.name)
        turns = []
        for chat in chats:
            dropped = drop_from_page_cache(home.chunk_dir)
            self._say(
                f"(d) the chat of {chat.name} tokens goes on from disk ({dropped >> 20} MiB out of the page cache)"
            )
            ids = chat.ids + await self._new_ids(" The keeper closed the book and said")
            history = len(chat.first.answer.processed)
            turns.append(
                self._keep(f"d {chat.name}", "local disk", await self._talker.complete(ids, REPLY_TOKENS), history)
            )
        drop_from_page_cache(home.chunk_dir)
        self._say("(d) the first chat goes on from disk and object store")
        turns.append(await self._next_turn("d first", "disk + object store", c, "What did Mary say about it?"))
        await self._return(other, (await describe(other.target)).endpoint.epoch)
        return turns

    async def _killed_in_mid_stream(self) -> Turn:
        self._say("(e) kill -9 in mid-stream; the stream goes on")
        ids = (await self._talker.tokenize("The log of the brig, as far as it can be read.\n" + demo_text()))[:700]
        killed: list[str] = []

        async def kill_once(pieces: int) -> None:
            if pieces == KILL_AFTER and not killed:
                worker = await self._decoding_worker()
                killed.append(worker.name)
                worker.child.kill()

        answer = await self._talker.complete(ids, STREAM_TOKENS, kill_once)
        return self._keep("e", "killed in mid-stream", answer, 0)

    async def _decoding_worker(self) -> WorkerHandle:
        for worker in self._cluster.workers.values():
            if (await describe(worker.target)).assignments:
                return worker
        raise ScenarioFailedError("no worker is decoding")

    async def _next_turn(self, name: str, what: str, before: Turn, question: str) -> Turn:
        self._messages += [
            {"role": "assistant", "content": before.answer.text},
            {"role": "user", "content": question},
        ]
        answer = await self._talker.chat(self._messages, REPLY_TOKENS)
        return self._keep(name, what, answer, len(before.answer.processed))

    async def _durable(self, name: str, answer: Answer) -> None:
        self.record.waits_ms[f"{name} durable"] = await self._facts.durable(answer.processed)

    def _keep(self, name: str, what: str, answer: Answer, history: int) -> Turn:
        turn = Turn(name, what, answer, history)
        self.record.turns.append(turn)
        return turn

    async def _text_of(self, tokens: int) -> str:
        """Whole words of the demo's text, about so many tokens."""
        text = demo_text() * 2
        have = len(await self._talker.tokenize(text))
        return text[: int(len(text) * tokens / have)].rpartition(" ")[0]

    async def _new_ids(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a sequence: without a beginning-of-sequence token."""
        return (await self._talker.tokenize("." + text))[-len(text.split()) :]

    async def _judge_exactness(self) -> None:
        self._say("judging every turn by transformers' own forward")
        verdicts = await exact.judge(
            self._cluster.folders[self._talker.model], [turn.case() for turn in self.record.turns]
        )
        for turn in self.record.turns:
            turn.verdict = verdicts[turn.name]
            turn.exact = turn.verdict.exact
        judged = list(verdicts.values())
        self.record.check(
            "every turn exact by teacher forcing",
            {"tokens": sum(v.tokens for v in judged), "max_gap": max(v.max_gap for v in judged)},
            exact.GREEDY_GAP,
            exact.all_exact(judged),
        )

    def _check_scenes(self, a: Turn, b: Turn, c: Turn, d: list[Turn], chats: list[_Chat], e: Turn) -> None:
        check = self.record.check
        check("(a) is cold", a.answer.served.cached_tokens, 0, a.answer.served.cached_tokens == 0)
        for turn, tier in ((b, "gpu"), (c, "object"), *((turn, "ssd") for turn in d)):
            served = turn.answer.served
            limit = turn.new_tokens + PAGE_TOKENS
            check(f"({turn.name}) computed tokens", served.computed_tokens, limit, served.computed_tokens <= limit)
            found = list(served.restored_by_tier) or [served.tier]
            check(f"({turn.name}) came from {tier}", "+".join(found), tier, tier in found)
        check("(b) same worker", b.answer.served.worker, a.answer.served.worker, _same_worker(a, b))
        check("(c) another worker", c.answer.served.worker, f"not {b.answer.served.worker}", not _same_worker(b, c))
        _check_ratio(self.record, "(c) TTFT against cold", c, a, TTFT_OBJECT)
        for turn, chat in zip(d[:-1], chats, strict=True):
            wholly = set(turn.answer.served.restored_by_tier) == {"ssd"}
            check(f"({turn.name}) wholly from disk", list(turn.answer.served.restored_by_tier), ["ssd"], wholly)
            _check_ratio(self.record, f"({turn.name}) TTFT against cold", turn, chat.first, TTFT_DISK)
        mixed = set(d[-1].answer.served.restored_by_tier)
        check("(d first) from disk and object store", sorted(mixed), ["object", "ssd"], mixed == {"ssd", "object"})
        served = e.answer.served
        check("(e) one stream over two workers", list(served.workers), "2 workers", len(set(served.workers)) == 2)
        check("(e) unbroken", len(served.token_ids), STREAM_TOKENS, len(served.token_ids) == STREAM_TOKENS)
        check("(e) gap, ms", round(e.answer.gap_ms, 1), "reported", True)


def _same_worker(one: Turn, other: Turn) -> bool:
    return one.answer.served.worker == other.answer.served.worker


def _check_ratio(record: Record, name: str, turn: Turn, cold: Turn, limit: float) -> None:
    ratio = turn.answer.ttft_ms / cold.answer.ttft_ms
    record.check(name, round(ratio, 4), round(limit, 4), ratio <= limit)


def demo_text() -> str:
    return files("cli.demo").joinpath("text.txt").read_text(encoding="utf-8")


async def run_scenario(cluster: Cluster, talker: Talker, facts: Facts, say: Callable[[str], None]) -> Record:
    """All scenes on a ready cluster."""
    async with asyncio.timeout(1_800):
        return await Scenario(cluster, talker, facts, say).run()
