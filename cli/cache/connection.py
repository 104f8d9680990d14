"""A connection to the catalog for one command, and errors as a person reads them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import typer
from rich.console import Console

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.channel import open_channel
from libs.service.errors import StartError, read_error
from libs.service.transport import Transport

T = TypeVar("T")

# Progress and words go here, so that standard output holds the answer alone.
console = Console(stderr=True)


@dataclass(frozen=True)
class Target:
    """address: HOST:PORT of a catalog; the files as in the services' settings."""

    address: str
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


def run(target: Target, command: Callable[[Any], Awaitable[T]]) -> T:
    """`command` with the generated client; typer.Exit(1) with one line on standard error if it fails."""

    async def connected() -> T:
        transport = Transport(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        channel = open_channel(target.address, transport)
        try:
            return await command(catalog_pb2_grpc.CatalogStub(channel))
        finally:
            await channel.close(None)

    try:
        return asyncio.run(connected())
    except grpc.aio.AioRpcError as error:
        known = read_error(error)
        remedy = f": {known.remedy}" if known.remedy and known.remedy not in known.message else ""
        fail(f"catalog at {target.address}: {known.message}{remedy}")
    except StartError as error:
        fail(f"{error}: {error.remedy}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1."""
    sys.stderr.write(f"segue cache: {message}\n")
    raise typer.Exit(1)


async def all_chunks(
    stub: Any, *, fingerprint: str = "", owner: str = "", hash_prefix: str = ""
) -> AsyncIterator[pb.ListedChunk]:
    """Every chunk that matches, page by page."""
    token = ""
    while True:
        page = await stub.ListChunks(
            pb.ListChunksRequest(fingerprint=fingerprint, owner=owner, hash_prefix=hash_prefix, page_token=token)
        )
        for chunk in page.chunks:
            yield chunk
        token = page.next_page_token
        if not token:
            return


async def find_chunk(stub: Any, hash: str, fingerprint: str) -> pb.ListedChunk:
    """The one chunk whose hash begins so. Ends the command if there is none, or more than one."""
    found: list[pb.ListedChunk] = []
    async for chunk in all_chunks(stub, hash_prefix=hash, fingerprint=fingerprint):
        found.append(chunk)
        if len(found) > 1:
            fail(f"more than one chunk begins with {hash}: give more digits, or --fingerprint")
    if not found:
        fail(f"no chunk begins with {hash}: see `segue cache ls --chunks`")
    return found[0]
