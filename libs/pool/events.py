"""What can happen to the pool. Frozen values; the time comes beside them, in monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .generation import GenerationKey
from .knobs import PoolPolicy
from .model import Endpoint, EndpointKey, Target, WriterId


class End(Enum):
    """How a writer's tunnel ended, as far as that matters here."""

    LOST = "lost"
    IDLE = "idle"  # closed by a peer that wants no idle connections: expected
    LEAVING = "leaving"  # closed by a worker that goes away in order
    CLOSED = "closed"  # by this end


@dataclass(frozen=True, slots=True)
class MapRead:
    """The source of the desired map says this."""

    endpoints: tuple[Endpoint, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A dial has come to a validated tunnel. Fed under the publication guard: handling it publishes the writer."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class DialFailed:
    """A dial has not."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class DialAbandoned:
    """A dial was given up here: it says nothing about the endpoint."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A probe is over."""

    endpoint: EndpointKey
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A published writer's tunnel is gone, with all its routes."""

    writer: WriterId
    end: End


@dataclass(frozen=True, slots=True)
class Bound:
    """A route was bound to the writer. Fed under the binding lock."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class Unbound:
    """A route of the writer has ended, for whatever reason. Of a writer that is gone it changes nothing."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody would bind here and cannot."""

    target: Target


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """Why the writer is degraded; empty = well."""

    writer: WriterId
    reasons: frozenset[str]


@dataclass(frozen=True, slots=True)
class Identified:
    """The process behind the writer has said which it is."""

    writer: WriterId
    incarnation: int


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """An operator takes a worker out of use, or (``drained`` false) back in. ``address`` empty = all of them."""

    worker: str
    address: str = ""
    drained: bool = True


@dataclass(frozen=True, slots=True)
class SwapGeneration:
    """An operator wants every tunnel made anew."""


@dataclass(frozen=True, slots=True)
class CommitGeneration:
    """The publication guard is held: commit this generation if everything still holds."""

    key: GenerationKey


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Other knobs from here on."""

    policy: PoolPolicy


@dataclass(frozen=True, slots=True)
class BeginShutdown:
    """The end: routes may still finish for that long."""

    grace_s: float


PoolEvent = (
    MapRead
    | Tick
    | Connected
    | DialFailed
    | DialAbandoned
    | ProbeEnded
    | Ended
    | Bound
    | Unbound
    | Wanted
    | HealthChanged
    | Identified
    | DrainWorker
    | SwapGeneration
    | CommitGeneration
    | SetPolicy
    | BeginShutdown
)
