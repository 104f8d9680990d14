"""Typed errors of this library: each message carries the offending value and what to do about it.

Two families, told apart because their remedies differ. `IdentityError`: the caller passed something that cannot be
named (a programming or configuration mistake). `ObjectError`: bytes from a disk, a peer or a bucket are not what
their name promises; the holder quarantines the file, counts it under `reason` and recomputes the range.
"""

from typing import ClassVar


class IdentityError(ValueError):
    """A value that cannot take part in an identity: wrong length, wrong alphabet, out of range."""


class ObjectError(ValueError):
    """Bytes that must not be used as the chunk they were fetched for. `reason` is a stable label for metrics."""

    reason: ClassVar[str] = "invalid"


class TruncatedObjectError(ObjectError):
    """Fewer bytes than the object's own header declares."""

    reason: ClassVar[str] = "truncated"


class MalformedObjectError(ObjectError):
    """Not a chunk object of version 1, or one that its canonical writer could not have written."""

    reason: ClassVar[str] = "malformed"


class ContentMismatchError(ObjectError):
    """The bytes' BLAKE3 is not the content id they are filed under."""

    reason: ClassVar[str] = "content_mismatch"


class SwappedObjectError(ObjectError):
    """A well-formed object of another chunk, group, tenant or model than the one asked for."""

    reason: ClassVar[str] = "swapped"


class TokenMismatchError(ObjectError):
    """The object's token ids are not those of the prompt, or do not hash to the object's own name."""

    reason: ClassVar[str] = "token_mismatch"
