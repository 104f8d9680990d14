"""What is stored, summed by model and owner. Pure: chunks in, rows and plain values out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb

_READY = pb.REPLICA_STATE_READY


def day_text(day: int) -> str:
    """2026-01-31 for days since 1970-01-01."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()


def size_of(chunk: pb.Chunk) -> int:
    """Bytes in the bucket."""
    return sum(receipt.size for receipt in chunk.receipts)


def size_text(size: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass
class Sum:
    """One owner's chunks of one model. replicas: ready ones, by directory; use_days: chunk-days of use."""

    fingerprint: str
    owner: str
    chunks: int = 0
    tails: int = 0
    tokens: int = 0
    bytes: int = 0
    pinned: int = 0
    use_days: int = 0
    last_use_day: int = 0
    replicas: dict[str, int] = field(default_factory=dict)

    def add(self, listed: pb.ListedChunk) -> None:
        chunk = listed.chunk
        self.chunks += not chunk.tail
        self.tails += chunk.tail
        self.tokens += chunk.end - chunk.start
        self.bytes += size_of(chunk)
        self.pinned += listed.HasField("pin")
        self.use_days += listed.use_days
        self.last_use_day = max(self.last_use_day, listed.last_use_day)
        for node in {replica.node for replica in listed.replicas if replica.state == _READY}:
            self.replicas[node] = self.replicas.get(node, 0) + 1

    def plain(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "owner": self.owner,
            "chunks": self.chunks,
            "tails": self.tails,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "pinned": self.pinned,
            "use_days": self.use_days,
            "last_use": day_text(self.last_use_day),
            "replicas": dict(sorted(self.replicas.items())),
        }


def add_to(sums: dict[tuple[str, str], Sum], listed: pb.ListedChunk) -> None:
    """Counts one chunk where it belongs."""
    of = (listed.fingerprint, listed.chunk.owner)
    sums.setdefault(of, Sum(*of)).add(listed)


def plain_chunk(listed: pb.ListedChunk) -> dict[str, Any]:
    """One chunk with everything known of it."""
    chunk = listed.chunk
    return {
        "fingerprint": listed.fingerprint,
        "hash": chunk.hash,
        "parent": chunk.parent,
        "start": chunk.start,
        "end": chunk.end,
        "tail": chunk.tail,
        "owner": chunk.owner,
        "tokens_sha256": chunk.tokens_sha256,
        "bytes": size_of(chunk),
        "created_ms": chunk.created_ms,
        "last_use": day_text(listed.last_use_day),
        "use_days": listed.use_days,
        "pin": {"who": listed.pin.who, "why": listed.pin.why, "pinned_ms": listed.pin.pinned_ms}
        if listed.HasField("pin")
        else None,
        "objects": [
            {"group": r.group, "bucket": r.bucket, "key": r.key, "bytes": r.size, "content_id": r.content_id}
            for r in chunk.receipts
        ],
        "replicas": [
            {
                "node": r.node,
                "group": r.group,
                "state": pb.ReplicaState.Name(r.state).removeprefix("REPLICA_STATE_").lower(),
                "content_id": r.content_id,
            }
            for r in listed.replicas
        ],
    }


def plain_collected(items: Iterable[pb.Collected], totals: pb.CollectTotals, dry_run: bool) -> dict[str, Any]:
    """What was removed, or would be, and the sums."""
    return {
        "dry_run": dry_run,
        "collected": [
            {
                "reason": pb.CollectReason.Name(item.reason).removeprefix("COLLECT_REASON_").lower(),
                **{field.name: value for field, value in item.ListFields() if field.name != "reason"},
            }
            for item in items
        ],
        "totals": {field.name: getattr(totals, field.name) for field in totals.DESCRIPTOR.fields},
    }


def chain_of(hash: str, chunks: Iterable[pb.Chunk]) -> list[pb.Chunk]:
    """From the first chunk to the one named, as far as they are among `chunks`."""
    by_hash = {chunk.hash: chunk for chunk in chunks}
    chain: list[pb.Chunk] = []
    while hash in by_hash:
        chain.append(by_hash.pop(hash))
        hash = chain[-1].parent
    return chain[::-1]
