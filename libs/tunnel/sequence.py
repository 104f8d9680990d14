"""Per-direction state of a tunnel: sequence numbers, acknowledgements, the unacknowledged window. No I/O, no clock.

Every frame of a direction, of every kind, takes one number; the first is 1. Data and close frames occupy the window
until acknowledged; acknowledgements, pings and pongs do not (an acknowledgement is never acknowledged), so a full
window can always be reopened.
"""

from collections import deque

from .errors import CorruptFrameError, ProtocolError


class SendWindow:
    """Numbers outbound frames and knows which of them the peer has seen."""

    __slots__ = ("_max_bytes", "_max_frames", "_next", "_unacked", "acked", "unacked_bytes")

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._next = 1
        self._unacked: deque[tuple[int, int]] = deque()
        self.acked = 0
        self.unacked_bytes = 0

    def resize(self, max_frames: int, max_bytes: int) -> None:
        """Other bounds from here on; what is over them waits to be acknowledged."""
        self._max_frames, self._max_bytes = max_frames, max_bytes

    @property
    def unacked_frames(self) -> int:
        """Data and close frames sent and not acknowledged."""
        return len(self._unacked)

    @property
    def last_sent(self) -> int:
        """The last number given out; 0 before the first."""
        return self._next - 1

    def has_room(self) -> bool:
        """Whether one more data or close frame may be sent. The byte bound may be exceeded by that one frame."""
        return len(self._unacked) < self._max_frames and self.unacked_bytes < self._max_bytes

    def take(self) -> int:
        """The next sequence number."""
        seq = self._next
        self._next = seq + 1
        return seq

    def hold(self, seq: int, size: int) -> None:
        """Count a data or close frame of ``size`` bytes as unacknowledged."""
        self._unacked.append((seq, size))
        self.unacked_bytes += size

    def on_ack(self, seq: int) -> None:
        """The peer has seen everything up to ``seq``.

        Raises ProtocolError if that was never sent or takes back an earlier acknowledgement.
        """
        if seq >= self._next or seq < self.acked:
            raise ProtocolError(f"acknowledgement of {seq} outside [{self.acked}, {self._next - 1}]")
        self.acked = seq
        unacked = self._unacked
        while unacked and unacked[0][0] <= seq:
            self.unacked_bytes -= unacked.popleft()[1]


class ReceiveSequence:
    """Demands exactly the next number, and says when an acknowledgement is due."""

    __slots__ = ("ack_every", "acked", "last", "unacked")

    def __init__(self, ack_every: int) -> None:
        self.ack_every = ack_every
        self.last = 0
        self.acked = 0
        # Data and close frames seen since the last acknowledgement.
        self.unacked = 0

    def accept(self, seq: int) -> None:
        """Raises CorruptFrameError unless ``seq`` follows the last one directly."""
        if seq != self.last + 1:
            kind = "gap" if seq > self.last else "replay"
            raise CorruptFrameError(kind, f"sequence {seq} after {self.last}")
        self.last = seq

    def needs_ack(self) -> bool:
        """Count one data or close frame; true when an acknowledgement must not wait any longer."""
        self.unacked += 1
        return self.unacked >= self.ack_every

    def take_ack(self) -> int:
        """The number to acknowledge now."""
        self.unacked = 0
        self.acked = self.last
        return self.last
