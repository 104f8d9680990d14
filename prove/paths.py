"""The ways a request's state can come about on a worker, each played on a bench and each seen to be what it says.

A *history* is a chat turn that has ended: its tokens, and the chain of facts that holds its state. A path continues a
history (or begins one) and returns what was delivered together with the reasons, if any, for which the path it was
meant to take was not the one it took. A path that was not taken proves nothing, so a claim counts such a reason as a
failure.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from libs.continuation.chain import CHUNK_TOKENS
from libs.controller.catalog_facts import Node, Replica, ReplicaState
from libs.controller.protocol import Sampling, Tier, TokenLogprobs
from prove.judging import Generation
from prove.peer_server import PeerServer
from prove.prose import Prose
from prove.worker_bench import Ask, Bench, Exchange, NotInTimeError, fresh_salt
from services.worker.runtime.grammars import MaskFactory

CHUNK = 256
_FLOOD = 16
_ENDLESS = 2
_FOUND_WITHIN_S = 30.0


@dataclass(frozen=True)
class History:
    """A turn that has ended. `tokens`: prompt and output; all but the last are processed."""

    tokens: list[int]
    salt: str
    nodes: tuple[Node, ...] = ()

    @property
    def processed(self) -> list[int]:
        return self.tokens[:-1]

    @property
    def durable_end(self) -> int:
        """Where a restore ends: the last multiple of 16."""
        return self.nodes[-1].chunk.end if self.nodes else 0


@dataclass
class Played:
    """One generation. `missed`: why the path was not the one meant; `prompt`: what its output began behind."""

    path: str
    exchange: Exchange
    prompt: list[int]
    output: list[int]
    sampling: Mapping[str, object] | None = None
    missed: list[str] = field(default_factory=list)
    logprobs: Sequence[TokenLogprobs] = ()

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Notes where they differ."""
        if found != wanted:
            self.missed.append(f"{self.path}: {what} is {found}, not {wanted}")

    def require(self, what: str, holds: bool) -> None:
        """Notes where it does not hold."""
        if not holds:
            self.missed.append(f"{self.path}: {what} does not hold")

    def tell(self, option: Option, logprobs: Sequence[TokenLogprobs]) -> None:
        """What was said of the probabilities, where the option asks for it."""
        if option.sampling.logprobs:
            self.expect("log-probabilities", len(logprobs), len(self.output))
            self.logprobs = logprobs

    def generation(self, number: int) -> Generation:
        return Generation(f"{self.path}-{number}", self.prompt, self.output, self.sampling, self.logprobs)

    def history(self, salt: str, nodes: tuple[Node, ...] = ()) -> History:
        return History([*self.exchange.offer.request.tokens, *self.exchange.tokens], salt, nodes)


def _played(path: str, exchange: Exchange) -> Played:
    return Played(path, exchange, list(exchange.offer.request.tokens), list(exchange.tokens))


async def cold(bench: Bench, prompt: Sequence[int], new: int, salt: str | None = None) -> Played:
    """Nothing of it is anywhere."""
    found = _played("cold", await bench.run(Ask(prompt, new, salt or fresh_salt())))
    found.expect("cached tokens", found.exchange.usage.cached_tokens, 0)
    found.expect("computed tokens", found.exchange.usage.computed_tokens, len(prompt))
    return found


