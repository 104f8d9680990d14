"""Settings of the router; see libs.service.settings for where they may be given."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from libs.controller.knobs import DiscoveryKnobs, FactKnobs, RouterKnobs
from libs.service.settings import Address
from services.router.pool_settings import PoolSettings


class RouterSettings(PoolSettings):
    """The router: assigns each request to one worker at a time."""

    service: ClassVar[str] = "router"

    listen: Address = Field("127.0.0.1:7000", description="Address of the Router service; port 0 takes any free one")
    catalog: Address = Field(description="Catalog as HOST:PORT")
    catalog_wait_s: float = Field(
        30.0, gt=0, le=3_600, description="Seconds the catalog may stay away at the start before that is an error"
    )
    endpoint_grace_s: float = Field(
        30.0,
        ge=0,
        le=3_600,
        description="Seconds a worker that vanished from the endpoint map keeps its healthy tunnels: twice the "
        "catalog's lease_ttl_s",
    )
    heartbeat_expiry_s: float = Field(
        5.0, ge=0.1, le=600, description="Seconds without a heartbeat after which a worker counts as lost"
    )
    offer_timeout_ms: float = Field(
        500.0, ge=1, le=60_000, description="Longest wait for the answer to an offer, in ms, before the next candidate"
    )
    offers_unanswered: int = Field(
        8, ge=1, le=10_000, description="Offers one worker may leave unanswered; more requests for it are held"
    )
    lookup_budget_ms: float = Field(
        50.0, ge=0, le=10_000, description="Longest wait for the catalog's chunk facts, in ms, before deciding without"
    )
    names_refresh_s: float = Field(
        5.0, gt=0, le=300, description="Seconds between two looks at what the served names in use stand for"
    )
    default_deadline_s: float = Field(
        600.0, gt=0, le=86_400, description="Longest time, in seconds, of a request that brings no deadline"
    )
    attempts: int = Field(
        6,
        ge=1,
        le=100,
        description="Attempts that failed without progress before a request fails; an offer nobody answered is none",
    )
    worker_losses: int = Field(
        2, ge=1, le=100, description="Workers a request may lose before it fails; also the crashes that rest a prompt"
    )
    prompt_rest_s: float = Field(
        600.0, ge=0, le=86_400, description="Seconds a prompt rests that was outstanding when its workers were lost"
    )
    queue: int = Field(1_024, ge=0, description="Requests that may wait for capacity")
    queue_per_tenant: int = Field(128, ge=0, description="Of them, of one tenant")
    max_requests: int = Field(0, ge=0, description="Requests taken at once from all ingresses; 0: no ceiling")
    facts: int = Field(200_000, ge=0, description="Chunk facts remembered; the least recently used goes first")
    decisions_queue: int = Field(
        10_000, ge=0, description="Decisions that may wait to be appended at the catalog; the oldest goes; 0: none is"
    )
    decisions_interval_s: float = Field(
        5.0, ge=0, le=3_600, description="Longest wait, in seconds, of a decision before its batch is appended"
    )
    decisions_kept: int = Field(4_096, ge=0, description="Decisions kept in memory; the oldest goes first")

    @property
    def pool_grace_s(self) -> float:
        """See PoolSettings."""
        return self.endpoint_grace_s

    def router_knobs(self) -> RouterKnobs:
        """The machine's numbers."""
        return RouterKnobs(
            offer_timeout_ms=self.offer_timeout_ms,
            offers_unanswered=self.offers_unanswered,
            default_deadline_ms=self.default_deadline_s * 1_000,
            attempts=self.attempts,
            worker_losses=self.worker_losses,
            prompt_crashes=self.worker_losses,
            prompt_rest_ms=self.prompt_rest_s * 1_000,
            queue=self.queue,
            queue_per_tenant=self.queue_per_tenant,
        )

    def discovery_knobs(self) -> DiscoveryKnobs:
        """The discovery registry's numbers."""
        return DiscoveryKnobs(expiry_ms=self.heartbeat_expiry_s * 1_000)

    def fact_knobs(self) -> FactKnobs:
        """The fact cache's numbers."""
        return FactKnobs(nodes=self.facts)
