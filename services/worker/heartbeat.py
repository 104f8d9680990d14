"""Heartbeats: what the worker observes of itself, about once a second, numbered once per router-worker pair.

A *pair* is this process and one router process. A router dials several tunnels and elects one for the pair's
heartbeats; the highest term heard holds. Until a router has elected one, or after its elected tunnel is gone, the pair
is silent. The first heartbeat on a newly elected tunnel is a snapshot, so is the next after a snapshot was asked for;
the others carry what changed since the last one that was sent. A heartbeat that finds its tunnel's command channel full
is not sent and takes no number: the next one covers its changes.

A router says who it is in its Attach call's metadata. One that does not is one pair per tunnel, whose numbers begin
behind all others', so that a second tunnel's are not taken for late ones of the first.

What changes much (draining, an assignment's end) is told soon: at most every `hurry_s`. What an ended
assignment leaves resident is told before its result, which names the heartbeat, for it may go on another tunnel and
come first: so a next turn sent at once finds it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from libs.controller.wire import TunnelCodec
from libs.service.logs import get_logger
from libs.tunnel import ChannelFullError, PayloadTooLargeError, Tunnel, TunnelClosedError
from services.worker.endpoint.interpreter import Interpreter
from services.worker.observation import Observer, Told

log = get_logger(__name__)

_PAIRS_KEPT = 64
"""Pairs remembered although they have no tunnel: their numbers go on where they stopped."""


@dataclass(slots=True, eq=False)
class _Pair:
    sequence: int
    """Of the last heartbeat sent."""
    tunnels: set[int] = field(default_factory=set)
    term: int = 0
    elected: Tunnel | None = None
    told: Told | None = None


class Heartbeats:
    """Implements `endpoint.attach.Pairs`. `run` sends until it is cancelled."""

    def __init__(
        self,
        interpreter: Interpreter,
        observer: Observer,
        *,
        interval_s: float = 1.0,
        hurry_s: float = 0.03,
        flush_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interpreter, self._observer, self._codec = interpreter, observer, TunnelCodec()
        self._interval_s, self._hurry_s, self._flush_s, self._clock = interval_s, hurry_s, flush_s, clock
        self._flushed_s = -math.inf
        self._pairs: dict[str, _Pair] = {}
        self._by_tunnel: dict[int, str] = {}
        self._highest = 0
        self._changed = asyncio.Event()
        self.sent = 0
        self.skipped = 0

    def opened(self, tunnel: Tunnel, router: str) -> None:
        """See Pairs."""
        name = router or f"tunnel {tunnel.tunnel_id}"
        pair = self._pairs.setdefault(name, _Pair(0 if router else self._highest))
        silent = [other for other, known in self._pairs.items() if not known.tunnels and known is not pair]
        for other in silent[: max(0, len(self._pairs) - _PAIRS_KEPT)]:
            del self._pairs[other]
        pair.tunnels.add(tunnel.tunnel_id)
        self._by_tunnel[tunnel.tunnel_id] = name

    def elected(self, tunnel: Tunnel, term: int) -> None:
        """See Pairs."""
        pair = self._pair(tunnel)
        if pair is None or term <= pair.term:
            return
        pair.term, pair.elected, pair.told = term, tunnel, None
        self._send(pair)

    def snapshot_wanted(self, tunnel: Tunnel) -> None:
        """See Pairs."""
        pair = self._pair(tunnel)
        # An election is followed by a request that its snapshot has already answered.
        if pair is not None and pair.elected is tunnel:
            pair.told = None
            self._send(pair)

    def told(self, tunnel_id: int) -> int:
        """See Pairs."""
        pair = self._pairs.get(self._by_tunnel.get(tunnel_id, ""))
        return pair.sequence if pair is not None else 0

    def lost(self, tunnel: Tunnel) -> None:
        """See Pairs."""
        name = self._by_tunnel.pop(tunnel.tunnel_id, None)
        if name is None:
            return
        pair = self._pairs[name]
        pair.tunnels.discard(tunnel.tunnel_id)
        if pair.elected is tunnel:
            pair.elected = None
        # A named router that dials again goes on in its old numbers.
        if not pair.tunnels and name.startswith("tunnel "):
            del self._pairs[name]

    def hurry(self) -> None:
        """Something changed that routers should hear soon."""
        self._changed.set()

    def flush(self) -> None:
        """What has changed must be known before what is sent next; at most every `flush_s`, else soon."""
        if self._clock() - self._flushed_s < self._flush_s:
            return self.hurry()
        self._flushed_s = self._clock()
        self._changed.clear()
        return self.beat()

    async def run(self) -> None:
        """Sends on every pair's elected tunnel, about once per interval and soon after a change."""
        while True:
            pause = self._interval_s * random.uniform(0.9, 1.1)  # noqa: S311 - spread, not a secret
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                await asyncio.sleep(self._hurry_s)
            except TimeoutError:
                pass
            self._changed.clear()
            self.beat()

    def beat(self) -> None:
        """One heartbeat for every pair that can have one."""
        for pair in self._pairs.values():
            self._send(pair)

    def _pair(self, tunnel: Tunnel) -> _Pair | None:
        name = self._by_tunnel.get(tunnel.tunnel_id)
        return self._pairs.get(name) if name is not None else None

    def _send(self, pair: _Pair) -> None:
        tunnel = pair.elected
        if tunnel is None:
            return
        beat, told = self._observer.heartbeat(self._interpreter, pair.sequence + 1, pair.told)
        try:
            tunnel.try_control(self._codec.encode(beat))
        except (ChannelFullError, TunnelClosedError):
            self.skipped += 1
            return
        except PayloadTooLargeError as error:
            self.skipped += 1
            log.error("heartbeat does not fit a frame", error=str(error))
            return
        pair.sequence, pair.told = beat.sequence, told
        self._highest = max(self._highest, beat.sequence)
        self.sent += 1
