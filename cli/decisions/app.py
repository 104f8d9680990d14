"""The commands."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cli.connection import Json, Target, connect, fail, run
from cli.decisions import tables
from cli.decisions.records import moment_of, plain, reason_of
from cli.decisions.replay import NotReplayableError, Replayed, replay
from cli.output import bar, print_json
from libs.contracts.segue.v1 import catalog_pb2 as pb

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Where requests went and why; whether the policy would decide so again.",
)

_PAGE = 200

Since = Annotated[str, typer.Option(metavar="TIME", help="Not older: 90s, 15m, 2h, 3d ago, or an ISO 8601 time.")]
Until = Annotated[str, typer.Option(metavar="TIME", help="Older than this.")]
Worker = Annotated[str, typer.Option(metavar="NAME", help="Offered to this worker, in any attempt.")]
Reason = Annotated[
    str,
    typer.Option(metavar="WORD", help="An attempt ended so (completed, timed-out, worker-lost, …) or was declined so."),
]
Model = Annotated[str, typer.Option(metavar="NAME", help="Only this served name.")]
Plan = Annotated[int, typer.Option(min=0, metavar="N", help="Only this plan of the request.", show_default="all")]

app.callback()(connect)


@dataclass(frozen=True)
class _Filter:
    request_id: str
    since: str
    until: str
    worker: str
    reason: str
    model: str

    def asked(self) -> pb.ListDecisionsRequest:
        """Ends the command if a word means nothing."""
        now_ms = round(time.time() * 1_000)
        try:
            outcome, decline = reason_of(self.reason)
            return pb.ListDecisionsRequest(
                request_id=self.request_id,
                from_ms=moment_of(self.since, now_ms),
                until_ms=moment_of(self.until, now_ms),
                worker=self.worker,
                outcome=outcome,  # type: ignore[arg-type]
                decline=decline,  # type: ignore[arg-type]
                model=self.model,
                page_size=_PAGE,
            )
        except ValueError as error:
            fail(str(error))


async def _all(stub: Any, asked: pb.ListDecisionsRequest) -> AsyncIterator[pb.DecisionRecord]:
    """Page by page; newest batch first."""
    while True:
        page = await stub.ListDecisions(asked)
        for record in page.records:
            yield record
        if not page.next_page_token:
            return
        asked.page_token = page.next_page_token


@app.command("list")
def list_decisions(
    context: typer.Context,
    request: Annotated[str, typer.Option(metavar="ID", help="Only this request.")] = "",
    since: Since = "",
    until: Until = "",
    worker: Worker = "",
    reason: Reason = "",
    model: Model = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="At most so many, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """Decisions, newest first: by request, time, worker, reason."""
    asked = _Filter(request, since, until, worker, reason, model).asked()
    asked.page_size = min(limit, _PAGE)

    async def command(stub: Any) -> list[pb.DecisionRecord]:
        found: list[pb.DecisionRecord] = []
        with bar(as_json) as progress:
            task = progress.add_task("decisions", total=limit, note="")
            async for record in _all(stub, asked):
                found.append(record)
                progress.advance(task)
                if len(found) == limit:
                    break
        return sorted(found, key=lambda one: (one.decided_ms, one.request_id, one.plan_id), reverse=True)

    found = run(context.obj, command)
    if as_json:
        print_json([plain(record) for record in found])
    else:
        tables.decisions(found)


@app.command()
def show(
    context: typer.Context,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id.")],
    plan: Plan = 0,
    as_json: Json = False,
) -> None:
    """Every decision of one request: attempts, and each ranked candidate with every term of its score."""
    records = _of(context.obj, request, plan)
    if as_json:
        print_json([plain(record) for record in records])
        return
    for record in records:
        tables.decision(record)


@app.command("replay")
def replay_decisions(
    context: typer.Context,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id.", show_default=False)] = "",
    every: Annotated[bool, typer.Option("--all", help="All that match, instead of one request's.")] = False,
    plan: Plan = 0,
    since: Since = "",
    until: Until = "",
    worker: Worker = "",
    reason: Reason = "",
    model: Model = "",
    as_json: Json = False,
) -> None:
    """Run the policy again on what was recorded. Exit code 1 if it does not choose and rank the same.

    With --all over a time range and the filters of `list`.
    """
    filters = _Filter("", since, until, worker, reason, model)
    if every == bool(request):
        raise typer.BadParameter("give a request, or --all")
    if not every and filters != _Filter("", "", "", "", "", ""):
        raise typer.BadParameter("the filters go with --all")
    rows: list[tuple[pb.DecisionRecord, Replayed]] = []
    skipped: Counter[str] = Counter()

    def take(record: pb.DecisionRecord) -> None:
        try:
            rows.append((record, replay(record)))
        except NotReplayableError as error:
            skipped[str(error)] += 1

    async def command(stub: Any) -> None:
        asked = filters.asked()
        with bar(as_json) as progress:
            task = progress.add_task("replaying", total=None, note="")
            async for record in _all(stub, asked):
                take(record)
                different = sum(not outcome.same for _, outcome in rows)
                progress.update(task, advance=1, note=f"{different} different")

    if every:
        run(context.obj, command)
    else:
        for record in _of(context.obj, request, plan):
            take(record)
    if as_json:
        print_json(_outcome(rows, skipped))
    else:
        tables.replayed(rows, skipped)
    if any(not outcome.same for _, outcome in rows) or (request and skipped):
        raise typer.Exit(1)


def _of(target: Target, request: str, plan: int) -> list[pb.DecisionRecord]:
    """Oldest first; ends the command if there is none."""

    async def command(stub: Any) -> list[pb.DecisionRecord]:
        return list((await stub.GetDecision(pb.GetDecisionRequest(request_id=request))).records)

    records = [record for record in run(target, command) if not plan or record.plan_id == plan]
    if not records:
        fail(f"request {request} has no plan {plan}: `segue decisions show {request}` lists them all")
    return records


def _outcome(rows: list[tuple[pb.DecisionRecord, Replayed]], skipped: Counter[str]) -> dict[str, Any]:
    return {
        "replayed": len(rows),
        "skipped": dict(skipped),
        "different": [
            {
                "request_id": record.request_id,
                "plan_id": record.plan_id,
                "router": record.router,
                "chosen": record.attempts[0].choice,
                "would_choose": outcome.order[0],
                "order": list(outcome.order),
                "differences": [{"kind": one.kind.value, "detail": one.detail} for one in outcome.differences],
            }
            for record, outcome in rows
            if not outcome.same
        ],
    }
