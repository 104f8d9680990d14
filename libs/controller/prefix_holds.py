"""Who is held for which prefix, and at whose news they must be looked at again. Pure.

`holding` says who should be held; here it is remembered. A request is held for one prefix, led by the processes that
compute it. It leaves when its timer fires, when a leader tells news of the prefix or is gone, or when it ends itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from libs.controller.offer_windows import Process
from libs.controller.protocol import Heartbeat, Tier
from libs.controller.router_events import Hold


class PrefixHolds:
    """Of one router."""

    def __init__(self) -> None:
        self._of: dict[str, Hold] = {}  # by request, in the order in which they came
        self._by_prefix: dict[str, dict[str, None]] = {}
        self._by_process: dict[Process, dict[str, None]] = {}
        self._seats: dict[str, int] = {}  # by prefix that somebody is held for: the next one to deal

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    @property
    def prefixes(self) -> Collection[str]:
        """Those that requests are held for."""
        return self._by_prefix.keys()

    def seat(self, hold: Hold) -> int:
        """For one more that is to be held: the leaders' own requests sit on the first ones."""
        seat = self._seats.get(hold.prefix, len(hold.leaders))
        self._seats[hold.prefix] = seat + 1
        return seat

    def add(self, request_id: str, hold: Hold) -> None:
        """Holds it."""
        self._of[request_id] = hold
        self._by_prefix.setdefault(hold.prefix, {})[request_id] = None
        for process in hold.leaders:
            self._by_process.setdefault(process, {})[request_id] = None

    def remove(self, request_id: str) -> bool:
        """It is held no more; False if it was not."""
        hold = self._of.pop(request_id, None)
        if hold is None:
            return False
        held = self._by_prefix[hold.prefix]
        del held[request_id]
        if not held:
            del self._by_prefix[hold.prefix]
            self._seats.pop(hold.prefix, None)
        for process in hold.leaders:
            waiters = self._by_process[process]
            del waiters[request_id]
            if not waiters:
                del self._by_process[process]
        return True

    def led_by(self, process: Process) -> tuple[str, ...]:
        """Requests that are held for what this process computes."""
        return tuple(self._by_process.get(process, ()))

    def told(self, process: Process, prefixes: Iterable[str]) -> tuple[str, ...]:
        """Requests that are held for one of these prefixes of this process."""
        waiters = self._by_process.get(process, {})
        return tuple([one for prefix in prefixes for one in self._by_prefix.get(prefix, ()) if one in waiters])


def news(heartbeat: Heartbeat, awaited: Collection[str]) -> tuple[str, ...]:
    """Of the awaited prefixes, those that this heartbeat says are in its worker's memory, or not coming any more."""
    if not awaited:
        return ()
    named = {one.hash for one in heartbeat.resident if one.hash in awaited}
    found = [one.hash for one in heartbeat.resident if one.tier is Tier.RAM and one.hash in named]
    # What was coming and is in the pages now has gone nowhere.
    found += [one.hash for one in heartbeat.gone if one.hash in awaited and one.hash not in named]
    if heartbeat.snapshot:
        found += [prefix for prefix in awaited if prefix not in named]
    return tuple(dict.fromkeys(found))
