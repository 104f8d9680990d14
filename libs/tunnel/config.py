"""Bounds and timings of a tunnel. All sizes in bytes, all times in seconds."""

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Bounds of one route channel.

    Past ``high_items`` or ``high_bytes`` the channel is congested and waiting payloads are merged; a channel that stays
    congested for ``congested_s`` without its consumer getting it below half of both marks drops its route, and so
    does a payload that fits neither by merging nor by appending.
    """

    max_items: int = 768
    max_bytes: int = 8 * _MIB
    high_items: int = 576
    high_bytes: int = 6 * _MIB
    congested_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.high_items <= self.max_items or not 0 < self.high_bytes <= self.max_bytes:
            raise ValueError(f"a high watermark must lie in (0, maximum]: {self}")
        if self.congested_s < 0:
            raise ValueError(f"congested_s must not be negative: {self.congested_s}")


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When a tunnel counts as degraded, and when as lost.

    ``ping_floor_s`` keeps sub-millisecond medians from calling scheduling noise slow.
    """

    ping_multiple: float = 4.0
    ping_floor_s: float = 0.05
    min_samples: int = 3
    good_to_clear: int = 3
    stall_s: float = 1.0
    pong_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TunnelConfig:
    """Everything a tunnel needs to know; the two ends need not agree except on ``max_frame_bytes`` and ``max_items``.

    ``max_frame_bytes`` stays under gRPC's default message limit of 4 MiB. The window bounds data and close frames
    sent and not yet acknowledged; ``ack_every`` frames or ``ack_delay_s`` after the first, whichever is sooner, an
    acknowledgement is sent, so a window must hold what one round trip plus that delay can carry.
    """

    max_frame_bytes: int = 4 * _MIB - 65536
    max_items: int = 4096
    command_items: int = 4096
    command_bytes: int = 16 * _MIB
    window_frames: int = 1024
    window_bytes: int = 32 * _MIB
    ack_every: int = 64
    ack_delay_s: float = 0.05
    ping_interval_s: float = 8.0
    ping_jitter_s: float = 2.0
    goodbye_s: float = 1.0
    tombstones: int = 4096
    route: ChannelLimits = field(default_factory=ChannelLimits)
    health: HealthLimits = field(default_factory=HealthLimits)

    def __post_init__(self) -> None:
        if self.ack_every > self.window_frames:
            raise ValueError(
                f"ack_every {self.ack_every} exceeds window_frames {self.window_frames}:"
                " every window would wait for the acknowledgement delay"
            )
        if self.command_bytes < self.max_frame_bytes:
            raise ValueError(f"command_bytes {self.command_bytes} cannot hold one frame of {self.max_frame_bytes}")
        if not 0 <= self.ping_jitter_s <= self.ping_interval_s:
            raise ValueError(f"ping_jitter_s must lie in [0, ping_interval_s]: {self.ping_jitter_s}")
