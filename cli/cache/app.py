"""The commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.cache import tables
from cli.cache.chunks import all_chunks, find_chunk
from cli.cache.inventory import Sum, add_to, plain_chunk, plain_collected
from cli.connection import Json, connect, console, fail, run
from cli.output import bar, print_json
from libs.contracts.segue.v1 import catalog_pb2 as pb

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What is stored where, how big, whose, how often used; and what keeps it in order.",
)

Fingerprint = Annotated[str, typer.Option(metavar="HEX", help="Only this model variant.")]
Owner = Annotated[str, typer.Option(metavar="HEX", help="Only this owner.")]
HashPrefix = Annotated[str, typer.Option("--hash", metavar="HEX", help="Only hashes that begin so.")]
Hashes = Annotated[list[str], typer.Argument(metavar="HASH...", help="Hashes, or enough first digits of each.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")]


app.callback()(connect)


@app.command("ls")
def list_chunks(
    context: typer.Context,
    fingerprint: Fingerprint = "",
    owner: Owner = "",
    hash_prefix: HashPrefix = "",
    chunks: Annotated[bool, typer.Option("--chunks", help="Every chunk, not sums by model and owner.")] = False,
    as_json: Json = False,
) -> None:
    """What is stored: by model and owner, or chunk by chunk."""

    async def command(stub: Any) -> tuple[list[pb.ListedChunk], dict[tuple[str, str], Sum]]:
        found: list[pb.ListedChunk] = []
        sums: dict[tuple[str, str], Sum] = {}
        with bar(as_json) as progress:
            task = progress.add_task("chunks", total=None, note="")
            async for listed in all_chunks(stub, fingerprint=fingerprint, owner=owner, hash_prefix=hash_prefix):
                progress.advance(task)
                add_to(sums, listed)
                if chunks:
                    found.append(listed)
        return found, sums

    found, sums = run(context.obj, command)
    rows = [sums[of] for of in sorted(sums)]
    if as_json:
        print_json([plain_chunk(item) for item in found] if chunks else [row.plain() for row in rows])
    elif chunks:
        tables.chunks(sorted(found, key=lambda item: (item.fingerprint, item.chunk.start, item.chunk.hash)))
    else:
        tables.sums(rows)


@app.command()
def show(
    context: typer.Context,
    hash: Annotated[str, typer.Argument(metavar="HASH", help="A hash, or enough of its first digits.")],
    fingerprint: Fingerprint = "",
    as_json: Json = False,
) -> None:
    """One chunk: its place in the chain, its objects, replicas, pin and use."""

    async def command(stub: Any) -> tuple[pb.ListedChunk, list[pb.Chunk]]:
        found = await find_chunk(stub, hash, fingerprint)
        chain = [found.chunk]
        while chain[0].start:
            reply = await stub.ListChunks(
                pb.ListChunksRequest(fingerprint=found.fingerprint, hash_prefix=chain[0].parent)
            )
            if not reply.chunks:
                console.print(f"the parent {chain[0].parent} is missing: run `segue cache verify`")
                break
            chain.insert(0, reply.chunks[0].chunk)
        return found, chain

    found, chain = run(context.obj, command)
    row = plain_chunk(found)
    if as_json:
        print_json({**row, "chain": [chunk.hash for chunk in chain]})
    else:
        tables.chunk(row, chain)


@app.command()
def verify(
    context: typer.Context,
    fingerprint: Fingerprint = "",
    owner: Owner = "",
    hash_prefix: HashPrefix = "",
    facts_only: Annotated[bool, typer.Option("--facts-only", help="Walk the chains; read no object.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The catalog's settings file, for its s3_… settings.")
    ] = None,
    s3_endpoint: Annotated[str, typer.Option(metavar="URL", help="Instead of the catalog's setting.")] = "",
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove facts whose objects are gone, with all that follows them."),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Walk chains, read and hash every object, report each fault. Exit code 1 if any is left.

    With --repair the catalog then removes the facts whose objects are gone (with --dry-run it says which): it asks for
    each object itself, so --facts-only saves reading them all here.

    The bucket is read with the catalog's settings: SEGUE_CATALOG_S3_ENDPOINT, SEGUE_CATALOG_S3_BUCKET,
    SEGUE_CATALOG_S3_ACCESS_KEY, SEGUE_CATALOG_S3_SECRET_KEY, or the same keys in --config.
    """
    # Its imports would slow every other command down.
    from cli.cache import verify_command

    if repair and hash_prefix:
        raise typer.BadParameter("chains are repaired as wholes: --repair goes with --fingerprint and --owner only")
    if dry_run and not repair:
        raise typer.BadParameter("--dry-run goes with --repair: without it nothing is changed anyway")
    bucket = None if facts_only else verify_command.bucket_of(config, s3_endpoint)
    mending = (verify_command.Mending.DRY if dry_run else verify_command.Mending.REPAIR) if repair else None
    if verify_command.verify(context.obj, fingerprint, owner, hash_prefix, bucket, mending, as_json):
        raise typer.Exit(1)


