"""The router as a process of its own: start, traces, metrics, SIGTERM, and starts that must fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from libs.contracts.segue.v1 import router_pb2, router_pb2_grpc
from libs.controller.protocol import TraceContext
from libs.service.channel import open_channel
from libs.service.transport import Transport
from tests.fixtures.otlp import otlp_receiver
from tests.router.fake_catalog import fake_catalog
from tests.router.fake_worker import Job, scripted_worker
from tests.router.rig import eventually, ingress_to, request

ROOT = Path(__file__).parents[2]


class Process:
    """A child router and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """The first log line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while line := (await self.process.stderr.readline()).decode():
                self.log += line
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no {pattern!r} in:\n{self.log}")

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            assert self.process.stderr is not None
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEGUE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", *flags, cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_serves_traces_counts_and_ends_in_order() -> None:
    caller = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with (
        otlp_receiver() as receiver,
        fake_catalog() as catalog,
        scripted_worker("w0") as worker,
        httpx.AsyncClient(timeout=10) as http,
    ):
        catalog.endpoints["w0"] = worker.endpoint
        async with started(
            "--listen", "127.0.0.1:0", "--catalog", catalog.address, "--otlp-endpoint", receiver.endpoint
        ) as router:
            line = await router.until(r"serving listen=(\S+) metrics=(\S+)")
            target, metrics = line[1], f"http://{line[2]}"
            assert (await http.get(f"{metrics}/readyz")).status_code == 200
            async with ingress_to(target) as ingress:
                asked = request(8, 3, trace=TraceContext(caller), tenant="a secret tenant", tenant_salt="5a" * 32)
                stream = await ingress.submit(asked)
                job = await worker.next()
                job.run()
                await stream.completed(3)
                spans = {span.name: span for span in await receiver.wait_for_trace(["route", "plan", "offer"])}
                route, offer = spans["route"], spans["offer"]
                assert (route.trace_id, route.parent_id) == ("ab" * 16, "cd" * 8)
                assert spans["plan"].parent_id == offer.parent_id == route.span_id
                # The worker's spans hang below the offer.
                assert job.offer.request.trace.traceparent.split("-")[1:3] == ["ab" * 16, offer.span_id]
                assert offer.attributes["segue.answer"] == "accepted" and offer.attributes["segue.worker"] == "w0"
                assert route.attributes["segue.request_id"] == asked.request_id and route.error is None
                shown = (await http.get(f"{metrics}/metrics")).text
                for wanted in (
                    r'segue_router_requests_total\{outcome="completed"\} 1\.0',
                    r'segue_router_attempts_total\{outcome="completed"\} 1\.0',
                    r'segue_router_declines_total\{reason="queue_longer"\} 0\.0',
                    r'segue_router_ttft_seconds_count\{kind="measured",tier="none"\} 1\.0',
                    r"segue_router_queue_length 0\.0",
                    r'segue_router_pool_writers\{contour="active"\} 2\.0',
                    r'segue_router_pool_ready\{state="ready"\} 1\.0',
                    r"segue_router_workers 1\.0",
                    r"segue_router_offers_total 1\.0",
                    r"segue_router_attach_tunnels 1\.0",
                    r'segue_router_routes_closed_total\{peer="worker",reason="done"\} 1\.0',
                ):
                    assert re.search(wanted, shown), wanted
                # SIGTERM in mid-stream: the stream ends as if nothing had happened, then the process does.
                stream = await ingress.submit(request(8, 4))
                job = await worker.next()
                job.accept()
                job.delta(1)
                await stream.until(1)
                router.process.send_signal(signal.SIGTERM)
                await router.until("stopping")
                job.finish()
                await stream.completed(4)
                assert ingress.run is not None
                assert (await asyncio.wait_for(ingress.run, 10)).reason.label == "shutdown"
            assert await router.ended() == 0, router.log
            assert re.search(rf"decision .*request_id={asked.request_id}.*worker=w0", router.log), router.log
            assert "a secret tenant" not in router.log and "5a5a" not in router.log
            assert "Traceback" not in router.log


async def test_reflection_and_calls_by_hand() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with fake_catalog() as catalog, started("--listen", "127.0.0.1:0", "--catalog", catalog.address) as router:
        target = (await router.until(r"serving listen=(\S+)"))[1]
        channel = open_channel(target, Transport())
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = [one async for one in stub.ServerReflectionInfo(asked, timeout=10)]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"segue.v1.Router", "grpc.health.v1.Health"} <= names
        router_stub: Any = router_pb2_grpc.RouterStub(channel)
        answer = await router_stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10)
        assert (answer.revision, len(answer.workers)) == (catalog.revision, 0)
        await channel.close(None)


async def test_without_a_catalog_it_says_so_and_does_not_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # bound and not listening: refused
        async with started("--listen", "127.0.0.1:0", "--catalog", address, "--catalog-wait-s", "0.5") as router:
            assert await router.ended() == 1
            assert re.search(rf"cannot start: the catalog at {re.escape(address)} gave no endpoint map", router.log)
            assert "`catalog`" in router.log and "Traceback" not in router.log


async def test_a_catalog_that_comes_late_is_waited_for() -> None:
    async with fake_catalog() as catalog, scripted_worker("w0", Job.run) as worker:
        catalog.endpoints["w0"] = worker.endpoint
        await catalog.stop()
        async with started("--listen", "127.0.0.1:0", "--catalog", catalog.address) as router:
            await router.until("endpoint map is not followed")
            await catalog.start()
            await router.until("serving listen=")
            await eventually(lambda: bool(worker.tunnels), "worker dialled")


async def test_a_port_in_use_and_wrong_settings_are_clear_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with started("--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--catalog", "127.0.0.1:9") as router:
            assert await router.ended() == 1
            assert "cannot listen on" in router.log
    async with started() as router:
        assert await router.ended() == 2
        assert "--catalog: required" in router.log
