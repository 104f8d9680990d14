"""The command: asks a router for its pool again and again, and draws it in place."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli.connection import CaFile, CertFile, Json, KeyFile, Target, run
from cli.output import print_json
from cli.top.view import Sample, screen
from libs.contracts.segue.v1 import router_pb2, router_pb2_grpc

_ANSWER_S = 5.0

Router = Annotated[str, typer.Option(metavar="HOST:PORT", envvar="SEGUE_ROUTER", help="The router to look at.")]
Once = Annotated[bool, typer.Option("--once", help="Draw it once and end.")]
Every = Annotated[float, typer.Option(min=0.1, max=3_600, metavar="SECONDS", help="Time between two looks.")]


def top(
    router: Router = "127.0.0.1:7000",
    once: Once = False,
    as_json: Json = False,
    every: Every = 1.0,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Watch a router's tunnels to workers: contours, generations, floors, coverage, drops. Ctrl-C ends it."""
    target = Target(router, ca_file, cert_file, key_file)

    async def show(stub: Any) -> None:
        if as_json:
            print_json(MessageToDict((await _ask(stub)).pool, preserving_proto_field_name=True))
        elif once:
            Console().print(screen(await _ask(stub), None, router))
        else:
            await _watch(stub, router, every)

    run(target, show, stub=router_pb2_grpc.RouterStub, what="router")


async def _ask(stub: Any) -> Sample:
    answer = await stub.GetPool(router_pb2.GetPoolRequest(), timeout=_ANSWER_S)
    return Sample(answer.pool, time.monotonic())


async def _watch(stub: Any, router: str, every_s: float) -> None:
    """For ever. A router that does not answer is waited for; what was last seen of it stays."""
    now: Sample | None = None
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            before = now
            try:
                now = await _ask(stub)
                live.update(screen(now, before, router), refresh=True)
            except grpc.aio.AioRpcError as error:
                now = None
                live.update(Text(f"{router} does not answer: {error.details()}", style="bold red"), refresh=True)
            await asyncio.sleep(every_s)
