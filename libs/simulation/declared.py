"""Declared values: what prompts hold, what is generated, who has which model. Nothing is computed but sums.

Whatever attempts a request needs, exactly its declared tokens must reach its client.
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from libs.continuation import chain as chains
from libs.controller.catalog_facts import LayerGroup, Model
from libs.controller.protocol import FinishReason, GenerationRequest
from libs.simulation.schedule import Ask

FINGERPRINT = "f0" * 32
SALT = "cd" * 32
GROUP = "full-kv1-d4-float32"
MODEL_NAME = "m"
MODEL = Model(FINGERPRINT, (LayerGroup(GROUP, (0,), 0, 1, 4, "float32"),), chains.CHUNK_TOKENS, max_context=512)
BYTES_PER_TOKEN = 32
STOP = 999  # ends a generation that declares less than its budget


def model(max_context: int) -> Model:
    """The one model, with the longest context any worker claims."""
    return Model(FINGERPRINT, MODEL.groups, MODEL.chunk_tokens, max_context=max_context)


def prompt(ask: Ask) -> tuple[int, ...]:
    """The prompt's token ids."""
    return _stream(ask.prefix, ask.shared) + _stream(ask.name, ask.own)


def length(ask: Ask) -> int:
    """How many tokens it generates."""
    return ask.budget if ask.length < 0 else ask.length


def token(ask: Ask, index: int) -> int:
    """The token at `index` of its output."""
    if index == length(ask) - 1 and index + 1 < ask.budget:
        return STOP
    return 2_000 + (crc32(ask.name.encode()) % 997 * 31 + index * 7) % 997


def tokens(ask: Ask, start: int, end: int) -> tuple[int, ...]:
    """Its output from `start` to `end`."""
    return tuple(token(ask, index) for index in range(start, end))


def finish(ask: Ask) -> FinishReason:
    """Why it ends."""
    return FinishReason.STOP if length(ask) < ask.budget else FinishReason.LENGTH


@lru_cache(maxsize=4_096)
def _stream(name: str, count: int) -> tuple[int, ...]:
    base = crc32(name.encode()) % 49_999
    return tuple(3_000 + (base * 17 + index * 31) % 47_000 for index in range(count))


@lru_cache(maxsize=64)
def root() -> str:
    """The parent of every chain's first chunk."""
    return chains.root(FINGERPRINT, SALT)


@lru_cache(maxsize=8_192)
def chain(tokens_: tuple[int, ...]) -> chains.Chain:
    """The chain of a sequence."""
    return chains.plan(root(), tokens_)


@lru_cache(maxsize=8_192)
def names(tokens_: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
    """(end, name) of every boundary of a sequence that can be named: its chunks' ends, and tails behind the last."""
    found = chain(tokens_)
    return tuple((node.end, node.hash) for node in (*found.chunks, *found.tails()))


@lru_cache(maxsize=8_192)
def nodes(tokens_: tuple[int, ...]) -> tuple[chains.Node, ...]:
    """What is checkpointed of a sequence: its chunks and its longest tail."""
    return chain(tokens_).nodes


def request(ask: Ask, delivered: tuple[int, ...], deadline_ms: int) -> GenerationRequest:
    """The request as ingress submits it with what has been delivered already."""
    return GenerationRequest(
        request_id=ask.name,
        model=ask.model,
        tokens=prompt(ask) + delivered,
        output_start=ask.shared + ask.own,
        max_new_tokens=ask.budget - len(delivered),
        tenant=ask.tenant,
        tenant_salt=SALT,
        stop_token_ids=(STOP,),
        deadline_ms=max(1, deadline_ms),
        priority=ask.priority,
    )
