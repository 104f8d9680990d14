"""The pool's knobs as a tunnel's configuration."""

from __future__ import annotations

from dataclasses import replace

from libs.tunnel import ChannelLimits, TunnelConfig

from .knobs import PoolPolicy


def tunnel_config(policy: PoolPolicy, base: TunnelConfig) -> TunnelConfig:
    """``base`` with everything in it that is a knob of the pool; high watermarks stay three quarters of the bounds."""
    return replace(
        base,
        ping_interval_s=policy.keepalive_s,
        ping_jitter_s=policy.keepalive_jitter_s,
        route=ChannelLimits(
            max_items=policy.route_items,
            max_bytes=policy.route_bytes,
            high_items=policy.route_items * 3 // 4,
            high_bytes=policy.route_bytes * 3 // 4,
            congested_s=policy.route_congested_s,
        ),
        health=replace(
            base.health, ping_multiple=policy.degraded_ping_multiple, good_to_clear=policy.degraded_clear_pings
        ),
    )
