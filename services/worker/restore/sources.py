"""One object, from the first source that delivers it whole: the cheapest by measured cost first. Runs on fetch threads.

The chunk directory is asked by what lies there, not by replica facts alone: a fact may be late. Whatever computation an
object came from, it is as good: the receipt's own content id is only preferred. A damaged object is put out of the
way by its tier and the next source is tried. A source that failed or was late rests for a while, so that a store
which hangs costs one request its wait and not every one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from libs.chunks.errors import AbortedError, OtherObjectError, TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.object_store import ObjectStore
from libs.chunks.tier import Tier, TierKind, Wanted
from libs.chunks.verified import Opened, open_verified
from libs.continuation.errors import ObjectError
from services.worker.handlers import RestoreEnd
from services.worker.restore.needs import ObjectNeed

# A farther source must be clearly cheaper: a read that stays here burdens nobody, and prices of small reads are noisy.
_FARTHER = {TierKind.PEER: 2.0, TierKind.OBJECT: 4.0}


@dataclass(frozen=True, slots=True)
class Localized:
    """A verified object in place. `damaged`: copies of it that were found damaged on the way."""

    opened: Opened
    wanted: Wanted
    kind: TierKind
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class NotLocalized:
    """No source delivered."""

    end: RestoreEnd
    detail: str
    damaged: int = 0


class Sources:
    """The tiers of this worker. `None` = it has no such tier. Thread-safe."""

    def __init__(
        self,
        local: LocalDirectory | None,
        store: ObjectStore | None,
        *,
        timeout_s: float,
        rest_s: float,
        passed_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._local, self._store = local, store
        self._timeout_s, self._rest_s, self._passed_over = timeout_s, rest_s, passed_over
        self._resting_until: dict[TierKind, float] = {}

    @property
    def directory(self) -> str:
        """UUID of the chunk directory, empty if there is none."""
        return "" if self._local is None else self._local.node

    def localize(self, need: ObjectNeed, abort: threading.Event) -> Localized | NotLocalized:
        """Never raises for a fault of storage."""
        deadline = time.monotonic() + self._timeout_s
        errors: list[str] = []
        damaged, unavailable = 0, False
        for tier, wanted in self._ordered(need):
            if time.monotonic() < self._resting_until.get(tier.kind, 0.0):
                self._passed_over()
                unavailable = True
                errors.append(f"{tier.kind.value} rests after a failure")
                continue
            try:
                opened = open_verified(tier, wanted, within=max(0.001, deadline - time.monotonic()), abort=abort)
            except (ObjectError, OtherObjectError) as error:
                damaged += 1
                errors.append(f"{tier.kind.value}: {error}")
            except TierError as error:
                errors.append(f"{tier.kind.value}: {error}")
                if not error.absent:
                    unavailable = True
                    if not isinstance(error, AbortedError):
                        self._resting_until[tier.kind] = time.monotonic() + self._rest_s
            else:
                self._resting_until.pop(tier.kind, None)
                return Localized(opened, wanted, tier.kind, damaged)
        otherwise = RestoreEnd.UNAVAILABLE if unavailable else RestoreEnd.GONE
        end = RestoreEnd.CORRUPT if damaged else otherwise
        detail = "; ".join(errors) or "no source has it"
        return NotLocalized(end, f"{need.metadata.group} of {need.metadata.hash}: {detail}", damaged)

    def _ordered(self, need: ObjectNeed) -> list[tuple[Tier, Wanted]]:
        found: list[tuple[Tier, Wanted]] = []
        if self._local is not None:
            there = [key.content_id for key in self._local.find(*need.identity)]
            preferred = [content for content in (need.durable, *need.replicas) if content in there]
            contents = dict.fromkeys([*preferred, *there])
            found += [(self._local, need.wanted(content)) for content in contents]
        if self._store is not None and need.durable:
            found.append((self._store, need.wanted(need.durable)))
        if len(found) > 1:
            size = found[0][1].size
            found.sort(key=lambda source: source[0].meter.price().ms(size) * _FARTHER.get(source[0].kind, 1.0))
        return found
