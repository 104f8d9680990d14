"""A real process, real signals: the order of the end, and every way a service can fail to live."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Sample:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def until(self, start: str, within: float = 15.0) -> str:
        """The next line that begins so; returns the rest of it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(within):
            while line := (await self.process.stdout.readline()).decode().strip():
                self.said.append(line)
                if line.startswith(start):
                    return line.removeprefix(start)
        raise AssertionError(f"ended before {start!r}: {self.said}\n{await self.errors()}")

    async def end(self, within: float = 15.0) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(within):
            self.said += (await self.process.stdout.read()).decode().split()
            return await self.process.wait()

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def sample(*flags: str, fault: str = "") -> AsyncIterator[Sample]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.service.sample", *flags),
        cwd=ROOT,
        env={**os.environ, "SAMPLE_FAULT": fault, "SEGUE_LOG_FORMAT": "json"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Sample(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def health(channel: grpc.aio.Channel, name: str = "test.Sample") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


async def serving(service: Sample) -> tuple[int, int]:
    """Ports of a sample that is ready: (grpc, metrics)."""
    port = int(await service.until("port-"))
    metrics = int(await service.until("metrics-"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async for reply in stub.Watch(health_pb2.HealthCheckRequest(service="test.Sample"), timeout=10):
            if reply.status == SERVING:
                break
    return port, metrics


async def test_sigterm_ends_in_order() -> None:
    async with sample() as service:
        port, metrics = await serving(service)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics}") as http:
            assert (await http.get("/readyz")).status_code == 200
            assert "segue_sample_seen_total 3.0" in (await http.get("/metrics")).text
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel) == await health(channel, "") == SERVING
            service.process.send_signal(signal.SIGTERM)
            assert await service.end() == 0
        assert service.said[:2] == ["open-first", "open-second"]
        assert service.said[-5:] == ["drain-30", "drained", "task-end", "close-second", "close-first"]
        events = [json.loads(line)["event"] for line in (await service.errors()).splitlines()]
        assert events == ["serving", "stopping", "stopped"]


async def test_what_build_says_of_readiness_holds_when_it_has_returned() -> None:
    async with sample(fault="not-ready") as service:
        await service.until("port-")
        metrics = int(await service.until("metrics-"))
        assert service.process.stderr is not None
        while b'"serving"' not in (line := await asyncio.wait_for(service.process.stderr.readline(), 15)):
            assert line, "ended before it served"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics}") as http:
            answer = await http.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "not ready: no tea yet\n")


async def test_not_serving_while_draining_and_an_open_watch_does_not_hold_up_the_end() -> None:
    async with sample("--shutdown-grace-s=60", "--shutdown-delay-s=1") as service:
        port, metrics = await serving(service)
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics}") as http,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == SERVING
            service.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            # Not ready, but still answering: that is what the delay is for.
            assert await health(channel) == NOT_SERVING
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(watch.read(), 10)
            assert await service.end(within=10) == 0


async def test_a_drain_that_hangs_is_cut_at_the_grace() -> None:
    async with sample("--shutdown-grace-s=0.3", fault="stuck-drain") as service:
        await serving(service)
        service.process.send_signal(signal.SIGINT)
        assert await service.end(within=10) == 0
        assert "drained" not in service.said
        assert service.said[-3:] == ["task-end", "close-second", "close-first"]
        assert "drain cut short" in await service.errors()


async def test_second_signal_exits_at_once() -> None:
    async with sample("--shutdown-grace-s=60", fault="stuck-drain") as service:
        await serving(service)
        service.process.send_signal(signal.SIGTERM)
        await service.until("drain-")
        service.process.send_signal(signal.SIGTERM)
        assert await service.end(within=5) == 128 + signal.SIGTERM
        assert "close-first" not in service.said


async def test_crashed_background_task_ends_the_service_in_order_with_an_error() -> None:
    async with sample(fault="crash") as service:
        assert await service.end() == 1
        assert service.said[-2:] == ["close-second", "close-first"]
        lines = [json.loads(line) for line in (await service.errors()).splitlines()]
        failure = next(line for line in lines if line["level"] == "error")
        assert "sample work" in failure["reason"]
        assert "ValueError: planted" in failure["exception"]


async def test_start_error_is_one_line_and_closes_what_was_opened() -> None:
    async with sample(fault="start-error") as service:
        assert await service.end() == 1
        assert service.said[-2:] == ["close-second", "close-first"]
        errors = await service.errors()
        assert "cannot start: no coffee: make some" in errors
        assert "Traceback" not in errors


async def test_signal_while_starting() -> None:
    async with sample(fault="slow-start") as service:
        port = int(await service.until("port-"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel) == await health(channel, "") == NOT_SERVING
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0
        assert service.said[-2:] == ["close-second", "close-first"]


@pytest.mark.parametrize("which", ["listen", "metrics-listen"])
async def test_port_in_use(which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with sample(f"--{which}=127.0.0.1:{taken.getsockname()[1]}") as service:
            assert await service.end() == 1
            errors = await service.errors()
            assert f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}" in errors
            assert "choose another" in errors
            assert "Traceback" not in errors


async def test_a_second_service_cannot_share_the_port_of_the_first() -> None:
    async with sample() as first:
        port, _ = await serving(first)
        async with sample(f"--listen=127.0.0.1:{port}") as second:
            assert await second.end() == 1


async def test_wrong_settings_exit_2_with_one_line() -> None:
    async with sample("--shutdown-grace-s=soon") as service:
        assert await service.end() == 2
        errors = await service.errors()
        assert errors.count("\n") == 1
        assert "--shutdown-grace-s=soon" in errors


async def test_without_uvloop() -> None:
    async with sample("--no-uvloop") as service:
        await serving(service)
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0
