"""Is this tunnel well? Pings against their own median, stalls, a full command channel. Pure: time comes as a number.

Degraded = a ping over a multiple of the median, a send that does not return, or a command channel that was full. It is
cleared after N good pings in a row with none of these in between. A ping that stays unanswered past its limit means the
peer is lost; that is what finds a silent network, where a reset is seen at once.
"""

import enum
from collections import deque
from statistics import median

from .config import HealthLimits


class Degraded(enum.StrEnum):
    """Why a tunnel is degraded; the values are metric labels."""

    PING_SLOW = "ping_slow"
    CHANNEL_FULL = "channel_full"
    SEND_STALLED = "send_stalled"


class Health:
    """Written by the tunnel's tasks, read by whoever selects tunnels."""

    __slots__ = ("_good", "_limits", "_nonce", "_samples", "_sent_at", "last_rtt", "reasons")

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._samples: deque[float] = deque(maxlen=63)
        self._nonce: bytes | None = None
        self._sent_at = 0.0
        self._good = 0
        self.last_rtt: float | None = None
        self.reasons: set[Degraded] = set()

    def reconfigure(self, limits: HealthLimits) -> None:
        """Judge by these from here on."""
        self._limits = limits

    @property
    def degraded(self) -> bool:
        """Whether any reason stands."""
        return bool(self.reasons)

    @property
    def median_rtt(self) -> float | None:
        """Median round trip of the recent pings, in seconds; none before the first pong."""
        return median(self._samples) if self._samples else None

    @property
    def awaiting_pong(self) -> bool:
        """Whether a ping is in flight; there is at most one."""
        return self._nonce is not None

    def ping_sent(self, nonce: bytes, now: float) -> None:
        """A ping was handed to the writer."""
        self._nonce = nonce
        self._sent_at = now

    def pong(self, nonce: bytes, now: float) -> bool:
        """A pong came back; false if it answers no ping in flight."""
        if nonce != self._nonce:
            return False
        self._nonce = None
        rtt = now - self._sent_at
        slow = self._is_slow(rtt)
        self._samples.append(rtt)
        self.last_rtt = rtt
        if slow:
            self.mark(Degraded.PING_SLOW)
        else:
            self._good += 1
            if self._good >= self._limits.good_to_clear:
                self.reasons.clear()
        return True

    def mark(self, reason: Degraded) -> bool:
        """Something is not well; true if that is news."""
        self._good = 0
        if reason in self.reasons:
            return False
        self.reasons.add(reason)
        return True

    def check(self, now: float, write_started: float | None) -> bool:
        """Look at what is outstanding; false if the peer must be given up.

        ``write_started``: when the send in progress began, or None.
        """
        if write_started is not None and now - write_started > self._limits.stall_s:
            self.mark(Degraded.SEND_STALLED)
        if self._nonce is None:
            return True
        waited = now - self._sent_at
        if self._is_slow(waited):
            self.mark(Degraded.PING_SLOW)
        return waited <= self._limits.pong_timeout_s

    def forgive(self, asleep_s: float) -> None:
        """This process itself did not run for that long (stopped, or its loop blocked): no evidence about the peer."""
        self._sent_at += asleep_s

    def _is_slow(self, rtt: float) -> bool:
        if len(self._samples) < self._limits.min_samples:
            return False
        return rtt > max(self._limits.ping_floor_s, self._limits.ping_multiple * median(self._samples))
