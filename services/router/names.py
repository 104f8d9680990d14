"""What served names stand for: the catalog's answer, cached and refreshed in the background.

A name that is known is answered from memory at once, also while the catalog is away; only a name heard for the first
time waits for the catalog. Names in use are looked at again every few seconds, and when the endpoint map changes (a
worker that registers may add a variant). A name nobody asked for lately is forgotten.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.catalog_facts import Model
from libs.controller.wire_fields import from_proto
from libs.service.logs import get_logger
from services.router.clock import Spawn

_CALL_S = 2.0
_NAMES = 1_024
_FORGET_S = 600.0
_UNKNOWN_S = 1.0  # how long an unknown name is believed to be one
_AWAY_S = 0.5  # between two questions about a name that waits for the catalog
_UNKNOWN = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT})

log = get_logger(__name__)


class CatalogAwayError(Exception):
    """The name was never heard of and the catalog does not answer."""


@dataclass
class NameCounters:
    """Exported as metrics."""

    known: int = field(default=0, metadata={"help": "Served names remembered", "kind": "gauge"})
    asked: int = field(default=0, metadata={"help": "Names the catalog was asked for"})
    failures: int = field(default=0, metadata={"help": "Questions the catalog did not answer"})


@dataclass(slots=True)
class _Name:
    models: tuple[Model, ...] | None  # None = away so far; () = unknown
    heard_s: float
    used_s: float


class Names:
    """See the module. `changed` is called when waiting requests may have become possible."""

    def __init__(self, channel: grpc.aio.Channel, refresh_s: float, spawn: Spawn, changed: Callable[[], None]) -> None:
        self.counters = NameCounters()
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._refresh_s = refresh_s
        self._spawn = spawn
        self._changed = changed
        self._names: dict[str, _Name] = {}
        self._models: dict[str, Model] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._kick = asyncio.Event()

    async def resolve(self, name: str) -> tuple[Model, ...]:
        """The variants in order of preference; empty = unknown. Raises CatalogAwayError."""
        loop = asyncio.get_running_loop()
        known = self._names.get(name)
        stale = known is None or (not known.models and loop.time() - known.heard_s >= _UNKNOWN_S)
        if stale:
            await self._ask_once(name)
            known = self._names.get(name)
        if known is None or known.models is None:
            raise CatalogAwayError(f"model {name!r} was not heard of yet and the catalog does not answer")
        known.used_s = loop.time()
        return known.models

    def model(self, fingerprint: str) -> Model | None:
        """A variant heard of before, also if its name has moved on since."""
        return self._models.get(fingerprint)

    def refresh(self) -> None:
        """Look at the names in use soon."""
        self._kick.set()

    async def run(self) -> None:
        """Keeps up with the names in use until cancelled."""
        while True:
            away = any(name.models is None for name in self._names.values())
            pause = _AWAY_S if away else self._refresh_s
            try:
                async with asyncio.timeout(pause * random.uniform(0.7, 1.3)):  # noqa: S311
                    await self._kick.wait()
            except TimeoutError:
                pass
            self._kick.clear()
            now = asyncio.get_running_loop().time()
            for name, entry in tuple(self._names.items()):
                if now - entry.used_s > _FORGET_S:
                    del self._names[name]
                    continue
                await self._ask_once(name)
            self.counters.known = len(self._names)

    async def _ask_once(self, name: str) -> None:
        """One question at a time for each name; those who come meanwhile wait for its answer."""
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = self._spawn(self._ask(name), "name")
            asking.add_done_callback(lambda _: self._asking.pop(name))
        # Not awaited itself: who waits may be cancelled, the question goes on.
        await asyncio.wait({asking})

    async def _ask(self, name: str) -> None:
        self.counters.asked += 1
        loop = asyncio.get_running_loop()
        old = self._names.get(name)
        try:
            answer = await self._stub.ResolveName(catalog_pb2.ResolveNameRequest(name=name), timeout=_CALL_S)
            models: tuple[Model, ...] | None = tuple(from_proto(Model, model) for model in answer.models)
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNKNOWN:
                models = ()
            else:
                self.counters.failures += 1
                log.debug("catalog does not answer", code=error.code().name, detail=error.details())
                if old is not None and old.models is not None:
                    return
                models = None
        now = loop.time()
        self._names[name] = _Name(models, now, old.used_s if old is not None else now)
        while len(self._names) > _NAMES:
            del self._names[min(self._names, key=lambda key: self._names[key].used_s)]
        for model in models or ():
            self._models[model.fingerprint] = model
        while len(self._models) > _NAMES:
            del self._models[next(iter(self._models))]
        if old is not None and old.models != models and models is not None:
            self._changed()
