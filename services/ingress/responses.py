"""The OpenAI API's objects, built. Segue's own addition is the object `segue`, which tells how a request was served;
clients that do not know it ignore it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from libs.contracts.segue.v1.common_pb2 import Tier
from services.ingress.generation import Generated

Json = dict[str, Any]
Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class Envelope:
    """What all objects of one response share."""

    kind: Kind
    id: str
    model: str
    created: int

    def whole(self, generated: Sequence[Generated], segue: object) -> Json:
        """The body of an answer that is not streamed."""
        choices = [self._choice(index, one) for index, one in enumerate(generated)]
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._object(name, choices) | {"usage": usage(generated), "segue": segue}

    def opening(self, index: int) -> Json:
        """A chat stream begins by saying whose turn it is."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> Json:
        return self._chunk(index, {"content": text} if self.kind == "chat" else text, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self._chunk(index, {} if self.kind == "chat" else "", finish_reason)

    def final_usage(self, generated: Sequence[Generated], segue: object) -> Json:
        """The last object of a stream that was asked for usage: no choices."""
        return self._object(self._chunk_name, []) | {"usage": usage(generated), "segue": segue}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _object(self, name: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, one: Generated) -> Json:
        text = one.choice.text
        said: Json = (
            {"message": {"role": "assistant", "content": text.text}} if self.kind == "chat" else {"text": text.text}
        )
        return {"index": index, **said, "logprobs": None, "finish_reason": text.finish_reason}

    def _chunk(self, index: int, content: Json | str, finish_reason: str | None) -> Json:
        said = {"delta": content} if self.kind == "chat" else {"text": content}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        return self._object(self._chunk_name, [choice])


def usage(generated: Sequence[Generated]) -> Json:
    """Of all choices together."""
    prompt = sum(one.prompt_tokens for one in generated)
    completion = sum(one.completion_tokens for one in generated)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in generated)},
    }


def served(generated: Sequence[Generated], with_ids: bool) -> Json | list[Json]:
    """The `segue` object: of the one choice, or a list of one object a choice."""
    objects = [_served(one, with_ids) for one in generated]
    return objects[0] if len(objects) == 1 else objects


def _served(one: Generated, with_ids: bool) -> Json:
    read, by = one.outcome.usage, one.outcome.served
    told: Json = {
        "request_id": one.choice.request.request_id,
        "routers": one.outcome.routers,
        "ttft_ms": round(one.ttft_ms, 3),
        "total_ms": round(one.total_ms, 3),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "restored_tokens": read.restored_tokens if read is not None else 0,
        "computed_tokens": read.computed_tokens if read is not None else 0,
        "restored_by_tier": {
            tier_name(part.tier): {"tokens": part.tokens, "bytes": part.bytes}
            for part in (read.restored_by_tier if read is not None else ())
        },
        "spliced_tokens": one.choice.spliced,
    }
    if by is not None:
        times = by.timings
        told |= {
            "worker": by.worker,
            "workers": list(by.workers),
            "epoch": by.epoch,
            "attempts": by.attempts,
            "tier": tier_name(by.tier),
            "predicted_ttft_ms": round(by.predicted_ttft_ms, 3),
            "timings": {
                "queue_ms": round(times.queue_ms, 3),
                "restore_ms": round(times.restore_ms, 3),
                "prefill_ms": round(times.prefill_ms, 3),
                "first_token_ms": round(times.first_token_ms, 3),
                "ttft_ms": round(times.ttft_ms, 3),
            },
        }
    if with_ids:
        told |= {"prompt_token_ids": list(one.choice.prompt_ids), "token_ids": one.choice.text.ids}
    return told


def tier_name(tier: Tier) -> str:
    """TIER_SSD → `ssd`."""
    return Tier.Name(tier).removeprefix("TIER_").lower()
