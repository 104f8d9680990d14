"""One trace across ingress, router and worker, with a span per phase, as a collector receives it.

Two turns; between them the first one's worker is killed, so that the second turn restores and its trace shows every
phase there is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress

from cli.demo.scenario import demo_text
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage, on
from tests.fixtures.otlp import ReceivedSpan, waterfall

CLAIM = Claim("2-trace", "one trace across ingress, router and worker has a span per phase, each below what caused it")

PHASES = {
    "segue-ingress": ("POST /v1/completions", "generate"),
    "segue-router": ("route", "plan", "offer"),
    "segue-worker": (
        *("worker.reserve", "worker.queue", "worker.restore"),
        *("worker.prefill", "worker.decode", "worker.checkpoint"),
    ),
}
BELOW = {
    "generate": "POST /v1/completions",
    "route": "generate",
    "plan": "route",
    "offer": "route",
    **dict.fromkeys(PHASES["segue-worker"], "offer"),
}
"""What each span's parent is."""
_IN_ORDER = ("worker.reserve", "worker.restore", "worker.prefill", "worker.decode")
"""Of one restored request. `worker.queue` lasts from the reservation to the lane, whatever is done meanwhile."""
_EXPORT_S = 15.0
_HISTORY = 1_536


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    async with on(stage) as at:
        trace, parent = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        ids = (await at.talker.tokenize(demo_text() * 2))[:_HISTORY]
        first = await at.talker.complete(ids, 16)
        await at.facts.durable(first.processed)
        home = at.cluster.workers[first.served.worker]
        home.child.kill()
        await home.child.wait_crashed()
        await at.facts.worker_gone(home.name)
        body = {
            "model": at.model,
            "prompt": first.served.prompt_token_ids + first.served.token_ids + ids[:20],
            "max_tokens": 16,
            "temperature": 0,
        }
        reply = await at.http.post(at.cluster.base_url + "/completions", json=body, headers=headers, timeout=60)
        reply.raise_for_status()
        spans = await _received(at, trace)
        judge(checks, spans, parent)
        await at.facts.worker_heard(home.name, newer_than=first.served.epoch)
    return checks.outcome({"waterfall": waterfall(spans).splitlines() if spans else []})


async def _received(at: Stage, trace: str) -> list[ReceivedSpan]:
    """The trace's spans, once every phase has come or the exporters have had their time."""
    wanted = {name for names in PHASES.values() for name in names}

    def here() -> list[ReceivedSpan]:
        return at.spans.traces().get(trace, [])

    def whole(spans: list[ReceivedSpan]) -> bool:
        return spans[0].trace_id == trace and wanted <= {span.name for span in spans}

    with suppress(AssertionError):  # judged by what is there: it says what is missing
        return await at.spans.wait_for(whole, "every phase", _EXPORT_S)
    return here()


def judge(checks: Checks, spans: Sequence[ReceivedSpan], caller: str) -> None:
    """Whether `spans`, one trace, tell the whole story of one restored request of a caller's span."""
    by_id = {span.span_id: span for span in spans}
    for service, names in PHASES.items():
        for name in names:
            found = [span for span in spans if span.name == name]
            checks.check(f"{name}: of {service}", [one.service for one in found], service, _all_of(found, service))
            if name in BELOW:
                above = [by_id[one.parent_id].name if one.parent_id in by_id else "?" for one in found]
                checks.check(f"{name}: below {BELOW[name]}", [*above], BELOW[name], set(above) == {BELOW[name]})
    top = [span for span in spans if span.name == PHASES["segue-ingress"][0]]
    checks.equal("the ingress continues the caller's trace", [span.parent_id for span in top], [caller])
    failed = [f"{span.name}: {span.error}" for span in spans if span.error is not None]
    checks.equal("no span of a good request failed", [*failed], [])
    starts = {span.name: span.start_ns for span in spans}
    order = [name for name in _IN_ORDER if name in starts]
    checks.equal("the phases begin in order", [*order], [*sorted(order, key=lambda name: starts[name])])
    if top:
        latest = max((s.end_ns for s in spans if s.name in _IN_ORDER), default=0)
        late = (latest - max(span.end_ns for span in top)) / 1e6
        checks.check("phases lie within the request (ms after its end)", round(late, 1), "<= 50", late <= 50)


def _all_of(found: Sequence[ReceivedSpan], service: str) -> bool:
    return bool(found) and all(span.service == service for span in found)
