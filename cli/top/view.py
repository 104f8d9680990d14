"""What `segue top` draws of one `GetPool` answer. Rates are against the answer before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from libs.contracts.segue.v1 import pool_pb2 as pb

CONTOURS = ("warm", "active", "draining")

_COLOURS = {"active": "green", "warm": "yellow", "draining": "magenta"}
_READY = {"ready": "bold green", "degraded": "bold yellow"}
_SHORT = 8  # characters of a fingerprint


@dataclass(frozen=True)
class Sample:
    """An answer, and when it came (monotonic seconds)."""

    pool: pb.PoolStatus
    at_s: float


def screen(now: Sample, before: Sample | None, target: str) -> RenderableType:
    """All of it."""
    pool = now.pool
    parts: list[RenderableType] = [_head(pool, target)]
    if pool.HasField("pending"):
        parts.append(_pending(pool.pending))
    parts += [_endpoints(pool), _writers(pool.writers), _traffic(now, before)]
    return Group(*parts)


def _head(pool: pb.PoolStatus, target: str) -> Text:
    contours = Counter(writer.contour for writer in pool.writers)
    text = Text()
    text.append(f"{target}  ")
    text.append(pool.readiness, style=_READY.get(pool.readiness, "bold red"))
    text.append(f"   generation {pool.generation}   map {pool.map.hash[:_SHORT]} r{pool.map.revision}")
    if pool.map.hash != pool.map.committed_hash:
        text.append(f" (committed r{pool.map.committed_revision})", style="yellow")
    if pool.map.empty_refused_ms:
        text.append(f"   empty map refused for {age(pool.map.empty_refused_ms)}", style="bold yellow")
    text.append(f"   {pool.routes} routes, {pool.held} held\n")
    text.append("tunnels ")
    for contour in CONTOURS:
        text.append(f" {contour} {contours[contour]}", style=_COLOURS[contour])
    for missing in pool.missing_cells:
        text.append(f"\nno cover: {cell(missing)}", style="bold red")
    for group in pool.missing:
        left = any(group == other for other in pool.left_missing)
        text.append(f"\nno tunnel: {cell(group.cell)} over {group.family}" + (" (left to older ones)" if left else ""))
    return text


def _pending(pending: pb.PendingGeneration) -> Text:
    kind = "anew" if pending.fresh else "for the map"
    text = f"generation {pending.generation} pending {kind} for {age(pending.wanted_ms)}"
    text += f" by {', '.join(pending.triggers)}: covers {pending.ratio:.0%}, lacks {pending.deficit} tunnels"
    return Text(text + (f" ({pending.obstacle})" if pending.obstacle else ""), style="yellow")


def _endpoints(pool: pb.PoolStatus) -> Table:
    table = Table("worker", "address", "cells", box=None, header_style="bold", title_justify="left")
    for name in ("active", "floor", "dialling"):
        table.add_column(name, justify="right")
    table.add_column("why")
    table.add_column("state")
    for one in pool.endpoints:
        short = one.active < one.floor
        table.add_row(
            one.worker,
            one.address,
            " ".join(cell(name) for name in one.cells),
            Text(str(one.active), style="bold red" if short else "green"),
            str(one.floor),
            str(one.dialling or "-"),
            one.floor_reason,
            _state(one),
        )
    return table


def _state(one: pb.PoolEndpoint) -> str:
    words = []
    if one.drained:
        words.append("drained")
    if not one.listed:
        words.append(f"left the map {age(one.vanished_ms)} ago")
    if one.quarantined:
        words.append("quarantined")
    if one.failures:
        words.append(f"{one.failures} failures")
    return ", ".join(words) or "-"


def _writers(writers: Sequence[pb.PoolWriter]) -> Table:
    table = Table("id", "worker", "contour", box=None, header_style="bold")
    for name in ("generation", "epoch", "routes", "age", "idle"):
        table.add_column(name, justify="right")
    table.add_column("remarks")
    for one in sorted(writers, key=lambda writer: (CONTOURS.index(writer.contour), writer.worker, writer.id)):
        remarks = list(one.degraded)
        if one.replacement != "open":
            remarks.append(one.replacement)
        if one.fallback:
            remarks.append("fallback")
        if one.closing:
            remarks.append(f"closing: {one.closing}")
        table.add_row(
            str(one.id),
            one.worker,
            Text(one.contour, style=_COLOURS.get(one.contour, "")),
            str(one.generation),
            str(one.epoch or "-"),
            str(one.routes),
            age(one.age_ms),
            age(one.idle_ms) if one.idle_ms else "-",
            ", ".join(remarks) or "-",
        )
    return table


def _traffic(now: Sample, before: Sample | None) -> Text:
    counters = now.pool.counters
    lines = [
        f"dials {counters.dials} ({counters.dial_failures} failed, {counters.flaps} flaps, {counters.quarantines} "
        f"quarantines)   tunnels ended {_counts(counters.removals)}   churn {counters.churn_per_writer_hour:.2f} /h"
    ]
    ended, dropped = _counts(counters.route_ends), _counts(counters.dropped)
    if before is not None and now.at_s > before.at_s:
        done = sum(counters.route_ends.values()) - sum(before.pool.counters.route_ends.values())
        ended += f" ({max(0, done) / (now.at_s - before.at_s):.1f} /s)"
    lines.append(f"routes ended {ended}   dropped {dropped}")
    return Text("\n".join(lines))


def _counts(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count) or "none"


def cell(name: str) -> str:
    """FINGERPRINT@ZONE, the fingerprint cut short."""
    fingerprint, _, zone = name.partition("@")
    return f"{fingerprint[:_SHORT]}@{zone}" if zone else fingerprint[:_SHORT]


def age(milliseconds: int) -> str:
    """12s, 3m10s, 2h05m."""
    seconds = milliseconds // 1_000
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"