@app.command()
def gc(context: typer.Context, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Collect garbage now: what is past its retention, superseded, unnamed, forgotten."""

    async def command(stub: Any) -> tuple[list[pb.Collected], pb.CollectGarbageResponse]:
        items: list[pb.Collected] = []
        last = pb.CollectGarbageResponse()
        with bar(as_json) as progress:
            task = progress.add_task("collecting", total=None, note="")
            async for last in stub.CollectGarbage(pb.CollectGarbageRequest(dry_run=dry_run)):
                items += last.collected
                note = f"{last.totals.chunks_examined} chunks, {last.totals.objects_examined} objects looked at"
                progress.update(task, description=last.phase, completed=len(items), note=note)
        if not last.done:
            fail("the stream ended early: run it again")
        return items, last

    items, last = run(context.obj, command)
    totals = last.totals
    if last.bucket_of_another:
        console.print("the bucket is another etcd's: objects without facts are left alone (`rebuild` adopts it)")
    if as_json:
        print_json(plain_collected(items, totals, dry_run))
        return
    tables.collected(items, dry_run)
    waiting = "" if not totals.objects_waiting else f"; {totals.objects_waiting} objects wait for their grace period"
    console.print(f"{totals.chunks_examined} chunks and {totals.objects_examined} objects looked at{waiting}")


@app.command()
def pin(
    context: typer.Context,
    hashes: Hashes,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Why it is kept.")] = "",
    who: Annotated[str, typer.Option(metavar="NAME", envvar="USER", help="Who pins it.")] = "",
    fingerprint: Fingerprint = "",
    as_json: Json = False,
) -> None:
    """Keep chunks, and all before them in their chains, whatever retention says."""

    async def command(stub: Any) -> list[pb.ListedChunk]:
        chunks = [await find_chunk(stub, hash, fingerprint) for hash in hashes]
        ids = [pb.ChunkId(fingerprint=chunk.fingerprint, hash=chunk.chunk.hash) for chunk in chunks]
        reply = await stub.Pin(pb.PinRequest(chunks=ids, who=who, why=why))
        if reply.unknown:
            fail(f"{', '.join(reply.unknown)} went in the meantime; the others are pinned")
        return chunks

    chunks = run(context.obj, command)
    _said(as_json, "pinned", [chunk.chunk.hash for chunk in chunks])


@app.command()
def unpin(context: typer.Context, hashes: Hashes, fingerprint: Fingerprint = "", as_json: Json = False) -> None:
    """Take pins away."""

    async def command(stub: Any) -> list[pb.ListedChunk]:
        chunks = [await find_chunk(stub, hash, fingerprint) for hash in hashes]
        ids = [pb.ChunkId(fingerprint=chunk.fingerprint, hash=chunk.chunk.hash) for chunk in chunks]
        await stub.Unpin(pb.UnpinRequest(chunks=ids))
        return chunks

    chunks = run(context.obj, command)
    _said(as_json, "unpinned", [chunk.chunk.hash for chunk in chunks])


@app.command()
def purge(
    context: typer.Context,
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="The owner, as `segue cache ls` shows it, whole.")],
    dry_run: DryRun = False,
    include_pinned: Annotated[bool, typer.Option("--include-pinned", help="Pinned chunks too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all chunks of one owner, facts and bytes, at once."""
    if not (dry_run or yes):
        typer.confirm(f"Remove everything of owner {owner} for good?", abort=True, err=True)

    async def command(stub: Any) -> tuple[list[pb.Collected], pb.PurgeResponse]:
        items: list[pb.Collected] = []
        last = pb.PurgeResponse()
        request = pb.PurgeRequest(owner=owner, dry_run=dry_run, include_pinned=include_pinned)
        with bar(as_json) as progress:
            task = progress.add_task("purging", total=None, note="")
            async for last in stub.Purge(request):
                items += last.collected
                progress.update(task, description=last.phase, completed=len(items), note="")
        if not last.done:
            fail("the stream ended early: run it again")
        return items, last

    items, last = run(context.obj, command)
    if as_json:
        plain = plain_collected(items, last.totals, dry_run)
        print_json({**plain, "pinned": last.pinned, "nodes": list(last.nodes)})
        return
    tables.collected(items, dry_run)
    if last.pinned:
        console.print(f"{last.pinned} chunks stay because of pins (--include-pinned takes them too)")
    if last.nodes:
        console.print(f"told to drop their copies: {', '.join(last.nodes)}")


@app.command()
def rebuild(
    context: typer.Context, fingerprint: Fingerprint = "", dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Restore chunk facts from the bucket, as after a loss of etcd's data."""

    async def command(stub: Any) -> tuple[list[pb.Unusable], pb.RebuildResponse]:
        unusable: list[pb.Unusable] = []
        last = pb.RebuildResponse()
        request = pb.RebuildRequest(fingerprint=fingerprint, dry_run=dry_run)
        with bar(as_json) as progress:
            task = progress.add_task("rebuilding", total=None, note="")
            async for last in stub.Rebuild(request):
                unusable += last.unusable
                note = f"{last.published} published, {last.standing} stood already, {len(unusable)} unusable"
                progress.update(task, description=last.phase, completed=last.read, total=last.objects, note=note)
        if not last.done:
            fail("the stream ended early: run it again")
        return unusable, last

    unusable, last = run(context.obj, command)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "objects": last.objects,
                "read": last.read,
                "published": last.published,
                "standing": last.standing,
                "unusable": [{"key": u.key, "reason": u.reason, "detail": u.detail} for u in unusable],
            }
        )
        return
    would = "would be published" if dry_run else "published"
    typer.echo(f"{last.objects} objects, {last.published} chunks {would}, {last.standing} stood already")
    for one in unusable:
        typer.echo(f"{one.reason}  {one.key}  {one.detail}")


def _said(as_json: bool, what: str, hashes: list[str]) -> None:
    if as_json:
        print_json({what: hashes})
    else:
        typer.echo(f"{what}: {', '.join(hashes)}")
