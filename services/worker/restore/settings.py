"""What restores may use, and what they count."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestoreSettings:
    """Bounds of restoring.

    fetches: objects fetched at a time (threads). fetch_bytes: bytes fetched and not yet uploaded. persist_bytes: bytes
    from the object store waiting to be written to the chunk directory; beyond it they are not kept there.
    fragment_bytes: size of a pipeline step. ring_fragments: staging buffers where the device is not the host.
    fetch_timeout_s: longest wait for one object. rest_s: how long a source that did not answer is left alone.
    """

    fetches: int = 4
    fetch_bytes: int = 256 << 20
    persist_bytes: int = 128 << 20
    fragment_bytes: int = 4 << 20
    ring_fragments: int = 4
    fetch_timeout_s: float = 3.0
    rest_s: float = 5.0


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
    bytes_ssd: int = _counter("Bytes restored from the chunk directory")
    bytes_object: int = _counter("Bytes restored from the object store")
    shared: int = _counter("Fetches that joined one under way")
    corrupt: int = _counter("Objects found damaged")
    gone: int = _counter("Objects that no source had")
    unavailable: int = _counter("Objects whose sources failed or were late")
    resting: int = _counter("Times a source was passed over because it had just failed")
    persisted: int = _counter("Objects from the object store kept in the chunk directory")
    persist_dropped: int = _counter("Objects from the object store not kept: no room, or the queue full")
    done: int = _counter("Restores that reached their boundary")
    shorter: int = _counter("Restores that ended before their boundary")
