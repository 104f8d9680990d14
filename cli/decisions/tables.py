"""Tables of `segue decisions`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cli.decisions.records import decline_word, outcome_word, tier_word, time_text
from cli.decisions.replay import Replayed
from libs.contracts.segue.v1 import catalog_pb2 as pb


def decisions(records: Iterable[pb.DecisionRecord]) -> None:
    """One row each."""
    table = Table("decided", "request", "plan", "model", "worker", "tier", "attempts", box=None, header_style="bold")
    for name in ("cached", "of", "ranked", "predicted", "measured"):
        table.add_column(name, justify="right")
    for record in records:
        last = record.attempts[-1]
        chosen = record.ranked[last.choice]
        table.add_row(
            time_text(record.decided_ms),
            record.request_id,
            str(record.plan_id),
            record.model,
            chosen.worker,
            tier_word(chosen),
            ", ".join(_ended(attempt) for attempt in record.attempts),
            str(chosen.cached_tokens),
            str(record.prompt_tokens + record.resumed_at),
            str(len(record.ranked)),
            _ms(last.predicted_ttft_ms),
            _ms(last.measured_ttft_ms) if last.HasField("measured_ttft_ms") else "-",
        )
    Console(soft_wrap=True).print(table)


def decision(record: pb.DecisionRecord) -> None:
    """All of one: attempts, every ranked candidate with every term, what was pruned."""
    out = Console(soft_wrap=True)
    head = Table(box=None, show_header=False)
    resumed = f", {record.resumed_at} generated tokens delivered before" if record.resumed_at else ""
    head.add_row("request", f"{record.request_id}, plan {record.plan_id}")
    head.add_row("decided", f"{time_text(record.decided_ms)} by router {record.router}")
    head.add_row("model", f"{record.model} ({record.fingerprint[:16]})")
    head.add_row("prompt", f"{record.prompt_tokens} tokens{resumed}")
    head.add_row("facts", f"etcd's revision {record.facts_revision}" if record.facts_revision else "from memory")
    if record.held_ms:
        head.add_row("held", f"{_ms(record.held_ms)} ms, while others computed a prefix of it")
    if record.avoid:
        head.add_row("avoided", ", ".join(record.avoid))
    if record.pruned:
        head.add_row("pruned", ", ".join(f"{one.count} {one.reason}" for one in record.pruned))
    out.print(head)
    out.print(_attempts(record))
    out.print(_ranked(record))


def _attempts(record: pb.DecisionRecord) -> Table:
    table = Table("attempt", "worker", "ended", box=None, header_style="bold")
    for name in ("predicted", "measured", "queue", "restore", "prefill", "first token", "cached", "generated"):
        table.add_column(name, justify="right")
    table.add_column("detail")
    for attempt in record.attempts:
        timings, usage = attempt.timings, attempt.usage
        table.add_row(
            str(attempt.attempt),
            record.ranked[attempt.choice].worker,
            _ended(attempt),
            _ms(attempt.predicted_ttft_ms),
            _ms(attempt.measured_ttft_ms) if attempt.HasField("measured_ttft_ms") else "-",
            *(_ms(one) for one in (timings.queue_ms, timings.restore_ms, timings.prefill_ms, timings.first_token_ms)),
            str(usage.cached_tokens),
            str(usage.generated_tokens),
            attempt.detail,
        )
    return table


def _ranked(record: pb.DecisionRecord) -> Table:
    """Times in ms."""
    table = Table("", "worker", "tier", box=None, header_style="bold")
    names = ("cached", "bytes", "TTFT", "queue", "load", "restore", "compute", "per token", "first", "corrected")
    for name in (*names, "pages", "free", "evictable"):
        table.add_column(name, justify="right")
    chosen = {attempt.choice: attempt.attempt for attempt in record.attempts}
    for place, candidate in enumerate(record.ranked):
        table.add_row(
            f"→ {chosen[place]}" if place in chosen else "",
            candidate.worker,
            tier_word(candidate),
            str(candidate.cached_tokens),
            str(candidate.cached_bytes),
            _ms(candidate.ttft_ms),
            _ms(candidate.queue_ms),
            _ms(candidate.load_ms),
            _ms(candidate.restore_ms),
            str(candidate.compute_tokens),
            f"{candidate.prefill_ms_per_token:.4f}",
            _ms(candidate.first_token_ms),
            f"{candidate.correction:.3f}",
            str(candidate.needed_pages),
            str(candidate.free_pages),
            str(candidate.evictable_pages),
        )
    return table


def replayed(rows: Sequence[tuple[pb.DecisionRecord, Replayed]], skipped: Mapping[str, int]) -> None:
    """Each difference, then the count."""
    different = [(record, outcome) for record, outcome in rows if not outcome.same]
    if different:
        table = Table("decided", "request", "plan", "differs", "how", box=None, header_style="bold")
        for record, outcome in different:
            for one in outcome.differences:
                when = time_text(record.decided_ms)
                table.add_row(when, record.request_id, str(record.plan_id), one.kind.value, one.detail)
        Console(soft_wrap=True).print(table)
    words = f"{len(rows)} replayed, {len(different)} different"
    for why, count in sorted(skipped.items()):
        words += f"; {count} cannot be: {why}"
    Console(soft_wrap=True, highlight=False).print(words)


def _ended(attempt: pb.DecisionAttempt) -> str:
    decline = decline_word(attempt)
    return f"{outcome_word(attempt)} ({decline})" if decline else outcome_word(attempt)


def _ms(value: float) -> str:
    return f"{value:.1f}"
