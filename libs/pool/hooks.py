"""What is particular to the pool's user, handed in. Everything is called on the event loop and must return at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from libs.tunnel import EXPECTED_ENDS, Carrier, Closed, CloseReason, Merge, Tunnel, never_merge

from .contours import Move
from .effects import Warn
from .model import Endpoint, WriterId
from .readiness import Readiness

Dial = Callable[[Endpoint], AbstractAsyncContextManager[Carrier]]
"""Dials an endpoint; what it holds (a channel) lives as long as the tunnel. With mutual TLS it must demand that the
certificate's name is the worker's. What it raises is a failed dial."""


@dataclass(frozen=True, slots=True)
class Writer:
    """A published tunnel."""

    writer: WriterId
    tunnel: Tunnel
    endpoint: Endpoint
    generation: int


@dataclass(frozen=True, slots=True)
class Loss:
    """How a published tunnel ended. ``why``: the pool's own reason, None if the end was not its doing."""

    closed: Closed
    why: Move | None
    superseded: bool

    @property
    def orderly(self) -> bool:
        """Asked for by somebody, and of a process that is still what it was."""
        return self.closed.reason in EXPECTED_ENDS and not self.superseded


@dataclass(frozen=True, slots=True)
class Hooks:
    """``merge``: may two waiting frames become one. ``on_route_dropped``: a route was dropped here for congestion.

    ``crashed`` is told of a broken contract inside the pool, once: the process should end.
    """

    merge: Merge = never_merge
    on_control: Callable[[Tunnel, bytes], None] | None = None
    on_route_dropped: Callable[[int, CloseReason], None] | None = None
    on_writer_up: Callable[[Writer], None] | None = None
    on_writer_lost: Callable[[Writer, Loss], None] | None = None
    on_warning: Callable[[Warn], None] | None = None
    on_readiness: Callable[[Readiness], None] | None = None
    crashed: Callable[[BaseException], None] | None = None
