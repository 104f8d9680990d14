"""Stop strings, matched across any division of the text.

A text ends where a stop string is first complete; it is cut at that string's first character (at the longest one's, if
several are complete at the same character). This does not depend on how the text arrives. Text that might still become
a stop string is held back: it is the longest suffix that is a proper prefix of one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text, get back what may be shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; none of them = nothing is held back."""
        if not all(stops):
            raise ValueError("a stop string is empty: it would end every text before it begins")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far can be shown now. After a match nothing more is."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return buffer[:at]
        keep = self._length_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text held back, which can no longer become a stop string."""
        held, self._held = self._held, ""
        return held

    def _length_held(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
