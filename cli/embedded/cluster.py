"""A whole cluster on one machine: etcd, S3, catalog, router, workers and ingress, each its own child process.

Everything is the real thing, on loopback ports. `segue up`, `segue demo`, the end-to-end tests and the claims under
`prove/` all run on this class. Ports are drawn once, so a child that is restarted comes back under its old address.
State lies under one directory:

    etcd/  s3/          the two stores
    workers/<id>/       each worker's chunk directory
    tenant.secret       behind every tenant's salt; made once
    lock                held while a cluster runs here
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import grpc.aio

from cli.embedded.children import Child, ChildFailedError, ChildSpec, Sink, Supervisor
from cli.embedded.etcd import EtcdServer
from cli.embedded.models import default_cache, prepare, served_name
from cli.embedded.ports import free_ports
from cli.embedded.seaweed import SeaweedServer
from libs.contracts.segue.v1 import router_pb2, router_pb2_grpc

Progress = Callable[[str, float], None]
_PROBE_TIMEOUT_S = 1.0
_STATE = frozenset({"etcd", "s3", "workers", "tenant.secret", "lock"})
"""All that a state directory may hold."""
_KNOWN_WITHIN_S = 60.0
_WORKER_READY_S = 600.0
"""A large model takes its time to load and warm up."""


class StateLockedError(RuntimeError):
    """Another cluster runs in the same state directory."""

    def __init__(self, state: Path) -> None:
        super().__init__(f"{state} is in use by another running cluster: stop it, or pass another --state")


class NotStateError(RuntimeError):
    """A directory that was to be cleared is not, or not only, a cluster's state."""

    def __init__(self, state: Path, foreign: list[str]) -> None:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        super().__init__(f"{state} holds what is not a cluster's ({shown}): nothing was deleted; pass another --state")


class PortTakenError(RuntimeError):
    """The wanted ingress port is in use."""

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} is in use: stop what listens there, or pass another --port (0 takes a free one)")


