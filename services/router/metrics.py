"""What the router measures. No label names a tenant or a request.

Counts of the pure machines (fences, wire, discovery) are read where they are kept, at scrape time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from libs.controller.protocol import DeclineReason, Tier
from libs.controller.router_effects import Decision, Outcome

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_OFF = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_PLAN = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

Read = Callable[[], Iterable[tuple[tuple[str, ...], float]]]
"""Label values and the number, read at scrape time."""


class _Family(Collector):
    """One metric whose numbers lie elsewhere."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], read: Read, gauge: bool) -> None:
        self._made = GaugeMetricFamily if gauge else CounterMetricFamily
        self._name, self._help, self._labels, self._read = name, help_text, labels, read

    def describe(self) -> Iterator[Metric]:
        yield self._made(self._name, self._help, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = self._made(self._name, self._help, labels=self._labels)
        for values, number in self._read():
            family.add_metric(values, number)
        yield family


class RouterMetrics:
    """Registers itself in `registry`; the methods are the observers that the parts are given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"segue_router_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"segue_router_{name}", text, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests", "Requests that ended, by outcome or error code", "outcome")
        self._attempts = counter("attempts", "Attempts that ended, by outcome", "outcome")
        self._declines = counter("declines", "Offers that a worker declined, by reason", "reason")
        self.offers = counter("offers", "Offers made to workers")
        self.offer_timeouts = counter("offer_timeouts", "Offers not answered in time")
        self.resumes = counter("resumes", "Attempts that went on from tokens delivered by an earlier one")
        self._lookups = counter(
            "lookups",
            "Look-ups of chunk facts at the catalog: in_time, late, failed, skipped (too many under way), or covered "
            "(not asked: an idle worker holds the request up to less than a chunk)",
            "answer",
        )
        self._ttft = histogram(
            "ttft_seconds", "Offer to first delta, predicted and as measured here", _TTFT, "kind", "tier"
        )
        self._ttft_error = histogram(
            "ttft_error_ratio", "|predicted - measured| / measured time to first token", _ERROR, "tier"
        )
        self._ttft_off = histogram(
            "ttft_error_seconds", "|predicted - measured| time to first token, in seconds", _OFF, "tier"
        )
        self._plan = histogram("plan_seconds", "Duration of a plan, the catalog's answer included", _PLAN)
        self._rank = histogram("rank_seconds", "Part of a plan that computes: chains, candidates, ranking", _PLAN)
        # Series exist from the start, or a first one would be no increase.
        for outcome in Outcome:
            self._attempts.labels(outcome.value)
        for reason in DeclineReason:
            if reason is not DeclineReason.UNSPECIFIED:
                self._declines.labels(reason.name.lower())
        for answer in ("in_time", "late", "failed", "skipped", "covered"):
            self._lookups.labels(answer)
        for outcome_name in ("completed", "cancelled"):
            self._requests.labels(outcome_name)

    def ended(self, outcome: str) -> None:
        """A request had its terminal delivery."""
        self._requests.labels(outcome).inc()

    def lookup(self, answer: str) -> None:
        """A look-up was answered, or not."""
        self._lookups.labels(answer).inc()

    def planned(self, seconds: float, computed: float) -> None:
        """A plan was made."""
        self._plan.observe(seconds)
        self._rank.observe(computed)

    def decided(self, decision: Decision) -> None:
        """The attempts of one plan have ended."""
        for record in decision.attempts:
            self._attempts.labels(record.outcome.value).inc()
            if record.outcome is Outcome.DECLINED:
                self._declines.labels(record.decline.name.lower()).inc()
            elif record.outcome is Outcome.TIMED_OUT:
                self.offer_timeouts.inc()
            measured = record.measured_ttft_ms
            if measured is None:
                continue
            tier: Tier = decision.ranked[record.choice].candidate.tier
            label = tier.name.lower()
            self._ttft.labels("predicted", label).observe(record.predicted_ttft_ms / 1_000)
            self._ttft.labels("measured", label).observe(measured / 1_000)
            off = abs(record.predicted_ttft_ms - measured)
            self._ttft_off.labels(label).observe(off / 1_000)
            if measured > 0:
                self._ttft_error.labels(label).observe(off / measured)

    def counts(self, name: str, text: str, labels: tuple[str, ...], read: Read) -> None:
        """Exports counters that are kept elsewhere."""
        self._registry.register(_Family(f"segue_router_{name}", text, labels, read, gauge=False))

    def gauges(self, name: str, text: str, labels: tuple[str, ...], read: Read) -> None:
        """Exports gauges that are kept elsewhere."""
        self._registry.register(_Family(f"segue_router_{name}", text, labels, read, gauge=True))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Exports one number that is kept elsewhere."""
        Gauge(f"segue_router_{name}", text, registry=self._registry).set_function(read)


def by_name(counts: Mapping[str, int]) -> list[tuple[tuple[str, ...], float]]:
    """For `RouterMetrics.counts`: a counter by one label."""
    return [((name,), float(number)) for name, number in counts.items()]
