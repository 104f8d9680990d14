"""Directed links and the tunnels over them: what is sent arrives later, once or twice, in order or not, or not at all.

A link keeps order unless jitter is on it; a partition holds messages back; what is on a tunnel that breaks is lost.
Nothing is drawn here: delays and repetitions are what the schedule's faults say, dealt to messages in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.simulation.agenda import Action, Agenda


class Link:
    """One direction between two nodes."""

    def __init__(self, agenda: Agenda, latency_ms: float) -> None:
        self._agenda = agenda
        self._latency_ms = latency_ms
        self._last_ms = 0.0
        self._held_until = 0.0
        self._jitter: tuple[float, tuple[float, ...]] = (0.0, ())
        self._repeat: tuple[float, int] = (0.0, 0)
        self._sent = 0

    def partition(self, ms: float) -> None:
        """Nothing arrives for so long."""
        self._held_until = max(self._held_until, self._agenda.now + ms)

    def jitter(self, ms: float, pattern: tuple[float, ...]) -> None:
        """For so long message i takes pattern[i mod n] ms longer, and may overtake."""
        self._jitter = (self._agenda.now + ms, pattern)

    def repeat(self, ms: float, every: int) -> None:
        """For so long every n-th message arrives twice."""
        self._repeat = (self._agenda.now + ms, max(1, every))

    def send(self, action: Action, *arguments: object, once: bool = False) -> None:
        """Calls `action` at the other end; `once`: this message is never repeated."""
        now = self._agenda.now
        self._sent += 1
        arrival = max(now, self._held_until) + self._latency_ms
        until, pattern = self._jitter
        if now < until:
            arrival += pattern[self._sent % len(pattern)]
        else:
            arrival = max(arrival, self._last_ms)
            self._last_ms = arrival
        self._agenda.at(arrival, action, *arguments)
        until, every = self._repeat
        if not once and now < until and self._sent % every == 0:
            self._agenda.at(arrival + 2 * self._latency_ms, action, *arguments)


class Links:
    """All of them, made when first used."""

    def __init__(self, agenda: Agenda, latency_ms: float) -> None:
        self._agenda, self._latency_ms = agenda, latency_ms
        self._links: dict[tuple[str, str], Link] = {}

    def of(self, source: str, target: str) -> Link:
        """The link from one node to another."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link(self._agenda, self._latency_ms)
        return link


@dataclass(slots=True, eq=False)
class Tunnel:
    """One tunnel of a router process to a worker process; each end knows by itself whether it is up."""

    number: int
    router: str
    worker: str
    router_up: bool = True
    worker_up: bool = True