async def with_strangers(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    new: int,
    lanes: int,
    ended: Callable[[Played], Awaitable[None]],
) -> None:
    """Other tenants' requests in the other lanes: each other's, and some that come without end and are not judged.

    `ended` is called with each; what it missed is known when this returns.
    """
    judged: list[Played] = []
    others: list[Exchange] = []
    gate = asyncio.Semaphore(max(1, lanes - _ENDLESS))

    async def one(prompt: Sequence[int]) -> None:
        async with gate:
            exchange = await bench.accepted(Ask(prompt, new, fresh_salt()))
            played = _played("batched", await exchange.completed())
            judged.append(played)
            await ended(played)

    async def endless(first: int) -> None:
        for number in itertools.count(first):
            exchange = await bench.accepted(Ask(prompts[number % len(prompts)], 4 * new, fresh_salt()))
            others.append(exchange)
            await exchange.completed()

    strangers = [asyncio.create_task(endless(number)) for number in range(_ENDLESS)]
    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(one(prompt))
    finally:
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        for exchange in others:
            exchange.cancel()
            await exchange.finished()
    every = [*(played.exchange for played in judged), *others]
    spans = [(one, one.arrivals[0], one.arrivals[-1]) for one in every if one.arrivals]
    for played in judged:
        mine = played.exchange.arrivals
        company = sum(one is not played.exchange and one_at < mine[-1] and mine[0] < end for one, one_at, end in spans)
        played.require("another request decoding beside it", company > 0)
        played.expect("cached tokens", played.exchange.usage.cached_tokens, 0)


async def resident(bench: Bench, history: History, more: Sequence[int], new: int) -> Played:
    """The next turn where the last one's pages still are."""
    there = bench.resident(history.processed, history.salt)
    found = _played("resident", await bench.run(Ask([*history.tokens, *more], new, history.salt)))
    usage = found.exchange.usage
    found.expect("resident tokens before it", there, len(history.processed))
    found.expect("cached tokens", usage.cached_tokens, len(history.processed))
    found.expect("restored tokens", usage.restored_tokens, 0)
    return found


async def partial(bench: Bench, history: History, draw: random.Random, more: Sequence[int], new: int) -> Played:
    """Another text from within the last turn's last chunk on: it begins at a resident chunk boundary."""
    boundary = len(history.processed) // CHUNK * CHUNK
    # A continuation may also begin at a turn's end, rounded down to a tail's length: less than that is kept.
    end = len(history.processed) // 16 * 16
    keep = draw.randint(boundary + 1, end - 1) if end > boundary + 1 else boundary
    # The token after what is kept must differ, or more is shared than meant.
    other = [token for token in more if token != history.tokens[keep]] or list(more)
    found = _played("partial", await bench.run(Ask([*history.tokens[:keep], *other], new, history.salt)))
    found.require("a full chunk shared", boundary > 0)
    found.expect("cached tokens", found.exchange.usage.cached_tokens, boundary)
    found.expect("restored tokens", found.exchange.usage.restored_tokens, 0)
    return found


async def forked(bench: Bench, history: History, mores: Sequence[Sequence[int]], new: int) -> list[Played]:
    """Several next turns at once: one goes on in place, the others branch from it, inside a page if it ends there.

    The pending token is common to them as well: where it ends a chunk, the first may have computed it already.
    """
    exchanges = [bench.offer(Ask([*history.tokens, *more], new, history.salt)) for more in mores]
    routes = {id(bench.engine.pool.job_pages(one.assignment).tables[_full(bench)]) for one in exchanges}
    found = [_played("forked", await exchange.completed()) for exchange in exchanges]
    for number, played in enumerate(found):
        cached = played.exchange.usage.cached_tokens
        also = [len(history.tokens)] if number and len(history.tokens) % CHUNK_TOKENS == 0 else []
        played.require(f"cached tokens {cached}: the history's", cached in [len(history.processed), *also])
        played.expect("page tables", len(routes), len(mores))
    return found


async def restored(bench: Bench, history: History, tier: Tier, more: Sequence[int], new: int) -> Played:
    """Nothing of it is resident: its chain is brought from one tier, and from that one alone."""
    name = {Tier.SSD: "ssd", Tier.OBJECT: "s3"}.get(tier, tier.name.lower())
    there = bench.resident(history.processed, history.salt)
    ask = Ask([*history.tokens, *more], new, history.salt, chain=history.nodes, tier=tier)
    found = _played(name, await bench.run(ask))
    usage = found.exchange.usage
    found.expect("resident tokens before it", there, 0)
    found.expect("restored tokens", usage.restored_tokens, history.durable_end)
    found.expect("tiers", [share.tier.name for share in usage.restored_by_tier], [tier.name])
    found.expect("computed tokens", usage.computed_tokens, len(history.tokens) + len(more) - history.durable_end)
    return found


