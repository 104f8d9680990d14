"""How many pages an assignment needs, and which of a windowed group it must keep. Pure arithmetic, tokens and pages.

A route with `end` computed tokens can be continued at `end`, and restarted from the last chunk boundary at or below it,
if each windowed group holds [floor(end / chunk) * chunk - window, end). `keep_from` rounds that down to a chunk, so
that the last chunk's objects can still be captured whole where the window is shorter than a chunk.

New pages an assignment may need at one moment (the *demand*): in a full group all up to the budget's end. In a windowed
group pages fall behind the window and are used again, so that at most `span` are held at once: from `keep_from(end)`
to the end of the step that follows. A checkpoint's lease may hold back one chunk of pages behind the window:
they come on top. What is shared with another route does not come back when it falls behind; whoever takes such a
share pays for it (see the pool).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A layer group: `window` in tokens (0 = full attention), `pages` = how many the device holds."""

    name: str
    window: int
    pages: int


@dataclass(frozen=True, slots=True)
class PageSizes:
    """`page`: tokens per page; `chunk`: tokens per chunk, a multiple of it; `step`: most tokens one step adds to one
    job.
    """

    page: int = 16
    chunk: int = 256
    step: int = 512

    def __post_init__(self) -> None:
        if self.page < 1 or self.chunk % self.page or self.step < 1:
            raise ValueError(f"chunk {self.chunk} must be a multiple of page {self.page}, step {self.step} at least 1")

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` from position 0."""
        return -(-tokens // self.page)

    def keep_from(self, window: int, end: int) -> int:
        """First position a windowed group keeps at `end` computed tokens: a multiple of the chunk."""
        if window == 0:
            return 0
        return max(0, (end // self.chunk * self.chunk - window) // self.chunk * self.chunk)

    def first_needed(self, window: int, boundary: int) -> int:
        """First position that must be there for a continuation at `boundary`."""
        return 0 if window == 0 else max(0, boundary - window)

    def restore_from(self, window: int, boundary: int) -> int:
        """First position a restore up to `boundary` loads: whole objects are read, so whole objects are kept.

        The last chunk boundary can then be continued too, where the window is a multiple of the chunk.
        """
        return self.first_needed(window, boundary) // self.chunk * self.chunk

    def span(self, window: int) -> int:
        """Most pages of a windowed group between `keep_from(end)` and the end of the next step, over all ends."""
        kept = self.chunk - 1 + -(-window // self.chunk) * self.chunk
        return self.pages(kept + self.step) + 1

    def demand(self, window: int, first_new: int, budget_end: int) -> int:
        """New pages for positions up to `budget_end`, of which logical pages below `first_new` exist already."""
        new = max(0, self.pages(budget_end) - first_new)
        return new if window == 0 else min(new, self.span(window) + self.chunk // self.page)
