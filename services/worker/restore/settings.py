"""What restores may use, and what they count."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestoreSettings:
    """Bounds of restoring.

    fetches: objects fetched at a time (threads). fetch_bytes: bytes fetched and not yet uploaded. persist_bytes: bytes
    that came from elsewhere waiting to be kept in host memory and chunk directory; beyond it they are not kept.
    fragment_bytes: size of a pipeline step. ring_fragments: staging buffers where the device is not the host.
    fetch_timeout_s: longest wait for one object. rest_s: how long a source that did not answer is left alone.
    hedges: reads beyond one per object, over all restores, those that were ended and still run included.
    hedge_floor_ms: no read counts as late before. loss_ms, loss_share: what a restore may lose against computing, by
    which it must have paid off (see `budget`): the larger of the two holds.
    """

    fetches: int = 4
    fetch_bytes: int = 256 << 20
    persist_bytes: int = 128 << 20
    fragment_bytes: int = 4 << 20
    ring_fragments: int = 4
    fetch_timeout_s: float = 3.0
    rest_s: float = 5.0
    hedges: int = 2
    hedge_floor_ms: float = 100.0
    loss_ms: float = 300.0
    loss_share: float = 0.1


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class RestoreCounts:
    """Counters of restoring."""

    active: int = _counter("Restores under way", "gauge")
    fetching: int = _counter("Objects being fetched", "gauge")
    fetch_bytes: int = _counter("Bytes admitted and not yet released", "gauge")
    waiting: int = _counter("Fetches waiting for room", "gauge")
    nodes: int = _counter("Chunks and tails restored")
    bytes_ram: int = _counter("Bytes restored from host memory")
    bytes_ssd: int = _counter("Bytes restored from the chunk directory")
    bytes_peer: int = _counter("Bytes restored from peers")
    bytes_object: int = _counter("Bytes restored from the object store")
    shared: int = _counter("Fetches that joined one under way")
    corrupt: int = _counter("Objects found damaged")
    gone: int = _counter("Objects that no source had")
    unavailable: int = _counter("Objects whose sources failed or were late")
    resting: int = _counter("Times a source was passed over because it had just failed")
    hedging: int = _counter("Reads under way beyond one per object, those that were ended included", "gauge")
    hedged: int = _counter("Times the next source was asked because a read was late")
    hedges_won: int = _counter("Times the source asked later delivered first")
    ended_reads: int = _counter("Reads ended because another delivered first, or nobody wanted them any more")
    ended_bytes: int = _counter("Bytes that ended reads had moved")
    too_slow: int = _counter("Restores given up because computing was quicker by then")
    not_begun: int = _counter("Restores not begun because computing was expected to be quicker")
    remembered: int = _counter("Objects from elsewhere kept in host memory")
    persisted: int = _counter("Objects from peers and the object store kept in the chunk directory")
    persist_dropped: int = _counter("Objects from elsewhere not kept: no room, or the queue full")
    done: int = _counter("Restores that reached their boundary")
    shorter: int = _counter("Restores that ended before their boundary")
