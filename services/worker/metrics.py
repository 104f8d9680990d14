"""What the worker counts, for /metrics: read from the parts that own the numbers, at scrape time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from libs.service.metrics import Metrics
from services.worker.assembly import Worker


def _gauge(about: str) -> int:
    found: int = field(default=0, metadata={"help": about, "kind": "gauge"})
    return found


@dataclass
class PageGauges:
    """Pages of one layer group by state."""

    total: int = _gauge("Pages the device holds")
    free: int = _gauge("Free pages")
    reserved: int = _gauge("Pages promised to an assignment and not yet filled")
    loading: int = _gauge("Pages being filled by a restore")
    resident: int = _gauge("Pages that hold attention state")
    evicting: int = _gauge("Pages that lost their route and are still being read")
    evictable: int = _gauge("Resident pages that could be evicted now")


@dataclass
class LoadGauges:
    """What is under way."""

    active: int = _gauge("Assignments under way")
    decoding: int = _gauge("Assignments decoding")
    waiting: int = _gauge("Assignments waiting for a lane")
    parked: int = _gauge("Of them, waiting for a prefix that another one is computing")
    queue_ms: int = _gauge("Predicted wait of a new assignment for a lane, ms")
    tunnels: int = _gauge("Tunnels of routers")
    listed: int = _gauge("1 while the worker's lease in the catalog holds, as far as it knows")


def export(metrics: Metrics, worker: Worker) -> None:
    """Exports everything the worker counts."""

    def pages() -> Iterable[tuple[Sequence[str], PageGauges]]:
        for name, found in worker.engine.pool.pages().items():
            yield (
                (name,),
                PageGauges(
                    found.total,
                    found.free,
                    found.reserved,
                    found.loading,
                    found.resident,
                    found.evicting,
                    found.evictable,
                ),
            )

    def load() -> Iterable[tuple[Sequence[str], LoadGauges]]:
        found = worker.interpreter.load()
        tunnels = worker.attach.registry.snapshot().tunnels
        listed = int(worker.registration.listed)
        parked, queue_ms = len(worker.interpreter.parking), round(found.queue_ms)
        yield (), LoadGauges(found.active, found.decoding, found.waiting, parked, queue_ms, tunnels, listed)

    metrics.export_each("pages", PageGauges, pages, labels=("group",))
    metrics.export_each("", LoadGauges, load)
    metrics.registry.register(_Tallies(worker))


class _Tallies(Collector):
    """Counters whose label values are only known when they happen."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        interpreter, pool = self._worker.interpreter, self._worker.engine.pool
        yield _tally(
            "declines",
            "Offers declined",
            "reason",
            ((reason.name.lower(), count) for reason, count in interpreter.machine.declines.items()),
        )
        yield _tally("results", "Assignments ended", "status", interpreter.results.items())
        yield _tally(
            "evicted_pages",
            "Pages that lost their content",
            "reason",
            ((reason.value, count) for reason, count in pool.evictions.pages.items()),
        )
        fences = ((f"{event}:{name.value}", count) for (event, name), count in interpreter.fence.counts.items())
        yield _tally("fenced", "Events that changed nothing", "what", fences)
        accepted = CounterMetricFamily("segue_worker_accepted", "Offers accepted")
        accepted.add_metric((), interpreter.accepted)
        yield accepted
        late = CounterMetricFamily(
            "segue_worker_late_events", "Transfer events for pages that had lost their assignment"
        )
        late.add_metric((), pool.late)
        yield late


def _tally(name: str, about: str, label: str, values: Iterable[tuple[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"segue_worker_{name}", about, labels=[label])
    for value, count in sorted(values):
        family.add_metric([value], count)
    return family
