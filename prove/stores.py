"""The stores behind workers without a cluster around them: etcd, an S3 server, a catalog; each a process of its own."""

from __future__ import annotations

import asyncio
import secrets
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.embedded.children import ChildSpec, Supervisor
from cli.embedded.etcd import EtcdServer
from cli.embedded.ports import free_ports
from cli.embedded.seaweed import SeaweedServer
from prove.stage import Stage

_READY_S = 300.0


@dataclass(frozen=True)
class Stores:
    """What a worker has to be told of them. `supervisor` keeps whatever else is started beside them."""

    catalog: str
    server: SeaweedServer
    supervisor: Supervisor

    @property
    def s3(self) -> dict[str, str]:
        """The worker's settings for the bucket."""
        return s3_settings(self.server)


def s3_settings(server: SeaweedServer) -> dict[str, str]:
    """A service's settings for the bucket."""
    return {
        "s3_endpoint": server.url,
        "s3_bucket": server.bucket,
        "s3_access_key": server.access_key,
        "s3_secret_key": server.secret_key,
    }


@asynccontextmanager
async def stores(stage: Stage | None, scratch: Path) -> AsyncIterator[Stores]:
    """A catalog that no router watches, on the stage's etcd and bucket, or on stores of its own under `scratch`."""
    async with Supervisor() as supervisor:
        if stage is not None:
            etcd = stage.cluster.catalog.spec.env["SEGUE_CATALOG_ETCD_ENDPOINT"]
            server = stage.cluster.s3_server
        else:
            own = EtcdServer.in_dir(scratch / "etcd")
            server = SeaweedServer.in_dir(scratch / "s3")
            await asyncio.gather(supervisor.start(own.spec()), supervisor.start(server.spec()))
            etcd = own.endpoint
        settings = {"etcd_endpoint": etcd, "etcd_prefix": f"prove-{secrets.token_hex(6)}/", **s3_settings(server)}
        target, spec = service("catalog", settings)
        await supervisor.start(spec)
        yield Stores(target, server, supervisor)


def service(kind: str, settings: Mapping[str, str], *, name: str = "", threads: int = 1) -> tuple[str, ChildSpec]:
    """A service's target, and how to run it on ports of its own."""
    listen, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))

    def ready() -> bool:
        with urllib.request.urlopen(f"http://{metrics}/readyz", timeout=1) as reply:
            return bool(reply.status == 200)

    async def probe() -> bool:
        return await asyncio.to_thread(ready)

    given = {**settings, "listen": listen, "metrics_listen": metrics}
    env = {f"SEGUE_{kind.upper()}_{key.upper()}": value for key, value in given.items()}
    spec = ChildSpec(
        name=name or kind,
        argv=(sys.executable, "-m", f"services.{kind}"),
        env=env | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        scrub=("SEGUE_",),
        probe=probe,
        ready_within=_READY_S,
        # A worker drains: what it alone holds is published before it goes.
        stop_within=40.0,
        restart=False,
    )
    return listen, spec
