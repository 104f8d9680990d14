"""One choice from its token ids to its text: what chat and completions have in common."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from libs.contracts.segue.v1.common_pb2 import GenerationRequest, Sampling
from libs.service import telemetry
from services.ingress.choice_text import ChoiceText
from services.ingress.errors import ApiError, bad_request, context_exceeded
from services.ingress.metrics import RequestMetrics
from services.ingress.model_directory import ServedModel
from services.ingress.schemas import GenerationBody
from services.ingress.tenants import Tenant
from services.ingress.upstream import Outcome, Upstream

Show = Callable[[str], Awaitable[None]]
"""Given new text of the choice."""

# Zero means "off" on the wire; this keeps exactly the most likely token, which is what top_p 0 asks for.
_SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True)
class Choice:
    """A choice to be generated."""

    request: GenerationRequest
    text: ChoiceText
    prompt_ids: Sequence[int] = field(repr=False)
    spliced: int = 0
    """How many prompt ids came from the turn memo."""


@dataclass(frozen=True)
class Generated:
    """A generated choice."""

    choice: Choice
    outcome: Outcome
    ttft_ms: float
    """From the submission to the first token, as seen here."""
    total_ms: float

    @property
    def prompt_tokens(self) -> int:
        return len(self.choice.prompt_ids)

    @property
    def cached_tokens(self) -> int:
        usage = self.outcome.usage
        return 0 if usage is None else min(usage.cached_tokens, self.prompt_tokens)

    @property
    def completion_tokens(self) -> int:
        """Up to the token that ended the text, that one included."""
        return len(self.choice.text.ids)


@dataclass(frozen=True)
class Origin:
    """Where a request comes from."""

    request_id: str
    tenant: Tenant
    deadline_s: float


def plan(
    body: GenerationBody,
    budget: int | None,
    default_budget: int,
    model: ServedModel,
    origin: Origin,
    ids: Sequence[int],
    stop_ids: Sequence[int],
    *,
    index: int = 0,
    budget_param: str = "max_tokens",
    spliced: int = 0,
) -> Choice:
    """A choice's request. Raises ApiError (400): empty prompt, or prompt and budget over the context."""
    if not ids:
        raise bad_request("The prompt is empty.", "prompt", "invalid_value")
    room = model.max_context - len(ids)
    if budget is None:
        budget = min(default_budget, max(room, 1))
    if budget > room:
        raise context_exceeded(model.max_context, len(ids), budget, budget_param)
    request = GenerationRequest(
        request_id=origin.request_id if index == 0 else f"{origin.request_id}-{index}",
        tenant=origin.tenant.id,
        tenant_salt=origin.tenant.salt,
        model=model.name,
        tokens=ids,
        output_start=len(ids),
        max_new_tokens=budget,
        sampling=_sampling(body),
        stop_token_ids=stop_ids,
        deadline_ms=int(origin.deadline_s * 1_000),
    )
    return Choice(request, ChoiceText(model.text.bytes_of, body.stops, stop_ids), ids, spliced)


async def generate(upstream: Upstream, choice: Choice, show: Show, metrics: RequestMetrics) -> Generated:
    """Runs one choice to its end. Raises ApiError, or what `show` raises."""
    clock = asyncio.get_running_loop().time
    started = clock()
    first: float | None = None
    last = started

    async def take(tokens: Sequence[int]) -> bool:
        nonlocal first, last
        now = clock()
        if first is None:
            first = now
            metrics.ttft.observe(now - started)
        else:
            # Tokens that came together share the time since the last ones.
            metrics.inter_token.observe((now - last) / len(tokens))
        last = now
        text = choice.text.feed(tokens)
        if text:
            await show(text)
        return choice.text.stop_string is None

    with telemetry.span("generate", {"segue.request_id": choice.request.request_id}) as span:
        choice.request.trace.traceparent, choice.request.trace.tracestate = telemetry.inject()
        outcome = await upstream.run(choice.request, take)
        rest = choice.text.finish()
        if rest:
            await show(rest)
        span.set_attribute("segue.generated_tokens", len(choice.text.ids))
        span.set_attribute("segue.routers", outcome.routers)
    done = Generated(choice, outcome, 1_000 * ((first or clock()) - started), 1_000 * (clock() - started))
    metrics.counters.prompt_tokens += done.prompt_tokens
    metrics.counters.cached_tokens += done.cached_tokens
    metrics.counters.completion_tokens += done.completion_tokens
    return done


async def generate_all(
    upstream: Upstream, choices: Sequence[Choice], show: Callable[[int, str], Awaitable[None]], metrics: RequestMetrics
) -> list[Generated]:
    """Runs several choices at once; the first that fails ends all. `show` is never called twice at a time."""
    turn = asyncio.Lock()

    async def one(index: int, choice: Choice) -> Generated:
        async def show_this(text: str) -> None:
            async with turn:
                await show(index, text)

        return await generate(upstream, choice, show_this, metrics)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, choice)) for index, choice in enumerate(choices)]
    except BaseExceptionGroup as failed:
        told = next((error for error in failed.exceptions if isinstance(error, ApiError)), failed.exceptions[0])
        raise told from None
    return [task.result() for task in tasks]


def _sampling(body: GenerationBody) -> Sampling:
    """OpenAI's defaults: temperature 1, top_p 1. A seed that is not given is drawn here, once for all attempts."""
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=secrets.randbits(64) if body.seed is None else body.seed & 0xFFFF_FFFF_FFFF_FFFF,
    )
