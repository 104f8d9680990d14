"""From untrusted bytes to a view that may be uploaded.

The full check (header, names, BLAKE3 over every byte, token ids) is made once for bytes at rest: a tier remembers which
files it has handed out verified. What remains every time costs microseconds and depends on no hash: the header is the
one asked for, and the token ids are the prompt's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from libs.chunks.tier import Held, Source, Transfer, Wanted
from libs.continuation.errors import ObjectError, SwappedObjectError, TokenMismatchError
from libs.continuation.hashing import Tokens, pack_tokens
from libs.continuation.object_format import TOKENS_TENSOR
from libs.continuation.objects import ObjectView, open_object, view_object


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified object in place. `fresh`: every byte was hashed just now."""

    view: ObjectView
    held: Held
    fresh: bool

    def release(self) -> None:
        """Ends the view, then gives the bytes back."""
        with suppress(BufferError):  # an array still looks at the bytes; they go with it
            self.view.release()
        self.held.release()


def open_verified(source: Source, wanted: Wanted, *, within: float, abort: Transfer | None = None) -> Opened:
    """Raises TierError, or ObjectError after the tier has been told to reject the bytes.

    Bytes that were hashed count for the tier's price; those verified before come from the page cache, at no price.
    """
    with source.meter.reading() as read:
        opened = _open(source, wanted, within, abort)
        if opened.fresh:
            read.bytes = opened.view.data.nbytes
    return opened


def _open(source: Source, wanted: Wanted, within: float, abort: Transfer | None) -> Opened:
    held = source.get(wanted.key, wanted.size, within=within, abort=abort)
    fresh = not held.verified
    try:
        view = _verified(held, wanted) if fresh else _seen_before(held, wanted)
    except ObjectError as error:
        held.release()
        if not _is_the_prompts_fault(error, fresh):
            source.reject(wanted.key, error)
        raise
    except BaseException:
        held.release()
        raise
    return Opened(view, held, fresh)


def check_tokens(view: ObjectView, tokens: Tokens) -> None:
    """Raises TokenMismatchError unless the object holds exactly these token ids."""
    if view.raw(TOKENS_TENSOR) != pack_tokens(tokens):
        raise TokenMismatchError(f"object {view.metadata.hash} holds other token ids than the prompt: recompute")


def _verified(held: Held, wanted: Wanted) -> ObjectView:
    view = open_object(
        held.data, metadata=wanted.metadata, group=wanted.group, content=wanted.content, tokens=wanted.tokens
    )
    held.mark_verified()
    return view


def _seen_before(held: Held, wanted: Wanted) -> ObjectView:
    view = view_object(held.data)
    try:
        if view.metadata != wanted.metadata or view.group != wanted.group:
            raise SwappedObjectError(
                f"object is {view.metadata}, {wanted.metadata} was asked for: quarantine it and recompute"
            )
        check_tokens(view, wanted.tokens)
    except BaseException:
        view.release()
        raise
    return view


def _is_the_prompts_fault(error: ObjectError, fresh: bool) -> bool:
    """Bytes verified before hold what their name says; another prompt under the same hash does not damage them."""
    return isinstance(error, TokenMismatchError) and not fresh
