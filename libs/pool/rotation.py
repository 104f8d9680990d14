"""Which writers should be replaced although they serve: spares of an only endpoint in turn, and long degraded ones.

Each is an explicit strategy, off unless its knobs say otherwise. At most one writer of an endpoint is replaced at a
time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .inventory import WriterRecord
from .knobs import PoolPolicy
from .model import EndpointKey


class Rotation:
    """The owner of when each endpoint's writers were rotated last."""

    def __init__(self) -> None:
        self._last: dict[EndpointKey, float] = {}

    def victim(
        self, policy: PoolPolicy, key: EndpointKey, candidates: Sequence[WriterRecord], sole: bool, now: float
    ) -> WriterRecord | None:
        """The writer of this endpoint to replace now. ``candidates``: its Active writers that are Open."""
        if policy.replace_degraded_s:
            sick = [
                record
                for record in candidates
                if record.degraded_since is not None and now - record.degraded_since >= policy.replace_degraded_s
            ]
            if sick:
                return min(sick, key=lambda record: (record.degraded_since, record.writer))
        if not sole or not policy.shadow_writers or not policy.shadow_rotation_s:
            self._last.pop(key, None)
            return None
        if now - self._last.setdefault(key, now) < policy.shadow_rotation_s:
            return None
        idle = [record for record in candidates if not record.bound]
        return min(idle, key=lambda record: (record.opened_at, record.writer)) if len(candidates) > 1 and idle else None

    def began(self, key: EndpointKey, now: float) -> None:
        """A replacement at this endpoint was started."""
        if key in self._last:
            self._last[key] = now

    def forget(self, keys: Collection[EndpointKey]) -> None:
        """Endpoints that are gone for good."""
        for key in keys:
            self._last.pop(key, None)
