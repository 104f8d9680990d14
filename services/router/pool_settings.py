"""The tunnel pool's knobs as settings of the router: one for each field of `PoolPolicy`, `pool_` before its name.

Defaults and bounds are the policy's own. The one knob under another name is `vanish_grace_s`: `endpoint_grace_s`.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from typing import Any, Self

from pydantic import Field, model_validator

from libs.pool.knobs import FloorMode, NoCoverage, PickMode, PolicyError, PoolPolicy, StaleMode
from libs.service.settings import ServiceSettings

PREFIX = "pool_"

_DEFAULTS = {field.name: field.default for field in fields(PoolPolicy)}


def _knob(name: str, description: str) -> Any:
    default = _DEFAULTS[name]
    assert default is not MISSING, name
    return Field(default, description=description)


class PoolSettings(ServiceSettings):
    """Base of the router's settings."""

    pool_writers_per_endpoint: int = _knob("writers_per_endpoint", "Tunnels to each worker endpoint")
    pool_writers_max: int = _knob("writers_max", "Most tunnels that floors ask for together; 0: no limit")
    pool_writers_per_core_max: int = _knob("writers_per_core_max", "The same for each core; 0: no limit")
    pool_cores: int = Field(0, ge=0, description="Cores that are counted for that; 0: those the process may use")
    pool_survivability_min: int = _knob(
        "survivability_min", "Live tunnels of a cell (model and zone) that the pool never goes below by its own act"
    )
    pool_floor_mode: FloorMode = _knob("floor_mode", "static: always as many tunnels; adaptive: fewer while idle")
    pool_idle_writers_per_endpoint: int = _knob(
        "idle_writers_per_endpoint", "Tunnels to an endpoint that an idle cell shrinks to"
    )
    pool_idle_s: float = _knob("idle_s", "Seconds without requests after which a cell is idle")
    pool_recovery_grace_s: float = _knob(
        "recovery_grace_s", "Seconds without shrinking after a cell came back to life or stood in for another endpoint"
    )
    pool_max_connections: int = _knob("max_connections", "Assignments on all tunnels at once; 0: no ceiling")
    pool_route_items: int = _knob("route_items", "Messages that may wait for one assignment")
    pool_route_bytes: int = _knob("route_bytes", "Their bytes")
    pool_route_congested_s: float = _knob("route_congested_s", "Seconds of congestion after which a route is dropped")
    pool_keepalive_s: float = _knob("keepalive_s", "Seconds between two pings of a tunnel")
    pool_keepalive_jitter_s: float = _knob("keepalive_jitter_s", "Seconds by which that varies, either way")
    pool_degraded_ping_multiple: float = _knob(
        "degraded_ping_multiple", "Ping over its median from which a tunnel is degraded: taken last"
    )
    pool_degraded_clear_pings: int = _knob("degraded_clear_pings", "Good pings in a row that clear it")
    pool_connect_s: float = _knob("connect_s", "Longest time, in seconds, from a dial to the first frame")
    pool_fast_retries: int = _knob("fast_retries", "Failed dials in a row that are retried fast")
    pool_fast_retry_s: float = _knob("fast_retry_s", "Longest pause, in seconds, before one of those")
    pool_reconnect_min_s: float = _knob("reconnect_min_s", "First pause of the exponential backoff after them")
    pool_reconnect_max_s: float = _knob("reconnect_max_s", "Its ceiling, in seconds")
    pool_dials_per_cell: int = _knob("dials_per_cell", "Dials under way at once in a cell")
    pool_flap_s: float = _knob("flap_s", "Age in seconds under which a tunnel that broke has flapped")
    pool_flap_limit: int = _knob("flap_limit", "Flaps in a row that quarantine the endpoint")
    pool_quarantine_failures: int = _knob("quarantine_failures", "Failed dials in a row that do")
    pool_quarantine_s: float = _knob("quarantine_s", "Seconds of a quarantine")
    pool_outage_mode: bool = _knob(
        "outage_mode", "Dial the only endpoint of a cell with a short backoff and without quarantine"
    )
    pool_outage_reconnect_max_s: float = _knob("outage_reconnect_max_s", "Ceiling of that backoff, in seconds")
    pool_cell_refill: bool = _knob(
        "cell_refill", "Let other endpoints of a cell have more tunnels for one that cannot be reached"
    )
    pool_shadow_writers: int = _knob("shadow_writers", "Spare tunnels to the only endpoint of a cell")
    pool_shadow_rotation_s: float = _knob(
        "shadow_rotation_s", "Seconds after which one of its tunnels is replaced while there are spares; 0: never"
    )
    pool_probes: bool = _knob("probes", "Dial and ping endpoints that rest or have no tunnels")
    pool_probe_interval_s: float = _knob("probe_interval_s", "Seconds between two probes of an endpoint")
    pool_replace_degraded_s: float = _knob(
        "replace_degraded_s", "Seconds after which a degraded tunnel is replaced; 0: never"
    )
    pool_drain_ttl_s: float = _knob("drain_ttl_s", "Seconds after which a draining tunnel is warned about")
    pool_force_close_s: float = _knob(
        "force_close_s", "Seconds after which it is closed, at least drain_ttl_s; 0: after 300 s"
    )
    pool_drain_threshold: int = _knob("drain_threshold", "Draining tunnels of a cell past which the oldest are closed")
    pool_close_covered: bool = _knob(
        "close_covered", "Close at once what a new generation covers, so that its streams are resumed; else it drains"
    )
    pool_min_fresh_ratio: float = _knob("min_fresh_ratio", "Share of the map that a new generation has to cover")
    pool_stale_mode: StaleMode = _knob(
        "stale_mode", "Whether the rest is left to old tunnels: never, for stale_ttl_s (ttl), always"
    )
    pool_stale_ttl_s: float = _knob("stale_ttl_s", "Seconds for which it is, with ttl")
    pool_pending_ttl_s: float = _knob("pending_ttl_s", "Seconds after which a generation that waits for cover expires")
    pool_reinit_interval_s: float = _knob("reinit_interval_s", "Seconds between two periodic generations; 0: none")
    pool_reinit_jitter: float = _knob("reinit_jitter", "Share of that by which it varies, either way")
    pool_map_stable_snapshots: int = _knob("map_stable_snapshots", "Equal maps in a row before a new one is taken")
    pool_map_coalesce_s: float = _knob("map_coalesce_s", "Seconds within which changes of the map are one")
    pool_map_unsettled_s: float = _knob("map_unsettled_s", "Seconds after which a map that keeps changing is taken")
    pool_pick_mode: PickMode = _knob("pick_mode", "Choice among a worker's tunnels: round-robin or two-choices")
    pool_pick_sample: int = _knob("pick_sample", "Tunnels sampled for two-choices")
    pool_required_cells: tuple[str, ...] = _knob(
        "required_cells", "Cells, as FINGERPRINT@ZONE, without which the router is not ready; none: those of the map"
    )
    pool_serve_partial: bool = _knob("serve_partial", "Serve the cells that are covered while others are not")
    pool_partial_after_s: float = _knob("partial_after_s", "Seconds at the start for which all cells are waited for")
    pool_no_coverage: NoCoverage = _knob(
        "no_coverage", "A request that no tunnel can take: hold it, make a call of its own (direct), or fail it"
    )
    pool_no_coverage_wait_s: float = Field(
        60.0, ge=0, description="Longest time, in seconds, that it is held: a worker's restart and more"
    )
    pool_hold_max: int = _knob("hold_max", "Requests held at once")

    @model_validator(mode="after")
    def _policy_is_possible(self) -> Self:
        try:
            self.pool_policy()
        except PolicyError as error:
            raise ValueError(f"{PREFIX}{error.field}: {error}") from None
        return self

    @property
    def pool_grace_s(self) -> float:
        """See PoolPolicy.vanish_grace_s."""
        return PoolPolicy().vanish_grace_s

    def pool_policy(self) -> PoolPolicy:
        """The pool's numbers. Raises PolicyError."""
        given = {name: getattr(self, PREFIX + name) for name in _DEFAULTS if name not in ("cores", "vanish_grace_s")}
        return PoolPolicy(
            **given, cores=self.pool_cores or len(os.sched_getaffinity(0)), vanish_grace_s=self.pool_grace_s
        )
