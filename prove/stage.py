"""Where a claim plays: a running cluster with an OTLP receiver beside it, and the clients to talk to it.

At full size a claim makes its own stage; as a slice it is given the one that the end-to-end tests share.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from cli.demo.facts import Facts
from cli.demo.talk import Talker
from cli.embedded.children import Sink
from cli.embedded.cluster import Cluster, ClusterSpec, running
from tests.fixtures.otlp import OtlpReceiver, otlp_receiver

UNHURRIED = {"kv_bytes": "256MiB", "restore_loss_ms": "60000", "hedge_ms": "60000"}
"""Workers' settings: no restore is given up and no read overtaken for a machine that is busy with other things."""


@dataclass(frozen=True)
class Stage:
    """A ready cluster that serves one model. `spans`: every span its services have sent."""

    cluster: Cluster
    spans: OtlpReceiver
    talker: Talker
    facts: Facts
    http: httpx.AsyncClient

    @property
    def model(self) -> str:
        """The served name."""
        return self.talker.model

    @property
    def folder(self) -> Path:
        """The model's folder, for the reference."""
        return self.cluster.folders[self.model]


@asynccontextmanager
async def staged(
    model: str = "gemma3-270m",
    *,
    state: Path | None = None,
    echo: bool = False,
    workers: int = 2,
    routers: int = 1,
    threads: int | None = None,
    worker_settings: Mapping[str, str] | None = None,
    router_settings: Mapping[str, str] | None = None,
    restart: bool = True,
    sink: Sink | None = None,
) -> AsyncIterator[Stage]:
    """A fresh cluster in `state` (None: a temporary directory), gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="segue-prove-") as scratch:
        async with otlp_receiver() as spans:
            spec = ClusterSpec(
                state=state or Path(scratch),
                models=(model,),
                workers=workers,
                routers=routers,
                threads=threads,
                echo=echo,
                otlp_endpoint=spans.endpoint,
                worker_settings=worker_settings or {},
                router_settings=router_settings or {},
                restart=restart,
            )
            async with running(spec, sink) as cluster, httpx.AsyncClient() as http:
                name = next(iter(cluster.folders))
                facts = Facts(cluster.catalog_target, cluster.router_target, name, cluster.tenant_secret)
                try:
                    yield Stage(cluster, spans, Talker(cluster.base_url, name, http), facts, http)
                finally:
                    await facts.aclose()


@asynccontextmanager
async def on(stage: Stage | None) -> AsyncIterator[Stage]:
    """The given stage, or one of a claim's own with the real model."""
    if stage is not None:
        yield stage
        return
    async with staged() as own:
        yield own
