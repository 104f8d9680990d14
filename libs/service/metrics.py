"""Prometheus metrics and probes over HTTP, on a port of their own, from the service's event loop.

Served from the loop on purpose: `/healthz` answers exactly when the loop does, which is what a liveness probe should
find out. `/readyz` follows the service's readiness. The registry is the process's own, not the library's global one, so
two services in one test process do not meet.

A component counts in a plain dataclass (no lock, no library on its hot path) and `Metrics.export` reads it at scrape
time. Fields carry their text in metadata: `x: int = field(default=0, metadata={"help": "…"})`, with `"kind": "gauge"`
for values that may fall.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from libs.service.errors import StartError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_REQUEST_WITHIN_S = 5.0
_REQUEST_LIMIT = 16_384
_TEXT = "text/plain; charset=utf-8"

Read = Callable[[], Iterable[tuple[Sequence[str], "DataclassInstance"]]]
"""Label values and counters of each instance, read at scrape time."""


class MetricsBindError(StartError):
    """The metrics address cannot be listened on."""


class _Counters(Collector):
    def __init__(self, prefix: str, shape: type[DataclassInstance], read: Read, labels: Sequence[str]) -> None:
        self._prefix, self._fields, self._read, self._labels = prefix, dataclasses.fields(shape), read, labels

    def describe(self) -> Iterator[Metric]:
        return iter(self._families().values())

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for label_values, counters in self._read():
            for name, family in families.items():
                family.add_metric(label_values, float(getattr(counters, name)))
        return iter(families.values())

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for field in self._fields:
            family = GaugeMetricFamily if field.metadata.get("kind") == "gauge" else CounterMetricFamily
            families[field.name] = family(f"{self._prefix}_{field.name}", field.metadata["help"], labels=self._labels)
        return families


class Metrics:
    """The process's registry and its HTTP endpoint."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"segue_{service}"
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._server: asyncio.Server | None = None
        self._not_ready: str | None = "starting"
        self.port = 0

    def export(self, name: str, counters: DataclassInstance) -> None:
        """Exports one dataclass of numbers as segue_SERVICE_NAME_FIELD (counters get _total, as Prometheus has it).

        Raises TypeError for a field without help text, ValueError for a name exported before.
        """
        self.export_each(name, type(counters), lambda: [((), counters)])

    def export_each(self, name: str, shape: type[DataclassInstance], read: Read, labels: Sequence[str] = ()) -> None:
        """As `export`, for several instances of one dataclass told apart by labels (never a tenant or a request)."""
        mute = [field.name for field in dataclasses.fields(shape) if "help" not in field.metadata]
        if mute:
            raise TypeError(f'{shape.__name__} has counters without metadata["help"]: {", ".join(mute)}')
        self.registry.register(_Counters(f"{self._prefix}_{name}" if name else self._prefix, shape, read, labels))

    def set_ready(self, why_not: str | None) -> None:
        """None: ready. Otherwise what it waits for, which `/readyz` tells."""
        self._not_ready = why_not

    async def start(self, listen: str) -> int:
        """Serves on HOST:PORT; returns the port. Raises MetricsBindError."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=_REQUEST_LIMIT)
        except OSError as error:
            raise MetricsBindError(
                f"cannot listen on {listen} for metrics ({error.strerror})",
                remedy="stop what holds the port, or choose another with the setting `metrics_listen`",
            ) from None
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            # Connections are short and bounded; waiting for one that stalls would hold up the exit.
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                status, kind, body = self._answer(head[0], _headers(head[1:]))
                reply = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                reply += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(reply.encode() + (b"" if head[0].startswith("HEAD ") else body))
                await writer.drain()
        writer.close()

    def _answer(self, request_line: str, headers: Mapping[str, str]) -> tuple[HTTPStatus, str, bytes]:
        method, _, rest = request_line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET and HEAD\n"
        if path == "/metrics":
            encode, kind = choose_encoder(headers.get("accept", ""))
            registry: Any = self.registry
            return HTTPStatus.OK, kind, encode(registry)
        if path == "/healthz":
            return HTTPStatus.OK, _TEXT, b"ok\n"
        if path == "/readyz":
            if self._not_ready is None:
                return HTTPStatus.OK, _TEXT, b"ready\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"not ready: {self._not_ready}\n".encode()
        return HTTPStatus.NOT_FOUND, _TEXT, b"here: /metrics /healthz /readyz\n"


def _headers(lines: Sequence[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
