"""Why a tier did not deliver, each with its remedy. Damaged bytes are no tier error: they are an `ObjectError` of
libs/continuation, and the tier that held them is told (`Tier.reject`).

`retryable` says whether the same call may succeed shortly; `absent` that the tier answered and has nothing there.
"""

from __future__ import annotations

from typing import ClassVar


class TierError(Exception):
    """Base. `reason` is a stable label for metrics; the message carries the value and the remedy."""

    reason: ClassVar[str] = "failed"
    retryable: ClassVar[bool] = False
    absent: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message, self.remedy = message, remedy


class MissingObjectError(TierError):
    """The tier has no object under this key."""

    reason = "missing"
    absent = True


class OtherObjectError(TierError):
    """Something of another size lies under this key: not what its name promises."""

    reason = "other_object"


class UnreachableError(TierError):
    """Connection refused, reset or cut off in the middle of a body."""

    reason = "unreachable"
    retryable = True


class SlowTierError(TierError):
    """No answer within the time given, or silence on a connection."""

    reason = "slow"
    retryable = True


class AccessRefusedError(TierError):
    """The store knows us not, or forbids it."""

    reason = "access_refused"


class MissingBucketError(TierError):
    """The bucket does not exist."""

    reason = "missing_bucket"


class ServerFailedError(TierError):
    """The store answered with an error of its own (5xx, slow down, nonsense)."""

    reason = "server_failed"
    retryable = True


class AbortedError(TierError):
    """Nobody wants the bytes any more."""

    reason = "aborted"


class TierFullError(TierError):
    """No room: the cap is reached (or the disk full) and nothing can be evicted."""

    reason = "full"


class TierClosedError(TierError):
    """The tier has been closed."""

    reason = "closed"


class DirectoryError(TierError):
    """The chunk directory cannot be used: not writable, or no directory."""

    reason = "directory"


class DirectoryInUseError(DirectoryError):
    """Another process owns the chunk directory."""

    reason = "directory_in_use"


class StaleEpochError(TierError):
    """A peer's address is another process by now: what was known of it holds no more."""

    reason = "stale_epoch"


class BusyPeerError(TierError):
    """A peer serves as many as it may at a time."""

    reason = "busy"
    retryable = True