async def from_memory(bench: Bench, prose: Prose, history: History, more: Sequence[int], new: int) -> Played:
    """Its pages went to others; host memory still has what was checkpointed. No file and no store is read."""
    await flood(bench, prose)
    counts = bench.storage.counts
    files, gets = counts.directory.read_bytes if counts.directory else 0, counts.store.gets
    found = await restored(bench, history, Tier.RAM, more, new)
    found.expect("bytes of files read", (counts.directory.read_bytes if counts.directory else 0) - files, 0)
    found.expect("objects read from the store", counts.store.gets - gets, 0)
    return found


async def known_peer(bench: Bench, peer: PeerServer) -> None:
    """Until the worker knows who claims the peer's directory. Raises NotInTimeError."""
    give_up = asyncio.get_running_loop().time() + _FOUND_WITHIN_S
    while (known := bench.storage.book.peer_of(peer.node)) is None or known.epoch != peer.epoch:
        if asyncio.get_running_loop().time() > give_up:
            raise NotInTimeError(f"the peer's directory {peer.node} is not in the endpoint map")
        await asyncio.sleep(0.01)


def at_peer(history: History, peer: PeerServer) -> History:
    """The chain as facts that name the peer's directory and nothing else."""
    nodes = tuple(
        replace(
            node,
            chunk=replace(node.chunk, receipts=()),
            replicas=tuple(
                Replica(peer.node, receipt.group, ReplicaState.READY, receipt.content_id)
                for receipt in node.chunk.receipts
            ),
        )
        for node in history.nodes
    )
    return replace(history, nodes=nodes)


async def from_peer(bench: Bench, history: History, peer: PeerServer, more: Sequence[int], new: int) -> Played:
    """Nothing of it is on this machine; another worker's directory has it, and is the only place its facts name."""
    await known_peer(bench, peer)
    store = bench.storage.counts.store
    gets, sent = store.gets, peer.counts.served_bytes
    found = await restored(bench, at_peer(history, peer), Tier.PEER, more, new)
    found.expect("objects read from the store", store.gets - gets, 0)
    brought = sum(share.bytes for share in found.exchange.usage.restored_by_tier)
    found.expect("bytes the peer has sent", peer.counts.served_bytes - sent, brought)
    return found


async def flood(bench: Bench, prose: Prose) -> None:
    """Another request reserves every page there is, and is cancelled at once: what was at rest has lost its own."""
    budget = bench.engine.model.max_context - _FLOOD
    exchange = await bench.accepted(Ask(prose.prompt(_FLOOD), budget, fresh_salt()))
    exchange.cancel()
    await exchange.finished()


async def evicted(
    bench: Bench, prose: Prose, history: History, more: Sequence[int], new: int, *, chain: bool
) -> Played:
    """Its pages, there since this process began, went to others; it is brought back from disk, or computed anew."""
    await flood(bench, prose)
    gone = bench.evicted().get("capacity", 0)
    if chain:
        found = await restored(bench, history, Tier.SSD, more, new)
        found.path = "evicted"
    else:
        found = _played("evicted", await bench.run(Ask([*history.tokens, *more], new, history.salt)))
        found.expect("cached tokens", found.exchange.usage.cached_tokens, 0)
    found.require("an eviction for want of room", gone > 0)
    return found


async def restarted(bench: Bench, history: History, more: Sequence[int], new: int, epoch: int) -> Played:
    """Another process of the worker (its epoch is above `epoch`) finds the chunks of the last one on its disk."""
    found = await restored(bench, history, Tier.SSD, more, new)
    found.path = "restart"
    found.require("a later epoch", bench.epoch > epoch)
    return found


