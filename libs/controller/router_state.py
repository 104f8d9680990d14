"""What a router machine remembers of one request. Mutable, owned by the machine alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from libs.controller.fair_queue import Waiter
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    FinishReason,
    GenerationRequest,
    RankedCandidate,
    Served,
    Tier,
    Timings,
    Usage,
)
from libs.controller.router_effects import AttemptRecord, Decision
from libs.controller.router_events import Herd, Obstacle, Plan
from libs.controller.router_table import Phase

NO_USAGE, NO_TIMINGS, NO_PLAN = Usage(), Timings(), Plan()


@dataclass(slots=True)
class Attempt:
    """The active attempt."""

    assignment: AssignmentId
    choice: int  # index into the plan's ranked candidates
    candidate: Candidate
    offered_ms: float
    delivered: int = 0  # tokens this attempt has delivered
    first_delta_ms: float | None = None  # after the offer
    usage: Usage = NO_USAGE
    timings: Timings = NO_TIMINGS


@dataclass(slots=True)
class RequestState:
    """One live request."""

    request: GenerationRequest  # as submitted
    origin: int
    arrival: int
    deadline_at_ms: float
    prompt: str  # hash of the whole prompt
    base: int  # generated tokens that were delivered elsewhere before; they end request.tokens
    fingerprint: str = ""  # pinned from the first delta on; "" = any
    phase: Phase = Phase.PLANNING
    generated: list[int] = field(default_factory=list)  # delivered here, in all attempts
    attempt_number: int = 0
    spent: int = 0  # attempts that failed since the last progress, capacity declines apart
    losses: int = 0
    blame: float = 0.0  # the losses, each by how much it speaks against this request
    avoid: tuple[str, ...] = ()  # workers that failed this request lately
    active: Attempt | None = None
    last: Attempt | None = None  # the newest attempt, also once it is over
    last_failure: str = ""
    # the current plan
    plan_id: int = 0
    plan: Plan = NO_PLAN
    planned_ms: float = 0.0
    planned_at_index: int = 0  # generated tokens delivered when it was made
    planned_avoid: tuple[str, ...] = ()
    ranked: tuple[RankedCandidate, ...] = ()
    remaining: list[int] = field(default_factory=list)
    records: list[AttemptRecord] = field(default_factory=list)
    starved: bool = False  # every attempt of this plan was declined for want of capacity
    # the queue
    obstacle: Obstacle | None = None
    waiter: Waiter | None = None  # as it was taken, while a wake is being tried
    passes: int = 0  # further waiters its slot may visit
    admitted: bool = False  # has been offered before: not queued behind newcomers
    # held for a prefix
    herd: Herd | None = None  # since it was held first; the patience as of then
    held_at_ms: float = 0.0  # when that was
    held_ms: float = 0.0  # how long it has been held in all, as of the last plan
    # what the requester is told
    usage_base: Usage | None = None  # of the first attempt that delivered
    workers: tuple[str, ...] = ()
    tier: Tier = Tier.UNSPECIFIED

    @property
    def delivered(self) -> int:
        """Generated tokens the requester has, from here and elsewhere: also the next index."""
        return self.base + len(self.generated)

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - len(self.generated)

    def finished_early(self) -> FinishReason | None:
        """The reason, if what is delivered already is the whole generation (the result alone was lost)."""
        last = self.generated[-1] if self.generated else self.request.tokens[-1] if self.base else None
        if last is not None and last in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.budget <= 0 else None

    def attempt_request(self, now_ms: float) -> GenerationRequest:
        """The request as an attempt that starts now runs it: delivered tokens added, budget reduced."""
        return replace(
            self.request,
            tokens=self.request.tokens + tuple(self.generated),
            max_new_tokens=self.budget,
            deadline_ms=max(1, math.ceil(self.deadline_at_ms - now_ms)),
        )

    def usage(self) -> Usage:
        """The request's usage: its cost from the first attempt that delivered, generated = delivered."""
        prompt = self.request.output_start
        base = self.usage_base
        if base is None:
            return Usage(prompt_tokens=prompt, generated_tokens=self.delivered)
        cached = min(base.cached_tokens, prompt)
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            restored_tokens=min(base.restored_tokens, cached),
            computed_tokens=prompt - cached,
            generated_tokens=self.delivered,
            restored_by_tier=base.restored_by_tier,
        )

    def served(self) -> Served:
        """How it was served so far."""
        attempt = self.last
        if attempt is None:
            return Served()
        return Served(
            worker=attempt.candidate.worker,
            workers=self.workers,
            epoch=attempt.candidate.epoch,
            attempts=self.attempt_number,
            tier=self.tier if self.tier is not Tier.UNSPECIFIED else attempt.candidate.tier,
            timings=attempt.timings,
            predicted_ttft_ms=attempt.candidate.ttft_ms,
        )

    def decision(self) -> Decision:
        """The current plan and what came of it so far."""
        return Decision(
            request_id=self.request.request_id,
            plan_id=self.plan_id,
            tenant=self.request.tenant,
            model=self.request.model,
            prompt_tokens=self.request.output_start,
            resumed_at=self.planned_at_index,
            decided_ms=self.planned_ms,
            ranked=self.ranked,
            pruned=self.plan.pruned,
            attempts=tuple(self.records),
            avoid=self.planned_avoid,
            revision=self.plan.revision,
            draw=self.plan.draw,
            held_ms=self.held_ms,
        )
