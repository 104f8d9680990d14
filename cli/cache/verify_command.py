"""`segue cache verify`: the one command that reads the bucket itself, with the catalog's own settings for it.

Repairing is the catalog's: it alone may remove facts, under its lock, after asking the store itself.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from cli.cache import tables
from cli.cache.chunks import all_chunks
from cli.cache.inventory import plain_collected, size_of, size_text
from cli.cache.verify import Fault, verify_objects, walk
from cli.connection import Target, fail, run
from cli.output import bar, print_json
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.settings import SettingsError, load
from services.catalog.settings import CatalogSettings
from services.catalog.store import ObjectStore, StoreError, StoreTarget


class Mending(Enum):
    """What to do about facts whose objects are gone."""

    DRY = "dry"
    REPAIR = "repair"


@dataclass
class _Mended:
    items: list[pb.Collected] = field(default_factory=list)
    missing: list[pb.MissingObject] = field(default_factory=list)
    last: pb.RepairResponse = field(default_factory=pb.RepairResponse)


def verify(
    target: Target,
    fingerprint: str,
    owner: str,
    hash_prefix: str,
    bucket: StoreTarget | None,
    mending: Mending | None,
    as_json: bool,
) -> int:
    """The number of faults that are left, all of which it has printed. bucket: None = read no object."""

    async def command(stub: Any) -> tuple[int, int, list[Fault], _Mended | None]:
        # Parents of what is filtered must be known too: all facts are walked, the wanted ones reported.
        everything = [chunk async for chunk in all_chunks(stub, fingerprint=fingerprint)]
        wanted = [c for c in everything if c.chunk.hash.startswith(hash_prefix) and c.chunk.owner.startswith(owner)]
        names = {(c.fingerprint, c.chunk.hash) for c in wanted}
        faults = [fault for fault in walk(everything) if (fault.fingerprint, fault.hash) in names]
        read = 0
        if bucket is not None:
            read = await _objects(bucket, wanted, faults, as_json)
        mended = await _repair(stub, fingerprint, owner, mending, as_json) if mending else None
        return len(wanted), read, faults, mended

    count, read, faults, mended = run(target, command)
    dry = mending is Mending.DRY
    document: dict[str, Any] = {"chunks": count, "bytes": read, "faults": [fault.plain() for fault in faults]}
    if mended is not None:
        document["repair"] = {
            **plain_collected(mended.items, mended.last.totals, dry),
            "pinned": mended.last.pinned,
            "missing": [
                {"fingerprint": m.fingerprint, "hash": m.hash, "group": m.group, "key": m.key} for m in mended.missing
            ],
        }
    if as_json:
        print_json(document)
    else:
        if faults:
            tables.faults(faults)
        typer.echo(f"{count} chunks, {size_text(read)} read, {len(faults)} faults")
        if mended is not None:
            tables.collected(mended.items, dry)
            pinned = f", {mended.last.pinned} of the chunks were pinned" if mended.last.pinned else ""
            typer.echo(f"{len(mended.missing)} objects are missing{pinned}")
    return _left(faults, mended, dry)


def _left(faults: list[Fault], mended: _Mended | None, dry: bool) -> int:
    """Faults of facts that still stand."""
    if mended is None or dry:
        return len(faults) + (len(mended.missing) if mended and not faults else 0)
    gone = {(item.fingerprint, item.hash) for item in mended.items}
    left = {(fault.fingerprint, fault.hash) for fault in faults} | {(m.fingerprint, m.hash) for m in mended.missing}
    return len(left - gone)


async def _repair(stub: Any, fingerprint: str, owner: str, mending: Mending, silent: bool) -> _Mended:
    mended = _Mended()
    request = pb.RepairRequest(fingerprint=fingerprint, owner=owner, dry_run=mending is Mending.DRY)
    with bar(silent) as progress:
        task = progress.add_task("repairing", total=None, note="")
        async for report in stub.Repair(request):
            mended.items += report.collected
            mended.missing += report.missing
            mended.last = report
            note = f"{len(mended.missing)} missing, {report.totals.chunks_removed} chunks"
            progress.update(task, description=report.phase, completed=report.totals.objects_examined, note=note)
    if not mended.last.done:
        fail("the stream ended early: run it again")
    return mended


async def _objects(target: StoreTarget, wanted: list[pb.ListedChunk], faults: list[Fault], silent: bool) -> int:
    """Bytes read; adds to the faults."""
    read = 0
    async with AsyncExitStack() as stack:
        store = ObjectStore(target)
        stack.push_async_callback(store.close)
        progress = stack.enter_context(bar(silent))
        total = sum(size_of(item.chunk) for item in wanted)
        task = progress.add_task("reading", total=len(wanted), note="")
        try:
            async for step in verify_objects(store, wanted):
                read += step.bytes
                faults += step.faults
                note = f"{size_text(read)} of {size_text(total)}, {len(faults)} faults"
                progress.update(task, advance=1, note=note)
        except StoreError as error:
            fail(str(error))
    return read


def bucket_of(config: Path | None, s3_endpoint: str) -> StoreTarget:
    """From the catalog's settings. Ends the command if they are wrong."""
    flags = [*(["--config", str(config)] if config else []), *(["--s3-endpoint", s3_endpoint] if s3_endpoint else [])]
    try:
        settings = load(CatalogSettings, flags, os.environ)
    except SettingsError as error:
        fail(str(error))
    url = urlsplit(settings.s3_endpoint)
    return StoreTarget(
        endpoint=url.netloc,
        bucket=settings.s3_bucket,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key.get_secret_value(),
        secure=url.scheme == "https",
        region=settings.s3_region,
        threads=8,
        # Whole objects are read here, which may take long.
        timeout_s=max(30.0, settings.s3_timeout_s),
    )
