"""A bounded first-in first-out channel of payloads that merges under pressure. No tasks, no clock: time is a
parameter.

Below the high watermark a put is an append. From the watermark on the channel is congested: neighbouring payloads are
merged pairwise (one pass halves the queue, so merging stays cheap however long pressure lasts), then the new one is
merged into the last or appended. Order and content are kept: only neighbours are ever merged. Congestion ends when
the *consumer* has brought the channel below half of both marks; merging alone does not end it, else a consumer that
has stopped would never be found out. What fits no more, or comes after the time limit, is refused and the owner drops
the whole route: never one payload of it.
"""

import enum
from collections import deque
from collections.abc import Callable

from .config import ChannelLimits

# May two neighbouring payloads become one? The merged payload, or None.
Merge = Callable[[bytes, bytes], bytes | None]


def never_merge(_first: bytes, _second: bytes) -> bytes | None:
    """For payloads that must stay apart."""
    return None


class Put(enum.Enum):
    """What became of a payload."""

    STORED = enum.auto()
    MERGED = enum.auto()
    # No room, even after merging.
    OVERFLOW = enum.auto()
    # Congested for longer than the limit.
    EXPIRED = enum.auto()


# A member looked up by name costs as much as the rest of a put.
_STORED = Put.STORED


class Channel:
    """See the module. ``size`` is the sum of the waiting payloads' bytes."""

    __slots__ = ("_compacted", "_limits", "_max_payload", "_merge", "_queue", "congested_since", "merged", "size")

    def __init__(self, limits: ChannelLimits, merge: Merge, max_payload: int) -> None:
        self._limits = limits
        self._merge = merge
        self._max_payload = max_payload
        self._queue: deque[bytes] = deque()
        # A pass over the queue found nothing to merge, and nothing was taken since.
        self._compacted = False
        self.size = 0
        self.congested_since: float | None = None
        # Payloads absorbed into a neighbour so far.
        self.merged = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, payload: bytes, now: float) -> Put:
        """Store ``payload`` behind what waits."""
        limits = self._limits
        size = self.size + len(payload)
        if self.congested_since is None and len(self._queue) < limits.high_items and size <= limits.high_bytes:
            self._queue.append(payload)
            self.size = size
            return _STORED
        return self._put_congested(payload, now)

    def take(self) -> bytes:
        """The oldest payload; raises IndexError if none waits."""
        payload = self._queue.popleft()
        self.size -= len(payload)
        self._relieve()
        return payload

    def take_all(self) -> list[bytes]:
        """All that waits, oldest first; nothing if nothing does."""
        queue = self._queue
        if not queue:
            return []
        payloads = list(queue)
        # As `clear`, which costs a call: this is once per payload.
        queue.clear()
        self._compacted = False
        self.size = 0
        self.congested_since = None
        return payloads

    def peek_size(self) -> int:
        """Bytes of the oldest payload; raises IndexError if none waits."""
        return len(self._queue[0])

    def clear(self) -> None:
        """Forget everything that waits."""
        self._queue.clear()
        self._compacted = False
        self.size = 0
        self.congested_since = None

    def expired(self, now: float) -> bool:
        """Whether congestion has lasted longer than the limit."""
        return self.congested_since is not None and now - self.congested_since > self._limits.congested_s

    def _put_congested(self, payload: bytes, now: float) -> Put:
        limits = self._limits
        if self.congested_since is None:
            self.congested_since = now
        elif self.expired(now):
            return Put.EXPIRED
        if len(self._queue) >= limits.high_items or self.size + len(payload) > limits.high_bytes:
            if not self._compacted:
                self._compact()
            if self._merge_last(payload):
                return Put.MERGED
        if len(self._queue) >= limits.max_items or self.size + len(payload) > limits.max_bytes:
            return Put.OVERFLOW
        self._queue.append(payload)
        self.size += len(payload)
        return Put.STORED

    def _merge_pair(self, first: bytes, second: bytes) -> bytes | None:
        merged = self._merge(first, second)
        if merged is None or len(merged) > self._max_payload:
            return None
        return merged

    def _merge_last(self, payload: bytes) -> bool:
        if not self._queue:
            return False
        last = self._queue[-1]
        merged = self._merge_pair(last, payload)
        if merged is None or self.size - len(last) + len(merged) > self._limits.max_bytes:
            return False
        self._queue[-1] = merged
        self.size += len(merged) - len(last)
        self.merged += 1
        return True

    def _compact(self) -> None:
        old, self._queue = self._queue, deque()
        before = self.merged
        while len(old) > 1:
            first, second = old.popleft(), old[0]
            merged = self._merge_pair(first, second)
            if merged is None:
                self._queue.append(first)
            else:
                old.popleft()
                self._queue.append(merged)
                self.size += len(merged) - len(first) - len(second)
                self.merged += 1
        self._queue.extend(old)
        self._compacted = self.merged == before

    def _relieve(self) -> None:
        self._compacted = False
        if self.congested_since is None:
            return
        limits = self._limits
        if len(self._queue) <= limits.high_items // 2 and self.size <= limits.high_bytes // 2:
            self.congested_since = None
