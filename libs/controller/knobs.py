"""Every number the controller's behaviour depends on, with unit and default. Values, not settings: shells fill them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterKnobs:
    """The router machine's."""

    offer_timeout_ms: float = 500.0  # an offer not answered by then is cancelled and the next candidate tried
    default_deadline_ms: float = 600_000.0  # of a request that brings none
    offers_unanswered: int = 8  # offers one worker process may leave unanswered; more requests for it are held
    attempts: int = 6  # attempts that failed (declines for want of capacity and offers nobody answered apart) after
    # which the request fails
    worker_losses: int = 2  # losses of its worker after which a request fails with its id; unanswered offers count half
    drop_window_ms: float = 2_000.0  # a route dropped this shortly before its process was lost was lost with it
    prompt_crashes: int = 2  # crashes with one whole prompt outstanding after which the prompt rests
    prompt_rest_ms: float = 600_000.0  # how long it rests; also how long a crash is remembered
    prompts_remembered: int = 4_096  # prompts with a crash on record; the oldest is forgotten
    queue: int = 1_024  # requests waiting for capacity, all tenants
    queue_per_tenant: int = 128
    wake_passes: int = 16  # waiters one freed slot may visit before it lapses
    retry_after_ms: int = 1_000  # told to a requester refused for overload or lack of workers
    tenant_weights: tuple[tuple[str, float], ...] = ()  # shares of the queue; absent = 1.0
    ranked_recorded: int = 64  # candidates kept of a plan, and recorded


@dataclass(frozen=True, slots=True)
class WorkerKnobs:
    """The worker machine's."""

    max_control_tasks: int = 64  # assignments under way; beyond it QUEUE_FULL
    queue_margin_ratio: float = 0.5  # QUEUE_LONGER: real queue above predicted by more than the larger of
    queue_margin_ms: float = 200.0  # the two
    attempts_remembered: int = 8_192  # requests whose highest attempt is known after they ended (duplicates)


@dataclass(frozen=True, slots=True)
class DiscoveryKnobs:
    """The discovery registry's."""

    heartbeat_ms: float = 1_000.0  # how often workers report
    expiry_ms: float = 5_000.0  # silence after which a worker is unavailable
    workers_remembered: int = 65_536  # worker ids whose newest epoch is known after they are gone


@dataclass(frozen=True, slots=True)
class PolicyKnobs:
    """Scoring's."""

    near_tie_ratio: float = 0.01  # candidates within this share or
    near_tie_ms: float = 2.0  # this many ms of the best (the larger) are ordered by rendezvous hash
    ranked: int = 16  # candidates kept after pruning
    correction_alpha: float = 0.01  # share of the sums of measured and predicted times that a new pair replaces
    correction_prior_ms: float = 1_000.0  # of right predictions that a worker is thought to have made before its first
    correction_prior_noise: float = 0.3  # by what share that is thought to be wrong all the same
    correction_doubt: float = 3.0  # standard deviations by which a worker must differ from its like to be believed
    correction_low: float = 0.6  # bounds of a correction
    correction_high: float = 1.6
    correction_floor_ms: float = 1.0  # predictions smaller than this teach nothing
    correction_most: float = 3.0  # times its prediction that a measured time counts at most
    way_window: int = 15  # attempts on a worker whose median way to it and back counts
    fixed_window: int = 15  # attempts of a model and tier whose median counts as what is fixed of their first tokens
    fixed_prior: int = 3  # of them that are thought to have been as usual before the first
    fixed_bound_ms: float = 100.0  # more than that, and than a first token's own time, is not believed
    cost_share: float = 0.05  # of what is believed of a worker's costs that a heartbeat replaces; more of the first few
    overload_queue_ms: float = 5_000.0  # a predicted queue above this freezes the corrections
    prefill_budget_tokens: int = 512  # prompt tokens of one iteration, for the stretch of prefill while lanes decode
    settle_ms: float = 10.0  # a heartbeat this long after an acceptance contains the assignment
    default_prefill_ms_per_token: float = 1.0  # of a worker that has measured nothing yet
    default_first_token_ms: float = 50.0
    default_bytes_per_ms: float = 1e6  # 1 GB/s, of a tier that has measured nothing yet
    default_latency_ms: float = 1.0
    considered: int = 32  # workers with something of the chain that are scored exactly, best by a bound
    considered_others: int = 12  # and of those without
    peers_named: int = 4  # peers with a chunk in memory that an offer names
    prefix_copies: int = 2  # workers that may compute one long prefix at a time; further requests with it are held
    hold_least_ms: float = 100.0  # computing time from which on a prefix is long enough to wait for
    hold_gain: float = 4.0  # by what factor it must exceed the time of reading the prefix from a peer
    deal_gain: float = 2.0  # by what factor it must exceed how much later than the best a worker is that is dealt one
    hold_grace_ms: float = 250.0  # patience beyond the predicted arrival: the copy to memory, and the word of it
    herd_least: int = 8  # requests with one new long prefix from which on more of them are dealt to all
    herd_ms: float = 5_000.0  # how long a prefix counts as new after it was first sent to a worker
    tail_parents: int = 4  # chunk ends after which resident tails are looked for


@dataclass(frozen=True, slots=True)
class FactKnobs:
    """The cache of chunk facts'."""

    nodes: int = 200_000  # chunk facts kept, least recently used first out
    replica_ttl_ms: float = 5_000.0  # chunks never change, their replicas do: asked again after this long
    idle_queue_ms: float = 50.0  # a worker with a longer queue is no reason not to ask where else a prefix lies


ROUTER_KNOBS = RouterKnobs()
WORKER_KNOBS = WorkerKnobs()
DISCOVERY_KNOBS = DiscoveryKnobs()
POLICY_KNOBS = PolicyKnobs()
FACT_KNOBS = FactKnobs()
