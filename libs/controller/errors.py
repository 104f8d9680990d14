"""The two kinds of error.

*Ours* (`ControllerBugError`, `EncodingError`): shell or machine broke the contract; raised, not caught to go on.
*Theirs* (late, repeated, malformed, foreign): never raised by a machine; fenced, a no-op, counted by `Fence`.
"""

from __future__ import annotations


class ControllerBugError(AssertionError):
    """An event that cannot happen in this state came from our own side. Carries state and event."""

    def __init__(self, state: str, event: str, detail: str = "") -> None:
        super().__init__(f"{event} is impossible in {state}{': ' + detail if detail else ''}")
        self.state = state
        self.event = event


class EncodingError(ValueError):
    """A value that cannot be encoded: out of range or not in its enum. `field` is its path, e.g. `Offer.epoch`."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field} {detail}")
        self.field = field


class LocalOnlyError(EncodingError):
    """A value that must not cross the tunnel (a timer, a handle, tensor bytes) reached the encoder."""

    def __init__(self, field: str, value: object) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        super().__init__(
            field, f"holds a {kind}: only protocol values cross the wire; timers, handles and tensor bytes stay local"
        )


class WireError(ValueError):
    """Bytes from the other side that are no valid message; `reason` is a short label for the counter."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
