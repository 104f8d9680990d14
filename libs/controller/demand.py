"""Page demand of an assignment: what the router checks as a hard constraint and the worker reserves."""

from __future__ import annotations


def pages_needed(tokens: int, max_new_tokens: int, page_tokens: int, resident_tokens: int) -> int:
    """Pages to reserve for a whole sequence of which `resident_tokens` (from the start) are in device pages already.

    Full resident pages are shared. A partial last page of the resident prefix may be shared too, so one page more is
    counted for its copy before this assignment writes to it. All counts are of the largest layer group.
    """
    if page_tokens < 1 or min(tokens, max_new_tokens, resident_tokens) < 0:
        raise ValueError(f"page_tokens {page_tokens} must be at least 1 and token counts not negative")
    total = -(-(tokens + max_new_tokens) // page_tokens)
    # A partial resident page is not subtracted: its copy is the page more.
    return max(0, total - resident_tokens // page_tokens)
