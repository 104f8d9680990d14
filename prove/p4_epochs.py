"""A worker's epochs over everything that can happen to it and to etcd: each new process has a larger one, always.

One worker id; its processes are echo workers, killed with SIGKILL and started again. In between its lease is revoked,
etcd is killed, and etcd's data directory is put back to what it was many restarts ago. A lost lease gives no new epoch:
the same process attaches again. At the end two processes have the one id, and the older must go.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from cli.demo.facts import describe
from cli.embedded.children import Child, Supervisor
from cli.embedded.etcd import EtcdServer
from cli.embedded.seaweed import SeaweedServer
from libs.contracts.segue.v1 import catalog_pb2_grpc
from prove import endpoint_map
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.stores import s3_settings, service

CLAIM = Claim(
    "4-epochs",
    "50 restarts, lease losses, etcd kill -9 and restart, etcd data restored from a backup: epochs strictly increase; "
    "a duplicate worker id: the older exits",
    seed=42,
)
_WORKER = "one"
_WITHIN_S = 60.0
_TTL_S = 2


@dataclass
class Found:
    """`epochs`: of each process, in the order they were started; `events`: how often each happened."""

    epochs: list[int] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    reattached: int = 0
    changed: list[str] = field(default_factory=list)
    """Processes whose own epoch changed while they lived."""
    duplicate: dict[str, bool] = field(default_factory=dict)


class Rig:
    """etcd, a catalog and one worker id."""

    def __init__(self, scratch: Path, supervisor: Supervisor) -> None:
        self._scratch, self._supervisor = scratch, supervisor
        self._server = EtcdServer.in_dir(scratch / "etcd")
        self._backup = scratch / "backup"
        self._settings: dict[str, str] = {}
        self.catalog, self.etcd, self.target = "", None, ""
        self.worker: Child | None = None
        self._etcd: Child | None = None

    async def start(self) -> None:
        """etcd, the catalog (which wants a bucket), and the first backup."""
        store = SeaweedServer.in_dir(self._scratch / "s3")
        self._etcd = await self._supervisor.start(self._server.spec())
        await self._supervisor.start(store.spec())
        settings = {"etcd_endpoint": self._server.endpoint, "lease_ttl_s": f"{_TTL_S}", **s3_settings(store)}
        self.catalog, spec = service("catalog", settings)
        await self._supervisor.start(spec)
        self._settings = {
            "catalog": self.catalog,
            "worker": _WORKER,
            "name": "echo",
            "echo": "true",
            "heartbeat_s": "1",
        }

    async def spawn(self) -> tuple[str, Child]:
        """A new process of the worker."""
        target, spec = service("worker", self._settings, name=_WORKER)
        return target, await self._supervisor.start(spec)

    async def restart_worker(self) -> int:
        """SIGKILL, and a new process; its epoch."""
        if self.worker is not None:
            self.worker.kill()
            await self._supervisor.stop(self.worker)
        self.target, self.worker = await self.spawn()
        return await self.epoch()

    async def epoch(self) -> int:
        """What the living process says of itself."""
        return (await describe(self.target)).endpoint.epoch

    async def kill_etcd(self) -> None:
        assert self._etcd is not None
        before = self._etcd.restarts
        self._etcd.kill()
        await self._etcd.wait_restarted(before + 1)

    async def back_up(self) -> None:
        """A copy of etcd's data, taken while it stands still."""
        await self._stopped(lambda: shutil.copytree(self._server.data_dir, self._backup, dirs_exist_ok=False))

    async def restore(self) -> None:
        """etcd begins again where the copy was taken."""

        def put_back() -> None:
            shutil.rmtree(self._server.data_dir)
            shutil.copytree(self._backup, self._server.data_dir)
            self._server.data_dir.chmod(0o700)

        await self._stopped(put_back)

    async def _stopped(self, do: Callable[[], object]) -> None:
        assert self._etcd is not None
        await self._supervisor.stop(self._etcd)
        await asyncio.to_thread(do)
        self._etcd = await self._supervisor.start(self._server.spec())

    async def lose_lease(self) -> None:
        """Revokes every lease there is, behind the catalog's back."""
        async with grpc.aio.insecure_channel(self._server.endpoint) as channel:
            leases = rpc_pb2_grpc.LeaseStub(channel)
            for one in (await leases.LeaseLeases(rpc.LeaseLeasesRequest(), timeout=5)).leases:
                await leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=one.ID), timeout=5)

    async def listed(self, epoch: int) -> None:
        """Until the endpoint map has the worker with that epoch."""
        async with asyncio.timeout(_WITHIN_S), grpc.aio.insecure_channel(self.catalog) as channel:
            stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
            while True:
                try:
                    async with aclosing(endpoint_map.followed(stub, _WITHIN_S)) as maps:
                        async for now in maps:
                            if now.get(_WORKER) == epoch:
                                return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. Always on an etcd of its own, which it breaks."""
    del stage
    restarts, others = (50, 5) if size is Size.FULL else (3, 1)
    found, draw = Found(), random.Random(CLAIM.seed)
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-epochs-")))
        rig = Rig(scratch, await stack.enter_async_context(Supervisor()))
        await rig.start()
        found.epochs.append(await rig.restart_worker())
        await rig.back_up()
        events: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *(
                [("lease lost", rig.lose_lease), ("etcd killed", rig.kill_etcd), ("etcd restored", rig.restore)]
                * others
            ),
        ]
        draw.shuffle(events)
        due = {1 + place * restarts // len(events): event for place, event in enumerate(events)}
        for number in range(1, restarts + 1):
            if number in due:
                name, happen = due[number]
                await _survives(rig, name, happen, found)
            found.epochs.append(await rig.restart_worker())
        await _duplicate(rig, found)
    return judged(found, restarts)


async def _survives(rig: Rig, name: str, happen: Callable[[], Awaitable[None]], found: Found) -> None:
    """The living process keeps its epoch, and is listed under it again."""
    before = await rig.epoch()
    await happen()
    found.events[name] = found.events.get(name, 0) + 1
    await rig.listed(before)
    found.reattached += 1
    if await rig.epoch() != before:
        found.changed.append(f"{name}: {before} became {await rig.epoch()}")


async def _duplicate(rig: Rig, found: Found) -> None:
    """A second process of the id, while the first lives."""
    older, older_target = rig.worker, rig.target
    assert older is not None
    younger_target, younger = await rig.spawn()
    found.epochs.append((await describe(younger_target)).endpoint.epoch)
    began = time.monotonic()
    await older.wait_ended(_WITHIN_S)
    found.duplicate = {
        "older ended by itself": older.exit_code not in (None, 0) and (older.exit_code or 0) > 0,
        "older does not answer": not await _answers(older_target),
        "younger lives": younger.pid is not None and await _answers(younger_target),
        "within two leases": time.monotonic() - began < 2 * _TTL_S + 5,
    }


async def _answers(target: str) -> bool:
    try:
        await describe(target)
    except grpc.aio.AioRpcError:
        return False
    return True


def judged(found: Found, restarts: int) -> Outcome:
    """Strictly increasing over all processes, constant over the life of each."""
    checks = Checks()
    checks.check("processes", len(found.epochs), f">= {restarts + 2}", len(found.epochs) >= restarts + 2)
    drops = [i for i in range(1, len(found.epochs)) if found.epochs[i] <= found.epochs[i - 1]]
    checks.equal("epochs not above the one before", [*drops], [])
    for name in ("lease lost", "etcd killed", "etcd restored"):
        checks.check(name, found.events.get(name, 0), ">= 1", found.events.get(name, 0) >= 1)
    checks.equal("attached again after each", found.reattached, sum(found.events.values()))
    checks.equal("epochs that changed in a process's life", [*found.changed], [])
    for what, holds in found.duplicate.items():
        checks.equal(f"duplicate: {what}", holds, True)
    checks.check("duplicate tried", len(found.duplicate), "> 0", bool(found.duplicate))
    return checks.outcome({"epochs": [*found.epochs]})