@dataclass(frozen=True)
class ClusterSpec:
    """What to run."""

    state: Path
    models: tuple[str, ...] = ("gemma3-270m",)
    workers: int = 2
    """Per model."""
    routers: int = 1
    device: str = "cpu"
    threads: int | None = None
    """Of each worker; None = cores ÷ workers."""
    port: int = 0
    """Of the ingress; 0 = any free one."""
    echo: bool = False
    """Model-free workers with declared costs."""
    model_cache: Path = field(default_factory=default_cache)
    otlp_endpoint: str | None = None
    chat_templates: tuple[str, ...] = ()
    """NAME=FILE overrides, passed on to the ingress."""
    worker_settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of the workers, by name, e.g. {"lanes": "4"}."""
    router_settings: Mapping[str, str] = field(default_factory=dict)
    restart: bool = True


@dataclass(frozen=True)
class WorkerHandle:
    """One worker of the cluster."""

    name: str
    model: str
    target: str
    chunk_dir: Path
    child: Child

    @property
    def metrics_url(self) -> str:
        """Its `/metrics`."""
        return f"http://{self.child.spec.env['SEGUE_WORKER_METRICS_LISTEN']}/metrics"


@dataclass(frozen=True)
class _ServicePorts:
    listen: int
    metrics: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.listen}"


class Cluster:
    """A running cluster; made by `running`."""

    def __init__(self, spec: ClusterSpec, supervisor: Supervisor, progress: Progress) -> None:
        self.spec = spec
        self.workers: dict[str, WorkerHandle] = {}
        self.folders: dict[str, Path] = {}
        """Model folders by served name."""
        self._supervisor = supervisor
        self._progress = progress
        ports = free_ports(4 + 2 * spec.routers)
        self._catalog = _ServicePorts(ports[0], ports[1])
        self._ingress = _ServicePorts(spec.port or ports[2], ports[3])
        self._routers = [_ServicePorts(*ports[4 + 2 * number :][:2]) for number in range(spec.routers)]
        self.etcd: Child
        self.s3: Child
        self.s3_server: SeaweedServer
        self.catalog: Child
        self.routers: list[Child] = []
        self.ingress: Child

    @property
    def base_url(self) -> str:
        """Of the OpenAI API, with `/v1`."""
        return f"http://{self._ingress.target}/v1"

    @property
    def catalog_target(self) -> str:
        return self._catalog.target

    @property
    def router(self) -> Child:
        """The only router, or the first."""
        return self.routers[0]

    @property
    def router_target(self) -> str:
        """Of the same."""
        return self._routers[0].target

    @property
    def router_targets(self) -> list[str]:
        """Of all."""
        return [ports.target for ports in self._routers]

    @property
    def router_metrics_urls(self) -> list[str]:
        """`/metrics` of each router."""
        return [_metrics_url(ports) for ports in self._routers]

    @property
    def tenant_secret(self) -> str:
        """The key behind every tenant's salt, hex."""
        return _tenant_secret(self.spec.state / "tenant.secret")

    @property
    def metrics_urls(self) -> dict[str, str]:
        """`/metrics` of the single services, and of the first router."""
        named = {"catalog": self._catalog, "router": self._routers[0], "ingress": self._ingress}
        return {name: _metrics_url(ports) for name, ports in named.items()}

    async def start(self) -> None:
        """Stores and models first, then the services in the order of their needs. Raises ChildFailedError and kin."""
        spec = self.spec
        self._progress("starting etcd and the object store", 0.0)
        etcd = EtcdServer.in_dir(spec.state / "etcd")
        self.s3_server = SeaweedServer.in_dir(spec.state / "s3")
        async with asyncio.TaskGroup() as tasks:
            starting = [
                tasks.create_task(self._supervisor.start(server.spec(restart=spec.restart)))
                for server in (etcd, self.s3_server)
            ]
            models = list(dict.fromkeys(("tiny",) if spec.echo else spec.models))
            preparing = [tasks.create_task(self._prepare(model)) for model in models]
        self.etcd, self.s3 = (task.result() for task in starting)
        self.folders = dict(task.result() for task in preparing)
        self._progress("starting the catalog and the router", 0.4)
        self.catalog = await self._service("catalog", self._catalog, self._catalog_settings(etcd))
        for number, ports in enumerate(self._routers):
            name = "router" if number == 0 else f"router-{number}"
            settings = {"catalog": self.catalog_target, **spec.router_settings}
            self.routers.append(
                self._spawn_service("router", ports, settings, _http_ready, name=name, ready_within=_WORKER_READY_S)
            )
        self._progress("starting the ingress, loading the workers", 0.5)
        for number, model in enumerate(self._worker_models()):
            self._spawn_worker(f"worker-{number}", model)
        self.ingress = self._spawn_service("ingress", self._ingress, self._ingress_settings(), _http_ready)
        for done, worker in enumerate(self.workers.values(), 1):
            await self._supervisor.first_ready(worker.child)
            self._progress(f"{worker.name} is warm", 0.5 + 0.4 * done / len(self.workers))
        self._progress("waiting for the API", 0.95)
        for router in self.routers:  # ready once it has tunnels to the workers
            await self._supervisor.first_ready(router)
        await self._supervisor.first_ready(self.ingress)
        await self._everybody_known()
        self._progress("ready", 1.0)

    async def _everybody_known(self) -> None:
        """Waits until the API lists every model and every router hears every worker: only then is it one cluster."""
        try:
            async with asyncio.timeout(_KNOWN_WITHIN_S):
                for target in self.router_targets:
                    await self._all_heard(target)
                while True:
                    if set(await asyncio.to_thread(models_answered, self.base_url)) >= set(self.folders):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            reason = f"did not list {sorted(self.folders)} with all of {sorted(self.workers)} heard in time"
            raise ChildFailedError("ingress", reason, list(self.ingress.tail)) from None

    async def _all_heard(self, target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            while True:
                known = await router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_PROBE_TIMEOUT_S * 5)
                if {one.endpoint.worker for one in known.workers if one.listed and one.heartbeat.sequence} >= set(
                    self.workers
                ):
                    return
                await asyncio.sleep(0.1)

    async def _prepare(self, model: str) -> tuple[str, Path]:
        name = "echo" if self.spec.echo else served_name(model)
        return name, await prepare(model, self.spec.model_cache, self._progress)

    def _worker_models(self) -> list[str]:
        return [name for name in self.folders for _ in range(self.spec.workers)]

    def _catalog_settings(self, etcd: EtcdServer) -> dict[str, str]:
        return {"etcd_endpoint": etcd.endpoint} | self._s3_settings()

    def _s3_settings(self) -> dict[str, str]:
        return {
            "s3_endpoint": self.s3_server.url,
            "s3_bucket": self.s3_server.bucket,
            "s3_access_key": self.s3_server.access_key,
            "s3_secret_key": self.s3_server.secret_key,
        }

    def _ingress_settings(self) -> dict[str, str]:
        return {
            "routers": ",".join(self.router_targets),
            "catalog": self.catalog_target,
            "models": ",".join(f"{name}={folder}" for name, folder in self.folders.items()),
            "tenant_secret": self.tenant_secret,
            "chat_template": ",".join(self.spec.chat_templates),
        }

    def _spawn_worker(self, name: str, model: str) -> None:
        spec, ports = self.spec, _ServicePorts(*free_ports(2))
        chunk_dir = spec.state / "workers" / name
        total = max(1, len(self._worker_models()))
        threads = spec.threads or max(1, (os.cpu_count() or 1) // total)
        settings = {
            "worker": name,
            "name": model,
            "catalog": self.catalog_target,
            "chunk_dir": str(chunk_dir),
            **self._s3_settings(),
            **({"echo": "true"} if spec.echo else {"model": str(self.folders[model]), "device": spec.device}),
            **({} if spec.echo else {"threads": str(threads)}),
            **spec.worker_settings,
        }
        child = self._spawn_service("worker", ports, settings, _http_ready, name=name, ready_within=_WORKER_READY_S)
        self.workers[name] = WorkerHandle(name, model, ports.target, chunk_dir, child)

    async def _service(
        self, service: str, ports: _ServicePorts, settings: Mapping[str, str], *, name: str | None = None
    ) -> Child:
        child = self._spawn_service(service, ports, settings, _http_ready, name=name)
        await self._supervisor.first_ready(child)
        return child

    def _spawn_service(
        self,
        service: str,
        ports: _ServicePorts,
        settings: Mapping[str, str],
        ready: Callable[[int], bool],
        *,
        name: str | None = None,
        ready_within: float = 90.0,
    ) -> Child:
        common = {"listen": ports.target, "metrics_listen": f"127.0.0.1:{ports.metrics}"}
        if self.spec.otlp_endpoint:
            common["otlp_endpoint"] = self.spec.otlp_endpoint
        given = {f"SEGUE_{service.upper()}_{key.upper()}": value for key, value in {**common, **settings}.items()}

        async def probe() -> bool:
            return await asyncio.to_thread(ready, ports.metrics)

        return self._supervisor.spawn(
            ChildSpec(
                name=name or service,
                argv=(sys.executable, "-m", f"services.{service}"),
                env=given | _thread_limits(settings.get("threads")),
                probe=probe,
                ready_within=ready_within,
                # A worker drains: what it alone holds is published before it goes.
                stop_within=40.0,
                restart=self.spec.restart,
            )
        )


@asynccontextmanager
async def running(
    spec: ClusterSpec, sink: Sink | None = None, progress: Progress | None = None
) -> AsyncIterator[Cluster]:
    """A ready cluster; everything it started is gone when the context ends.

    Raises StateLockedError, PortTakenError, ModelUnavailableError, ChildFailedError.
    """
    spec.state.mkdir(parents=True, exist_ok=True)
    with (spec.state / "lock").open("w") as lock:
        _take(lock, spec.state)
        if spec.port and not port_is_free(spec.port):
            raise PortTakenError(spec.port)
        async with Supervisor(sink) as supervisor:
            cluster = Cluster(spec, supervisor, progress or (lambda _doing, _fraction: None))
            try:
                await cluster.start()
            except* Exception as group:
                raise _first(group) from None
            yield cluster


def clear(state: Path) -> None:
    """Forget everything under a state directory that no cluster runs in.

    Raises StateLockedError, and NotStateError for a directory that holds anything else: nothing of it is touched.
    """
    if not state.exists():
        return
    foreign = sorted(path.name for path in state.iterdir() if path.name not in _STATE)
    if foreign:
        raise NotStateError(state, foreign)
    with (state / "lock").open("w") as lock:
        _take(lock, state)
        for path in state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _take(lock: IO[str], state: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateLockedError(state) from None


def port_is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _metrics_url(ports: _ServicePorts) -> str:
    return f"http://127.0.0.1:{ports.metrics}/metrics"


def _http_ready(metrics_port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/readyz", timeout=_PROBE_TIMEOUT_S) as reply:
        return bool(reply.status == 200)


def _thread_limits(threads: str | None) -> dict[str, str]:
    # Without a limit every library in the process starts a thread for each core of the machine.
    return {"OMP_NUM_THREADS": threads or "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _tenant_secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    secret = secrets.token_hex(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    return secret


def models_answered(base_url: str) -> list[str]:
    """Model ids the API lists now."""
    with urllib.request.urlopen(f"{base_url}/models", timeout=5) as reply:  # noqa: S310
        return [str(model["id"]) for model in json.load(reply)["data"]]