async def resumed(bench: Bench, prompt: Sequence[int], new: int, after: int, option: Option | None = None) -> Played:
    """Cut after some tokens and gone on with in a second attempt, which replays what was delivered."""
    option = option or Option("greedy", Sampling())
    salt, name = fresh_salt(), f"resumed-{fresh_salt()[:12]}"
    first = await bench.accepted(Ask(prompt, new, salt, option.sampling, request=name))
    await first.drawn(after)
    first.cancel()
    await first.finished()
    delivered = list(first.tokens)
    attempt = first.assignment.attempt + 1
    second = await bench.run(
        Ask(
            [*prompt, *delivered], new - len(delivered), salt, option.sampling, output_start=len(prompt),
            request=name, attempt=attempt,
        )
    )  # fmt: skip
    found = Played("resumed", second, list(prompt), [*delivered, *second.tokens], option.reference)
    found.tell(option, [*first.logprobs, *second.logprobs])
    found.require("tokens on both sides of the cut", after <= len(delivered) < new)
    found.expect("tokens in all", len(found.output), new)
    found.require("a resident prefix", second.usage.cached_tokens > 0)
    return found


@dataclass(frozen=True)
class Option:
    """A way to draw: as the worker is told, and as cli/reference.py is (None where it is greedy)."""

    name: str
    sampling: Sampling
    reference: Mapping[str, object] | None = None


def options(seed: int, bias: Sequence[int]) -> list[Option]:
    """Each sampling option by itself over a drawn base, and one with all. `bias`: token ids to push and pull."""

    def one(name: str, **given: float) -> Option:
        told = Sampling(temperature=0.9, seed=seed, **given)  # type: ignore[arg-type]
        return Option(name, told, {"temperature": 0.9, "seed": seed, **given})

    up, down = bias[0], bias[1]
    pushed = ((min(up, down), 4.0 if up < down else -4.0), (max(up, down), -4.0 if up < down else 4.0))
    biased = Option(
        "logit_bias",
        Sampling(temperature=0.9, seed=seed, logit_bias=pushed),
        {"temperature": 0.9, "seed": seed, "logit_bias": {str(token): value for token, value in pushed}},
    )
    base: dict[str, object] = {"temperature": 0.9, "seed": seed}
    every = {"top_p": 0.95, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    return [
        one("temperature"),
        one("top_p", top_p=0.8),
        one("top_k", top_k=20),
        one("min_p", min_p=0.1),
        one("repetition_penalty", repetition_penalty=1.3),
        one("presence_penalty", presence_penalty=0.7),
        one("frequency_penalty", frequency_penalty=0.7),
        biased,
        one("all", **every, frequency_penalty=0.2),
        Option("mask", Sampling(temperature=0.9, seed=seed, grammar=MASK), {**base, "mask": {"modulus": MODULUS}}),
        Option("greedy mask", Sampling(grammar=MASK), {"mask": {"modulus": MODULUS}}),
        Option("logprobs", Sampling(temperature=0.9, seed=seed, logprobs=5), base),
        Option("greedy logprobs", Sampling(logprobs=1)),
    ]


MASK, MODULUS = "modular", 7


class ModularMask:
    """Stands in for a grammar, as cli/reference.py's: the ids that are, modulo 7, the output's length plus its sum."""

    def __init__(self, vocab: int) -> None:
        self._ids = torch.arange(vocab) % MODULUS
        self._wanted = 0

    def advance(self, token: int) -> None:
        """See LogitsMask."""
        self._wanted = (self._wanted + 1 + token) % MODULUS

    def allowed(self) -> torch.Tensor | None:
        """See LogitsMask."""
        return self._ids == self._wanted


def masks(vocab: int) -> dict[str, MaskFactory]:
    """What the options name as their grammar."""
    return {MASK: lambda: ModularMask(vocab)}


async def sampled(bench: Bench, prompt: Sequence[int], new: int, option: Option, salt: str) -> Played:
    """Drawn, with one option."""
    found = _played(f"sampled {option.name}", await bench.run(Ask(prompt, new, salt, option.sampling)))
    found.sampling = option.reference
    found.tell(option, found.exchange.logprobs)
    return found


def _full(bench: Bench) -> str:
    """A full-attention group's name, or the first group's."""
    groups = bench.engine.pool.groups
    return next((group.name for group in groups if not group.window), groups[0].name)
