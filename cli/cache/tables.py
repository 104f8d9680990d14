"""Tables of `segue cache`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cli.cache.inventory import Sum, day_text, size_of, size_text
from libs.contracts.segue.v1 import catalog_pb2 as pb

if TYPE_CHECKING:
    from cli.cache.verify import Fault


def sums(rows: Iterable[Sum]) -> None:
    table = Table("model", "owner", box=None, header_style="bold")
    for name in ("chunks", "tails", "tokens", "size", "pinned", "days used", "last use"):
        table.add_column(name, justify="right")
    table.add_column("on SSDs")
    for row in rows:
        replicas = ", ".join(f"{node[:8]} {count}" for node, count in sorted(row.replicas.items()))
        numbers = (row.chunks, row.tails, row.tokens, size_text(row.bytes), row.pinned, row.use_days)
        last = day_text(row.last_use_day)
        table.add_row(row.fingerprint[:12], row.owner[:12], *map(str, numbers), last, replicas or "-")
    Console().print(table)


def chunks(rows: Iterable[pb.ListedChunk]) -> None:
    table = Table("hash", "model", "owner", "tokens", box=None, header_style="bold")
    for name in ("size", "days used", "last use"):
        table.add_column(name, justify="right")
    table.add_column("on SSDs")
    table.add_column("pinned by")
    for row in rows:
        chunk = row.chunk
        nodes = sorted({r.node[:8] for r in row.replicas if r.state == pb.REPLICA_STATE_READY})
        table.add_row(
            chunk.hash[:16],
            row.fingerprint[:12],
            chunk.owner[:12],
            f"{chunk.start}-{chunk.end}{' tail' if chunk.tail else ''}",
            size_text(size_of(chunk)),
            str(row.use_days),
            day_text(row.last_use_day),
            " ".join(nodes) or "-",
            row.pin.who or "-",
        )
    Console().print(table)


def chunk(row: dict[str, Any], chain: list[pb.Chunk]) -> None:
    table = Table(box=None, show_header=False)
    for name, value in row.items():
        if name in ("objects", "replicas"):
            for i, item in enumerate(value):
                text = "  ".join(str(part) for part in item.values())
                table.add_row(name if i == 0 else "", text, style=None)
        elif value not in (None, ""):
            table.add_row(name, str(value))
    table.add_row("chain", " → ".join(f"{c.hash[:8]} [{c.start},{c.end})" for c in chain))
    Console(soft_wrap=True).print(table)


def collected(items: Iterable[pb.Collected], dry: bool) -> None:
    by_reason: dict[tuple[str, str], tuple[int, int]] = {}
    for item in items:
        reason = pb.CollectReason.Name(item.reason).removeprefix("COLLECT_REASON_").lower().replace("_", " ")
        kind = "object" if item.key else ("replica" if item.node else "chunk")
        if item.reason == pb.COLLECT_REASON_UNFINISHED_UPLOAD:
            kind = "upload"
        count, size = by_reason.get((kind, reason), (0, 0))
        by_reason[kind, reason] = (count + 1, size + item.bytes)
    table = Table("what", "why", box=None, header_style="bold")
    table.add_column("would be removed" if dry else "removed", justify="right")
    table.add_column("bytes", justify="right")
    for (kind, reason), (count, size) in sorted(by_reason.items()):
        table.add_row(kind, reason, str(count), size_text(size) if size else "-")
    if by_reason:
        Console().print(table)
    else:
        Console().print("nothing to remove")


def faults(rows: Iterable[Fault]) -> None:
    table = Table("chunk", "group", "fault", "detail", box=None, header_style="bold")
    for row in rows:
        table.add_row(row.hash[:16], row.group or "-", row.reason, row.detail)
    Console(soft_wrap=True).print(table)
