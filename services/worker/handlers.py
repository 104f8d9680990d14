"""What the worker's shell asks of the parts that move bytes: restore, checkpoint, local chunk bytes, measurements.

The shell (endpoint, page pool, controller machine) knows pages by number and never touches a tensor. These protocols
are the whole seam; `assembly` plugs in one implementation of each. Everything here is called on the event-loop thread
unless said otherwise, must return quickly, and must do its own work elsewhere (threads, device streams).

Restore. The pool has reserved the pages of an assignment and marked those to be filled *loading*. `Restorer.restore`
fills them node by node, in chain order; a node counts as landed when its last upload event is complete and not before.
It never raises for a chunk that is gone, late or damaged: it ends with the boundary it reached, and the shell either
restores what a shorter boundary still lacks or prefills. `stop` set: finish the node under way, then end (the current
node's boundary is kept). The pages stay valid until `restore` has returned, whatever happens to the assignment
meanwhile.

Checkpoint. The shell offers each completed, immutable range once, in chain order per route: at every chunk boundary a
computation passes, and at a generation's end the tail. `Checkpointer.offer` only queues a description; it holds no
pages. When staging admits the range, the checkpointer leases its pages (`PageLeases.lease`), copies them out, releases
the lease as soon as the copy's event is complete, then goes on with file, object, fact. A lease names exactly the
groups that still hold the whole range: a windowed group may be behind its window by then and is left out; the full-
attention group is always there while the route is resident. None = the range is no longer resident: count it as lost
and drop what hangs on it. At most one lease per route at a time (the pool's page budget depends on it): a second one
raises LeaseHeldError. Each offer ends in exactly one `PageLeases.settled`: `durable` makes the route evictable up to
there, otherwise the range was given up for good (it then does not protect the route from eviction either). Skipping
because staging is full is no end: count it and retry in chain order. A drain offers what was given up while store or
catalog were away once more by itself, from what this machine has kept of it; that offer's end is settled too.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libs.contracts.segue.v1 import worker_pb2
from libs.controller.catalog_facts import Node
from libs.controller.protocol import (
    AssignmentId,
    DecodeCost,
    FinishReason,
    GenerationRequest,
    PrefillCost,
    Tier,
    TierCost,
    TokenLogprobs,
)


class LeaseHeldError(RuntimeError):
    """A route's pages were leased a second time before the first lease was released."""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of one layer group in token order: `pages[i]` holds positions [start + i * page, start + (i + 1) * page).

    `start` is a multiple of the page size; `end` too, except for a lease that ends at a tail (a multiple of 16).
    """

    group: str
    start: int
    end: int
    pages: tuple[int, ...]


# --- runtime ---


class JobPages(Protocol):
    """The live page tables of one job. `begin` and `prepare` belong to the thread that submits to the device.

    Full-attention groups are mapped for the whole budget from the start and never change. A windowed group is mapped as
    the job goes: pages behind its window are given back and used again further on, so before submitting rows for
    positions below `end` the loop calls `prepare(end)` and uploads the tables it names (rarely any: a table gains at
    least a chunk's pages at once). Entries behind the window are -1 and never read. `prepare` never fails for want of
    pages as long as one step writes at most the pool's `step_tokens` of one job.
    """

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """By group name: logical page → page id, -1 where nothing is mapped."""
        ...

    def begin(self) -> JobStart:
        """Once, when the job gets its lane and before its first row: a longer prefix may have become resident
        meanwhile.
        """
        ...

    def prepare(self, end: int) -> Sequence[str]:
        """Maps what rows up to position `end` (exclusive) write; names the groups whose tables changed."""
        ...

    def computed(self, end: int) -> None:
        """Rows up to position `end` are done: their pages are resident (on CUDA: ordered behind them on the stream)."""
        ...


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy-on-write: the first `slots` tokens of `source` go to `target`, in every layer of the group."""

    group: str
    source: int
    target: int
    slots: int


@dataclass(frozen=True, slots=True)
class JobStart:
    """Prefill begins at position `start`; `copies` must be done before the first row."""

    start: int
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One run: prefill of `request.tokens[pages.begin().start:]`, then decode until a stop token or the budget.

    `cached`: computed tokens so far; `begin` may find more. `likely`: how many it is expected to find, for estimates.
    """

    assignment: AssignmentId
    request: GenerationRequest
    pages: JobPages
    cached: int = 0
    likely: int = 0

    @property
    def pending(self) -> int:
        """Tokens it will probably compute before its first one can be drawn."""
        return len(self.request.tokens) - max(self.cached, self.likely)


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The job has a lane; `start` = its cached tokens."""

    assignment: AssignmentId
    start: int


@dataclass(frozen=True, slots=True)
class JobAdvanced:
    """A part of the input is computed, not the last. Optional: lets long prompts be checkpointed as they go."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class JobPrefilled:
    """Every input token is computed, `computed` of them by this job (the pending token included). `drawing_ms`: what of
    the step counts as the first token's: a decode step's time, as `DecodeCost` tells it. `behind_ms`: what rows of
    prompts that came before it took of the step with its first ones.
    """

    assignment: AssignmentId
    computed: int
    drawing_ms: float = 0.0
    behind_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class JobTokens:
    """What one iteration drew for one job."""

    assignment: AssignmentId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Nothing of the job touches its pages any more. Exactly one of: regular end, `error`, cancelled."""

    assignment: AssignmentId
    finish: FinishReason = FinishReason.UNSPECIFIED
    error: str = ""
    cancelled: bool = False


JobEvent = JobStarted | JobAdvanced | JobPrefilled | JobTokens | JobEnded


@dataclass(frozen=True, slots=True)
class QueueState:
    """What waits and runs. `ms`: predicted wait of a new job for a lane and its first prompt row."""

    ms: float
    decoding: int
    waiting: int


class Runtime(Protocol):
    """The device loop as the shell sees it. `submit` and `cancel` only queue; events come back in batches."""

    def start(self, sink: Callable[[Sequence[JobEvent]], None]) -> None:
        """Starts the loop. `sink` is called once per iteration that has news, from any thread."""
        ...

    def submit(self, job: Job) -> None:
        """Queues the job."""
        ...

    def cancel(self, assignment: AssignmentId) -> None:
        """Ends the job at its next boundary with `JobEnded(cancelled=True)`; a job that has ended is left alone."""
        ...

    def queue(self, coming: Sequence[int] = ()) -> QueueState:
        """Now; cheap. `coming`: prompt tokens of jobs that are as good as queued, one number each."""
        ...

    async def warmup(self) -> None:
        """Compiles, touches and measures; before it returns no job may be submitted."""
        ...

    async def aclose(self) -> None:
        """Ends the loop at its next boundary; every job still there ends cancelled."""
        ...


# --- restore ---


@dataclass(frozen=True, slots=True)
class NodeFill:
    """One chain node and the pages its objects go to; groups not named need no load. Rows outside a fill's range are
    unused.
    """

    node: Node
    tokens: tuple[int, ...]
    """The request's token ids of [node.start, node.end): to be compared with the object's."""
    fills: tuple[GroupPages, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to bring to the device for one assignment, in chain order."""

    assignment: AssignmentId
    fingerprint: str
    owner: str
    boundary: int
    """End of the last node."""
    nodes: tuple[NodeFill, ...]
    spent_ms: float = 0.0
    """What earlier plans of this assignment have taken."""


@dataclass(frozen=True, slots=True)
class LandedNode:
    """A node whose every fill is on the device, its upload event complete."""

    assignment: AssignmentId
    end: int
    tier: Tier
    """Where its bytes came from: RAM, SSD, PEER or OBJECT."""
    bytes: int


class RestoreEnd(enum.Enum):
    """Why a restore ended. Everything but DONE leaves a shorter boundary, which is not an error."""

    DONE = "done"
    STOPPED = "stopped"
    GONE = "gone"
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    """The tiers answered with errors or not in time, or too late to be worth waiting for."""


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """`boundary` = end of the last landed node (the plan's start if none)."""

    end: RestoreEnd
    boundary: int
    detail: str = ""


class Restorer(Protocol):
    """Brings chunks into pages. Owns fetches, staging and uploads, each bounded; concurrent requests for one chunk
    share.
    """

    async def restore(
        self, plan: RestorePlan, landed: Callable[[LandedNode], None], stop: asyncio.Event
    ) -> RestoreOutcome:
        """Runs the plan; `landed` is called on the event-loop thread once per node, in order.

        Never raises for a fault of storage. A task cancelled here must still wait for its uploads before it ends.
        """
        ...

    async def aclose(self) -> None:
        """Ends fetches and uploads; after it nothing writes to a page."""
        ...


# --- checkpoint ---


@dataclass(frozen=True, slots=True)
class CheckpointRange:
    """A completed range of a route: one full chunk, or a tail (its length a multiple of 16). Holds no pages."""

    route: int
    """The pool's route id; never reused."""
    assignment: AssignmentId
    fingerprint: str
    owner: str
    parent: str
    hash: str
    start: int
    end: int
    tail: bool
    tokens: tuple[int, ...] = field(repr=False)
    """Token ids of [start, end)."""
    traceparent: str = field(default="", compare=False)
    """Of the request that computed it, which may be over when the checkpoint begins; empty = not traced."""


class Lease(Protocol):
    """Pins the pages of one range: they are neither freed, evicted nor reused before `release`. Thread-safe."""

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """The groups that hold the whole range."""
        ...

    def release(self) -> None:
        """Idempotent."""
        ...


class PageLeases(Protocol):
    """The pool as the checkpointer sees it. Thread-safe; never blocks for longer than the pool's lock."""

    def lease(self, wanted: CheckpointRange) -> Lease | None:
        """None: the range is not resident any more. Raises LeaseHeldError for a second lease of one route."""
        ...

    def settled(self, what: CheckpointRange, *, durable: bool) -> None:
        """The offer has ended: published (a fact stands, whoever wrote it), or given up for good."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """pending: offered and not settled. dropped: skips because staging was full, since start. lost: given up, since
    start.
    """

    pending: int
    dropped: int
    lost: int


class Checkpointer(Protocol):
    """Makes ranges durable beside the decode. Never delays a token."""

    def offer(self, what: CheckpointRange) -> None:
        """Queues the range (bounded; a range that finds the queue full is settled as given up). Returns at once."""
        ...

    def counts(self) -> CheckpointCounts:
        """Now."""
        ...

    async def drain(self, seconds: float) -> int:
        """Finishes what is queued and staged within the time; returns how many ranges could not be published."""
        ...

    async def aclose(self) -> None:
        """Stops; gives up what is left and releases every lease."""
        ...


# --- local chunks ---


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes in the chunk directory and its cap."""

    used: int
    cap: int


class ChunksBusyError(RuntimeError):
    """As many chunk objects are being sent to peers as may be."""


class LocalChunks(Protocol):
    """The worker's own chunk bytes (host memory, chunk directory), as peers and the registration need them."""

    @property
    def node(self) -> str:
        """UUID stored in the chunk directory; empty = no local tier."""
        ...

    def open(self, wanted: worker_pb2.FetchChunkRequest) -> AsyncGenerator[worker_pb2.FetchChunkResponse, None]:
        """Pieces of at most 1 MiB. Raises, before the first piece, KeyError if the object is not there and
        ChunksBusyError where too many are being sent.
        """
        ...

    def disk(self) -> DiskUse:
        """Cheap: kept by accounting."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """One chunk or tail in host memory: where it ends, its variant, the groups held; `groups` empty = all of them."""

    end: int
    fingerprint: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryChanges:
    """By hash. `snapshot`: `came` is everything, whatever was known before."""

    version: int
    came: Mapping[str, InMemory]
    went: tuple[str, ...]
    snapshot: bool


class MemoryResidency(Protocol):
    """What lies in host memory, as heartbeats tell it."""

    def since(self, version: int | None) -> MemoryChanges:
        """What came (or changed) and went after `version`; a snapshot where None, or where that is too long ago."""
        ...

    def listen(self, came: Callable[[], None]) -> None:
        """Calls `came`, from any thread, whenever something has come that is news: requests may be held for it."""
        ...


# --- measurements ---


class ComputeMeasurements(Protocol):
    """What the runtime measures of itself; each list ascending, empty until measured."""

    def prefill(self) -> Sequence[PrefillCost]: ...

    def decode(self) -> Sequence[DecodeCost]: ...


class TierMeasurements(Protocol):
    """What the chunk tiers measure of themselves. TIER_GPU stands for staging → device."""

    def tiers(self) -> Sequence[TierCost]: ...
