"""What the shell is to do after an event: one ``Ready`` (as in etcd's raft library), obeyed in the order of fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .contours import Move
from .generation import GenerationKey
from .model import Endpoint, WriterId
from .readiness import Readiness


class Notice(StrEnum):
    """What an operator should know."""

    DRAIN_TTL = "drain-ttl"  # a draining writer is past it
    EMPTY_MAP_REFUSED = "empty-map-refused"
    ENDPOINT_VANISHED = "endpoint-vanished"
    ENDPOINT_LAPSED = "endpoint-lapsed"
    ENDPOINT_RETURNED = "endpoint-returned"
    QUARANTINED = "quarantined"
    PENDING_EXPIRED = "pending-expired"
    COMMIT_LEFT_MISSING = "commit-left-missing"
    SWAP_REFUSED = "swap-refused"  # there is no map yet


@dataclass(frozen=True, slots=True)
class Warn:
    """One of them and what it is about."""

    kind: Notice
    about: str


@dataclass(frozen=True, slots=True)
class Dial:
    """Bring up a tunnel, validate it, then feed Connected under the publication guard; or DialFailed, DialAbandoned."""

    writer: WriterId
    endpoint: Endpoint
    generation: int
    replaces: WriterId | None


@dataclass(frozen=True, slots=True)
class CloseWriter:
    """End the writer's tunnel in order; its end comes back as Ended."""

    writer: WriterId
    why: Move


@dataclass(frozen=True, slots=True)
class Ready:
    """See the module. ``wake_at``: feed a Tick then at the latest."""

    published: tuple[WriterId, ...] = ()
    refused: tuple[WriterId, ...] = ()  # connected too late: close their tunnels, they are nobody's
    closes: tuple[CloseWriter, ...] = ()
    cancels: tuple[WriterId, ...] = ()  # dials that are wanted no more
    dials: tuple[Dial, ...] = ()
    probes: tuple[Endpoint, ...] = ()
    commit: GenerationKey | None = None  # take the publication guard and feed CommitGeneration
    warnings: tuple[Warn, ...] = ()
    readiness: Readiness | None = None  # if it has changed
    bindable: bool = False  # a writer takes binds that took none before: who waits should look again
    released: bool = False  # shut down and nothing left
    wake_at: float | None = None


@dataclass(slots=True)
class Outbox:
    """A Ready in the making."""

    published: list[WriterId] = field(default_factory=list)
    refused: list[WriterId] = field(default_factory=list)
    closes: list[CloseWriter] = field(default_factory=list)
    cancels: list[WriterId] = field(default_factory=list)
    dials: list[Dial] = field(default_factory=list)
    probes: list[Endpoint] = field(default_factory=list)
    warnings: list[Warn] = field(default_factory=list)
    commit: GenerationKey | None = None
    readiness: Readiness | None = None
    bindable: bool = False
    released: bool = False

    def warn(self, kind: Notice, about: object) -> None:
        """Add a warning."""
        self.warnings.append(Warn(kind, str(about)))

    def seal(self, wake_at: float | None) -> Ready:
        """The finished value."""
        return Ready(
            tuple(self.published),
            tuple(self.refused),
            tuple(self.closes),
            tuple(self.cancels),
            tuple(self.dials),
            tuple(self.probes),
            self.commit,
            tuple(self.warnings),
            self.readiness,
            self.bindable,
            self.released,
            wake_at,
        )
