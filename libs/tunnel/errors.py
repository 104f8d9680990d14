"""Reasons and typed errors of the tunnel.

``CloseReason`` and ``FrameKind`` mirror the enums of ``segue/v1/tunnel.proto`` (a test holds them equal) so that the
rest of the library, and Prometheus labels, work with real Python enums.
"""

import enum
from dataclasses import dataclass


class FrameKind(enum.IntEnum):
    """What a frame carries; see ``segue.v1.FrameKind``."""

    DATA = 1
    ACK = 2
    CLOSE = 3
    PING = 4
    PONG = 5


class CloseReason(enum.IntEnum):
    """Why a route or a tunnel was closed; see ``segue.v1.CloseReason``."""

    DONE = 1
    NO_ROUTE = 2
    CHANNEL_CLOSED = 3
    RESOURCE_EXHAUSTED = 4
    CORRUPT = 5
    RETIRED = 6
    SHUTDOWN = 7
    IDLE = 8
    CANCELLED = 9
    PEER_LOST = 10
    PROTOCOL = 11

    @property
    def label(self) -> str:
        """Lower-case name, as used in metrics."""
        return self.name.lower()


# A tunnel that ends for one of these did what its owner or its peer's owner asked: not an error.
EXPECTED_ENDS = frozenset({CloseReason.DONE, CloseReason.RETIRED, CloseReason.SHUTDOWN, CloseReason.IDLE})


@dataclass(frozen=True, slots=True)
class Closed:
    """How a route or a tunnel ended.

    ``by_peer`` is true when the other end said so in a close frame; a lost connection is nobody's decision and is
    reported with ``by_peer`` false and reason ``PEER_LOST``.
    """

    reason: CloseReason
    detail: str = ""
    by_peer: bool = False


class TunnelError(Exception):
    """Base of all errors raised by this library."""


class CorruptFrameError(TunnelError):
    """The inbound stream cannot be trusted any more; the tunnel closes and nothing of the frame is delivered.

    ``reason`` is a short stable label for counters: undecodable, kind, checksum, gap, replay, shape.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"corrupt frame ({reason}): {detail}")
        self.reason = reason
        self.detail = detail


class ProtocolError(TunnelError):
    """The frame is intact but breaks a rule of the protocol (too large, acknowledges what was never sent)."""


class CarrierLostError(TunnelError):
    """The stream underneath broke; raised by carriers."""


class ChannelFullError(TunnelError):
    """The bounded command channel of the tunnel has no room: offer to another tunnel, or wait with ``send``."""

    def __init__(self, items: int, size: int) -> None:
        super().__init__(f"command channel is full ({items} items, {size} bytes wait): use another tunnel or wait")
        self.items = items
        self.size = size


class PayloadTooLargeError(TunnelError):
    """One payload exceeds what a frame may hold; split it, or raise ``max_frame_bytes`` at both ends."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"payload of {size} bytes exceeds the limit of {limit}: split it or raise max_frame_bytes")
        self.size = size
        self.limit = limit


class TooManyRoutesError(TunnelError):
    """``max_connections`` is reached; refuse the request or raise the ceiling."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} routes are open, the configured ceiling: refuse the request or raise max_connections"
        )
        self.limit = limit


class RouteClosedError(TunnelError):
    """The route has ended: no more payloads come and none can be sent. ``closed`` says why."""

    def __init__(self, conn_id: int, closed: Closed) -> None:
        super().__init__(f"route {conn_id} closed: {closed.reason.label} {closed.detail}".rstrip())
        self.conn_id = conn_id
        self.closed = closed


class TunnelClosedError(TunnelError):
    """The tunnel has ended or is ending; dial again. ``closed`` says why."""

    def __init__(self, closed: Closed) -> None:
        super().__init__(f"tunnel closed: {closed.reason.label} {closed.detail}".rstrip())
        self.closed = closed
