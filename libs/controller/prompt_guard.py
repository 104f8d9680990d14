"""The query-of-death guard: a prompt that was outstanding at two crashes rests.

A prompt is known by the hash of the *whole* of it (and the model's name), so that a shared system prompt bans nobody
else. Only lost processes and silence count as crashes; each crash counts once per prompt, however many requests carried
it. A crash before the worker had answered counts for less: several workers that die together take along requests that
were just moved from one to the next. Memory is bounded: the prompt whose crash is longest ago is forgotten first.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from libs.controller.protocol import GenerationRequest


def prompt_hash(request: GenerationRequest) -> str:
    """Hex BLAKE3 over the model's name and the prompt (without what was generated), each field with its length."""
    model = request.model.encode()
    prompt = request.tokens[: request.output_start]
    hasher = blake3(len(model).to_bytes(4, "little") + model)
    hasher.update(struct.pack(f"<{len(prompt)}I", *prompt))
    return hasher.hexdigest()


class PromptGuard:
    """Crashes by prompt. Times in ms on the caller's clock."""

    def __init__(self, crashes: int, rest_ms: float, remembered: int) -> None:
        self._crashes = crashes
        self._rest_ms = rest_ms
        self._remembered = remembered
        self._seen: dict[str, tuple[float, float]] = {}  # prompt -> (crashes, time of the last); oldest first

    def crashed(self, prompt: str, now_ms: float, weight: float = 1.0) -> None:
        """The prompt was outstanding at a worker that crashed now; `weight`: how many crashes this counts as."""
        count, at_ms = self._seen.pop(prompt, (0.0, now_ms))
        if now_ms - at_ms >= self._rest_ms:
            count = 0.0
        self._seen[prompt] = (count + weight, now_ms)
        while len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]

    def rests_ms(self, prompt: str, now_ms: float) -> float:
        """How long the prompt still rests; 0 = it may run."""
        entry = self._seen.get(prompt)
        if entry is None:
            return 0.0
        count, at_ms = entry
        left = at_ms + self._rest_ms - now_ms
        if left <= 0:
            del self._seen[prompt]
            return 0.0
        return left if count >= self._crashes else 0.0

    def __len__(self) -> int:
        return len(self._seen)
