"""Every number the pool's behaviour depends on, with unit and default. All of them can be changed while it runs.

A change is one event (``SetPolicy``) with a whole new ``PoolPolicy``; it never breaks a bound session. Names ending in
``_s`` are seconds. Fields under *strategies* are ways of retrying and recovering that can each be switched off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .model import Cell


class FloorMode(StrEnum):
    """How many tunnels an endpoint should have: always the configured count, or by activity."""

    STATIC = "static"
    ADAPTIVE = "adaptive"


class StaleMode(StrEnum):
    """Whether a generation may leave a cell-family to tunnels of the one before: no, for a while, until covered."""

    NEVER = "never"
    TTL = "ttl"
    ALWAYS = "always"


class PickMode(StrEnum):
    """How a tunnel is chosen among equals."""

    ROUND_ROBIN = "round-robin"
    TWO_CHOICES = "two-choices"


class NoCoverage(StrEnum):
    """What becomes of a bind that no tunnel can take: wait, go round the pool, or be refused at once."""

    HOLD = "hold"
    DIRECT = "direct"
    FAIL = "fail"


class PolicyError(ValueError):
    """A policy that cannot be: names the field, its value and what it must be."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"pool policy: {field} = {value!r} must be {rule}")
        self.field = field


FORCE_CLOSE_FALLBACK_S = 300.0
"""What a force-close deadline of zero stands for."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """See the module. Raises PolicyError."""

    # --- how many tunnels ---
    writers_per_endpoint: int = 2  # the static requirement
    writers_max: int = 0  # ceiling on floors, all endpoints together; 0 = none
    writers_per_core_max: int = 64  # the same for each core; 0 = none
    cores: int = 1  # cores this process may use
    survivability_min: int = 1  # live tunnels a cell never goes below by the pool's own act
    floor_mode: FloorMode = FloorMode.ADAPTIVE
    idle_writers_per_endpoint: int = 1  # what an idle cell shrinks to
    idle_s: float = 90.0  # a cell without routes and binds for this long is idle
    recovery_grace_s: float = 180.0  # after a cell came back to life, or stood in for another endpoint, no shrinking
    max_connections: int = 0  # open routes; 0 = no ceiling (and no budget is lifted by it)
    # --- one tunnel ---
    route_items: int = 768  # payloads that may wait in a route's channel
    route_bytes: int = 8 << 20  # and their bytes
    route_congested_s: float = 2.0  # congestion past this drops the route
    keepalive_s: float = 8.0
    keepalive_jitter_s: float = 2.0  # either way
    degraded_ping_multiple: float = 4.0  # of the median
    degraded_clear_pings: int = 3  # good ones in a row
    # --- dialling ---
    connect_s: float = 3.0  # from the dial to the first frame
    fast_retries: int = 16  # failures in a row that are retried fast
    fast_retry_s: float = 0.2  # longest pause before one of those (full jitter)
    reconnect_min_s: float = 0.5  # first pause of the exponential backoff (full jitter)
    reconnect_max_s: float = 30.0  # its ceiling
    dials_per_cell: int = 8  # at once
    flap_s: float = 20.0  # a tunnel that broke younger than this flapped
    flap_limit: int = 2  # flaps in a row that quarantine the endpoint
    quarantine_failures: int = 24  # failed dials in a row that do
    quarantine_s: float = 25.0
    # --- strategies ---
    outage_mode: bool = True  # the only endpoint of a cell: short backoff, no quarantine
    outage_reconnect_max_s: float = 2.0  # ceiling of its backoff
    cell_refill: bool = True  # other endpoints of a cell stand in for one that cannot be reached
    shadow_writers: int = 0  # spare tunnels to the only endpoint of a cell
    shadow_rotation_s: float = 900.0  # how often one of its tunnels is replaced while there are spares; 0 = never
    probes: bool = True  # dial and ping endpoints that are quarantined or unused
    probe_interval_s: float = 60.0
    replace_degraded_s: float = 0.0  # a tunnel degraded for this long is replaced; 0 = never
    # --- draining ---
    drain_ttl_s: float = 90.0  # warns, and is the lower bound of the deadline
    force_close_s: float = 0.0  # deadline of a draining tunnel; 0 = 300 s
    drain_threshold: int = 32  # draining tunnels of a cell past which the oldest are closed
    close_covered: bool = False  # a commit closes what it covers at once, instead of letting it drain
    # --- generations ---
    min_fresh_ratio: float = 0.8  # covered share of cell-families, and of endpoints, that a commit needs
    stale_mode: StaleMode = StaleMode.TTL
    stale_ttl_s: float = 90.0
    pending_ttl_s: float = 1800.0
    reinit_interval_s: float = 900.0  # 0 = never
    reinit_jitter: float = 0.1  # share of the interval, either way
    # --- the map ---
    map_stable_snapshots: int = 2  # equal ones in a row before a map is taken
    map_coalesce_s: float = 0.2  # changes within this are one; also how often an unchanged source counts as read again
    map_unsettled_s: float = 10.0  # a map that changes all the time is taken as it stands after this long
    vanish_grace_s: float = 30.0  # 2 x the lease TTL: an endpoint that left the map without a drain keeps its tunnels
    # --- selection ---
    pick_mode: PickMode = PickMode.TWO_CHOICES
    pick_sample: int = 3
    # --- readiness and admission ---
    required_cells: tuple[Cell, ...] = ()  # must be covered before the pool is ready; () = all of the map
    serve_partial: bool = True  # serve covered cells while others are not
    partial_after_s: float = 10.0  # at the first start: how long all cells are waited for first
    no_coverage: NoCoverage = NoCoverage.HOLD
    no_coverage_wait_s: float = 5.0  # how long a bind is held
    hold_max: int = 1024  # binds held at once

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:  # also refuses not-a-number
                raise PolicyError(name, value, f"at least {least}")
        for name in ("min_fresh_ratio", "reinit_jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise PolicyError(name, getattr(self, name), "between 0 and 1")
        if self.idle_writers_per_endpoint > self.writers_per_endpoint:
            raise PolicyError(
                "idle_writers_per_endpoint", self.idle_writers_per_endpoint, "at most writers_per_endpoint"
            )
        if self.reconnect_max_s < self.reconnect_min_s:
            raise PolicyError("reconnect_max_s", self.reconnect_max_s, "at least reconnect_min_s")
        if self.keepalive_jitter_s > self.keepalive_s:
            raise PolicyError("keepalive_jitter_s", self.keepalive_jitter_s, "at most keepalive_s")
        kinds = {"floor_mode": FloorMode, "stale_mode": StaleMode, "pick_mode": PickMode, "no_coverage": NoCoverage}
        for name, kind in kinds.items():
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                raise PolicyError(name, getattr(self, name), f"one of {', '.join(kind)}") from None

    @property
    def force_close_after_s(self) -> float:
        """The effective deadline of a draining tunnel."""
        return max(self.drain_ttl_s, self.force_close_s or FORCE_CLOSE_FALLBACK_S)

    @property
    def cap(self) -> int | None:
        """Most tunnels that floors may ask for together."""
        caps = [cap for cap in (self.writers_max, self.writers_per_core_max * self.cores) if cap]
        return min(caps, default=None)


_LEAST: dict[str, float] = {
    "writers_per_endpoint": 1,
    "writers_max": 0,
    "writers_per_core_max": 0,
    "cores": 1,
    "survivability_min": 1,
    "idle_writers_per_endpoint": 1,
    "idle_s": 0,
    "recovery_grace_s": 0,
    "max_connections": 0,
    "route_items": 4,
    "route_bytes": 4096,
    "route_congested_s": 0,
    "keepalive_s": 0.01,
    "keepalive_jitter_s": 0,
    "degraded_ping_multiple": 1,
    "degraded_clear_pings": 1,
    "connect_s": 0.01,
    "fast_retries": 0,
    "fast_retry_s": 0,
    "reconnect_min_s": 0.001,
    "reconnect_max_s": 0.001,
    "dials_per_cell": 1,
    "flap_s": 0,
    "flap_limit": 1,
    "quarantine_failures": 1,
    "quarantine_s": 0,
    "outage_reconnect_max_s": 0.001,
    "shadow_writers": 0,
    "shadow_rotation_s": 0,
    "probe_interval_s": 0.01,
    "replace_degraded_s": 0,
    "drain_ttl_s": 0,
    "force_close_s": 0,
    "drain_threshold": 0,
    "stale_ttl_s": 0,
    "pending_ttl_s": 1,
    "reinit_interval_s": 0,
    "map_stable_snapshots": 1,
    "map_coalesce_s": 0.001,
    "map_unsettled_s": 0,
    "vanish_grace_s": 0,
    "pick_sample": 2,
    "partial_after_s": 0,
    "no_coverage_wait_s": 0,
    "hold_max": 0,
}
