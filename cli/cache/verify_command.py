"""`segue cache verify`: the one command that reads the bucket itself, with the catalog's own settings for it."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from cli.cache import tables
from cli.cache.connection import Target, all_chunks, fail, run
from cli.cache.inventory import size_of, size_text
from cli.cache.verify import Fault, verify_objects, walk
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.settings import SettingsError, load
from services.catalog.settings import CatalogSettings
from services.catalog.store import ObjectStore, StoreError, StoreTarget


def verify(
    target: Target, fingerprint: str, owner: str, hash_prefix: str, bucket: StoreTarget | None, as_json: bool
) -> int:
    """The number of faults, which it has printed. bucket: None = read no object."""

    async def command(stub: Any) -> tuple[int, int, list[Fault]]:
        # Parents of what is filtered must be known too: all facts are walked, the wanted ones reported.
        everything = [chunk async for chunk in all_chunks(stub, fingerprint=fingerprint)]
        wanted = [c for c in everything if c.chunk.hash.startswith(hash_prefix) and c.chunk.owner.startswith(owner)]
        names = {(c.fingerprint, c.chunk.hash) for c in wanted}
        faults = [fault for fault in walk(everything) if (fault.fingerprint, fault.hash) in names]
        read = 0
        if bucket is not None:
            read = await _objects(bucket, wanted, faults, as_json)
        return len(wanted), read, faults

    count, read, faults = run(target, command)
    if as_json:
        tables.print_json({"chunks": count, "bytes": read, "faults": [fault.plain() for fault in faults]})
    else:
        if faults:
            tables.faults(faults)
        typer.echo(f"{count} chunks, {size_text(read)} read, {len(faults)} faults")
    return len(faults)


async def _objects(target: StoreTarget, wanted: list[pb.ListedChunk], faults: list[Fault], silent: bool) -> int:
    """Bytes read; adds to the faults."""
    read = 0
    async with AsyncExitStack() as stack:
        store = ObjectStore(target)
        stack.push_async_callback(store.close)
        progress = stack.enter_context(tables.bar(silent))
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
