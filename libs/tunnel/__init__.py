"""Tunnels: few long-lived streams that carry many short-lived exchanges; used on both hops, at both ends.

A ``Tunnel`` runs on a ``Carrier`` (a gRPC Attach stream), opens or accepts ``Route``s, and registers them in the
process's ``Registry``. Payloads are opaque; what is particular to the user comes in through ``Handlers``.
"""

from .carrier import Carrier
from .channel import Merge, never_merge
from .config import ChannelLimits, HealthLimits, TunnelConfig
from .counters import Counters
from .errors import (
    EXPECTED_ENDS,
    CarrierLostError,
    ChannelFullError,
    Closed,
    CloseReason,
    CorruptFrameError,
    FrameKind,
    PayloadTooLargeError,
    ProtocolError,
    RouteClosedError,
    TooManyRoutesError,
    TunnelClosedError,
    TunnelError,
)
from .health import Degraded, Health
from .registry import Registry, Snapshot, TunnelEntry
from .route import OnClosed, Route
from .tunnel import Handlers, Side, Tunnel

__all__ = [
    "Carrier",
    "CarrierLostError",
    "ChannelFullError",
    "ChannelLimits",
    "CloseReason",
    "Closed",
    "CorruptFrameError",
    "Counters",
    "Degraded",
    "EXPECTED_ENDS",
    "FrameKind",
    "Handlers",
    "Health",
    "HealthLimits",
    "Merge",
    "OnClosed",
    "PayloadTooLargeError",
    "ProtocolError",
    "Registry",
    "Route",
    "RouteClosedError",
    "Side",
    "Snapshot",
    "TooManyRoutesError",
    "Tunnel",
    "TunnelClosedError",
    "TunnelConfig",
    "TunnelEntry",
    "TunnelError",
    "never_merge",
]
