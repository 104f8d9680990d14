"""The metrics port: what Prometheus reads, what probes see, what a rude client can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.service import metrics as metrics_module
from libs.service.metrics import Metrics, MetricsBindError


@dataclass
class Counters:
    offers: int = field(default=0, metadata={"help": "Offers made"})
    queue: float = field(default=0.0, metadata={"help": "Requests waiting", "kind": "gauge"})


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    port = await metrics.start("127.0.0.1:0")
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await metrics.stop()


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_counters_are_read_at_scrape_time() -> None:
    metrics, counters, workers = Metrics("router"), Counters(), {"a": Counters(1), "b": Counters(2)}
    metrics.export("plan", counters)
    metrics.export_each("worker", Counters, lambda: [((name,), c) for name, c in workers.items()], ["worker"])
    async with serving(metrics) as client:
        counters.offers, counters.queue = 7, 2.5
        workers["c"] = Counters(3)
        del workers["a"]
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        read = samples(reply.text)
        assert read["segue_router_plan_offers_total", ()] == 7
        assert read["segue_router_plan_queue", ()] == 2.5
        assert {key[1]: v for key, v in read.items() if key[0] == "segue_router_worker_offers_total"} == {
            ("b",): 2.0,
            ("c",): 3.0,
        }
        assert any(name == "process_cpu_seconds_total" for name, _ in read)
        open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert open_metrics.text.endswith("# EOF\n")


def test_two_registries_in_one_process_and_no_name_twice() -> None:
    first, second = Metrics("router"), Metrics("router")
    first.export("plan", Counters())
    second.export("plan", Counters())
    with pytest.raises(ValueError, match="Duplicated"):
        first.export("plan", Counters())


def test_a_counter_without_help_is_refused() -> None:
    @dataclass
    class Mute:
        mute: int = 0

    with pytest.raises(TypeError, match="mute"):
        Metrics("router").export("", Mute())


async def test_probes() -> None:
    metrics = Metrics("router")
    async with serving(metrics) as client:
        assert (await client.get("/readyz")).status_code == 503
        assert "starting" in (await client.get("/readyz")).text
        assert (await client.get("/healthz")).status_code == 200
        metrics.set_ready(None)
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.head("/readyz")).status_code == 200
        assert (await client.get("/readyz?verbose=1")).status_code == 200
        metrics.set_ready("loading the model")
        reply = await client.get("/readyz")
        assert (reply.status_code, reply.text) == (503, "not ready: loading the model\n")
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n\r\n", b"GET", b"\xff\xfe\r\n\r\n", b"GET /" + b"x" * 50_000 + b"\r\n\r\n"]
)
async def test_rude_clients_are_dropped_and_others_served(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_REQUEST_WITHIN_S", 0.2)
    metrics = Metrics("router")
    async with serving(metrics) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", metrics.port)
        writer.write(sent)
        async with asyncio.timeout(5):
            await writer.drain()
            with suppress(ConnectionResetError):
                await reader.read()  # the server closes, with an answer or without
        writer.close()
        assert (await client.get("/healthz")).status_code == 200


async def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MetricsBindError, match="metrics_listen"):
            await Metrics("router").start(f"127.0.0.1:{taken.getsockname()[1]}")
