"""A connection to a service for one command: its options, the call, and errors as a person reads them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import grpc
import typer
from rich.console import Console

from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.channel import open_channel
from libs.service.errors import StartError, read_error
from libs.service.transport import Transport

T = TypeVar("T")

# Progress and words go here, so that standard output holds the answer alone.
console = Console(stderr=True)

_GROUP = ContextVar("group", default="segue")


@dataclass(frozen=True)
class Target:
    """address: HOST:PORT of the service; the files as in the services' settings."""

    address: str
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


Catalog = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="SEGUE_CATALOG", help="A catalog; any replica will do.")
]
CaFile = Annotated[
    Path | None, typer.Option(metavar="FILE", envvar="SEGUE_TLS_CA_FILE", help="For TLS: as the services'.")
]
CertFile = Annotated[
    Path | None, typer.Option(metavar="FILE", envvar="SEGUE_TLS_CERT_FILE", help="For TLS: the certificate.")
]
KeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", envvar="SEGUE_TLS_KEY_FILE", help="For TLS: its private key.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, no tables.")]


def connect(
    context: typer.Context,
    catalog: Catalog = "127.0.0.1:7004",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """The options before a command of a group that talks to the catalog: its callback."""
    _GROUP.set(f"segue {context.info_name}")
    context.obj = Target(catalog, ca_file, cert_file, key_file)


def run(
    target: Target,
    command: Callable[[Any], Awaitable[T]],
    *,
    stub: Callable[[grpc.aio.Channel], Any] = catalog_pb2_grpc.CatalogStub,
    what: str = "catalog",
) -> T:
    """`command` with the generated client; typer.Exit(1) with one line on standard error if it fails."""

    async def connected() -> T:
        transport = Transport(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        channel = open_channel(target.address, transport)
        try:
            return await command(stub(channel))
        finally:
            await channel.close(None)

    try:
        return asyncio.run(connected())
    except grpc.aio.AioRpcError as error:
        known = read_error(error)
        remedy = f": {known.remedy}" if known.remedy and known.remedy not in known.message else ""
        fail(f"{what} at {target.address}: {known.message}{remedy}")
    except StartError as error:
        fail(f"{error}: {error.remedy}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1; the line begins with the group of commands it is of."""
    sys.stderr.write(f"{_GROUP.get()}: {message}\n")
    raise typer.Exit(1)
