"""A streamed completion as the bytes of its events tell it: everything that must be there once is counted."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_WITHIN_S = 240.0

Piece = Callable[[str, int], Awaitable[None]]
"""Awaited after each piece of text, with the request's id and how many have come."""


@dataclass
class Seen:
    """One stream. `errors`: messages of error events, or of an answer that is no stream."""

    status: int = 0
    request_id: str = ""
    text: str = ""
    pieces: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    ends: int = 0
    """End marks."""
    errors: list[str] = field(default_factory=list)
    served: dict[str, Any] = field(default_factory=dict)
    """The `segue` object."""

    @property
    def tokens(self) -> list[int]:
        return list(self.served.get("token_ids", ()))

    @property
    def attempts(self) -> int:
        return int(self.served.get("attempts", 0))

    @property
    def routers(self) -> int:
        return int(self.served.get("routers", 0))

    def faults(self, prompt: Sequence[int]) -> list[str]:
        """What is not as a client may count on it: one end of each kind, and a usage that adds up."""
        wrong = [f"said {error}" for error in self.errors]
        if self.status != 200 or self.ends != 1:
            wrong.append(f"HTTP {self.status}, {self.ends} end marks")
        if len(self.finish_reasons) != 1:
            wrong.append(f"finish reasons {self.finish_reasons}")
        if len(self.usages) != 1:
            return [*wrong, f"{len(self.usages)} usages"]
        usage, read = self.usages[0], self.served
        wanted = {
            "prompt_tokens": len(prompt), "completion_tokens": len(self.tokens),
            "total_tokens": len(prompt) + len(self.tokens),
        }  # fmt: skip
        wrong += [f"{name} {usage[name]}, not {value}" for name, value in wanted.items() if usage[name] != value]
        if read["cached_tokens"] + read["computed_tokens"] != len(prompt):
            wrong.append(f"{read['cached_tokens']} cached and {read['computed_tokens']} computed of {len(prompt)}")
        return wrong


async def stream(
    http: httpx.AsyncClient, base_url: str, model: str, ids: Sequence[int], body: Mapping[str, object],
    piece: Piece | None = None,
) -> Seen:  # fmt: skip
    """A completion of token ids, read to its end. `body`: what else is asked for."""
    asked = {
        "model": model, "prompt": list(ids), "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **body,
    }  # fmt: skip
    seen = Seen()
    headers = {"x-segue-token-ids": "1"}
    async with http.stream("POST", base_url + "/completions", json=asked, headers=headers, timeout=_WITHIN_S) as reply:
        seen.status, seen.request_id = reply.status_code, reply.headers.get("x-request-id", "")
        if reply.status_code != 200:
            seen.errors.append(_message(await reply.aread()))
            return seen
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                seen.ends += 1
            elif line.startswith("data: "):
                await _take(seen, json.loads(line.removeprefix("data: ")), piece)
    return seen


async def _take(seen: Seen, event: Mapping[str, Any], piece: Piece | None) -> None:
    if "error" in event:
        seen.errors.append(event["error"]["message"])
        return
    if event.get("usage"):
        seen.usages.append(event["usage"])
    seen.served = event.get("segue") or seen.served
    for choice in event["choices"]:
        if choice["finish_reason"]:
            seen.finish_reasons.append(choice["finish_reason"])
        if choice["text"]:
            seen.text += choice["text"]
            seen.pieces += 1
            if piece is not None:
                await piece(seen.request_id, seen.pieces)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
