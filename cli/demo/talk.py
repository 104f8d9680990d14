"""A streaming client that measures: when the first text came, how long the longest silence was, who served it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, ConfigDict

# Cold prompts of a few thousand tokens take seconds on a small machine; nothing here may take minutes.
_WITHIN_S = 240.0

Pieces = Callable[[int], Awaitable[None]]
"""Awaited after each piece of text with how many have come; a piece holds at least one token."""


class TierShare(BaseModel):
    """What came from one tier."""

    tokens: int
    bytes: int


class Served(BaseModel):
    """The `segue` object of an answer."""

    model_config = ConfigDict(extra="ignore")

    request_id: str
    worker: str
    workers: list[str]
    epoch: int
    attempts: int
    tier: str
    predicted_ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    computed_tokens: int
    restored_by_tier: dict[str, TierShare]
    prompt_token_ids: list[int]
    token_ids: list[int]


class StreamBrokenError(RuntimeError):
    """The stream ended with an error, or without its end marker."""


@dataclass(frozen=True)
class Answer:
    """One answer as a client saw it. Times in ms."""

    text: str
    finish_reason: str
    ttft_ms: float
    gap_ms: float
    """Longest silence between two pieces."""
    tokens_per_s: float
    """After the first piece."""
    served: Served

    @property
    def processed(self) -> list[int]:
        """The tokens whose attention state exists: all but the last one."""
        return (self.served.prompt_token_ids + self.served.token_ids)[:-1]


class Talker:
    """A client of one cluster."""

    def __init__(self, base_url: str, model: str, http: httpx.AsyncClient) -> None:
        self.model = model
        self._base_url = base_url
        self._http = http

    async def chat(self, messages: list[dict[str, str]], max_tokens: int, pieces: Pieces | None = None) -> Answer:
        """A greedy chat turn."""
        return await self._stream("/chat/completions", {"messages": messages, "max_tokens": max_tokens}, pieces)

    async def complete(self, ids: list[int], max_tokens: int, pieces: Pieces | None = None) -> Answer:
        """A greedy continuation of token ids."""
        return await self._stream("/completions", {"prompt": ids, "max_tokens": max_tokens}, pieces)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        url = self._base_url.removesuffix("/v1") + "/tokenize"
        reply = await self._http.post(url, json={"model": self.model, "prompt": text}, timeout=30)
        reply.raise_for_status()
        return [int(token) for token in reply.json()["tokens"]]

    async def _stream(self, path: str, body: dict[str, object], pieces: Pieces | None) -> Answer:
        body = {
            "model": self.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        text, finish, served, ended = "", "", None, False
        began = time.perf_counter()
        arrivals: list[float] = []
        headers = {"x-segue-token-ids": "1"}
        async with self._http.stream(
            "POST", self._base_url + path, json=body, headers=headers, timeout=_WITHIN_S
        ) as reply:
            if reply.status_code != 200:
                raise StreamBrokenError(f"HTTP {reply.status_code}: {(await reply.aread()).decode(errors='replace')}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise StreamBrokenError(event["error"]["message"])
                served = Served.model_validate(event["segue"]) if event.get("segue") else served
                for choice in event["choices"]:
                    finish = choice["finish_reason"] or finish
                    piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                    if piece:
                        arrivals.append(time.perf_counter())
                        text += piece
                        if pieces is not None:
                            await pieces(len(arrivals))
        if not ended or served is None or not arrivals:
            raise StreamBrokenError(f"the stream ended early, after {len(arrivals)} pieces")
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        span = arrivals[-1] - arrivals[0]
        return Answer(
            text=text,
            finish_reason=finish,
            ttft_ms=(arrivals[0] - began) * 1e3,
            gap_ms=max(gaps, default=0.0) * 1e3,
            tokens_per_s=(len(served.token_ids) - 1) / span if span > 0 else 0.0,
            served=served,
        )
