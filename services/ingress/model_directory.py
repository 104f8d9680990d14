"""Served names: those the catalog knows and this ingress has a tokenizer for.

The catalog is asked every few seconds, with jitter, and at once for a name that is not known yet. While it is away the
last answer stands: serving goes on from memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from libs.contracts.segue.v1.catalog_pb2 import ListModelsRequest, ListModelsResponse, Model
from libs.contracts.segue.v1.catalog_pb2_grpc import CatalogStub
from libs.service.errors import StartError
from libs.service.logs import get_logger
from services.ingress.errors import model_not_found
from services.ingress.text_model import TextModel

_CALL_S = 2.0
_ON_DEMAND_EVERY_S = 0.5

log = get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A name clients may ask for."""

    name: str
    text: TextModel
    max_context: int
    """Tokens, the largest of its variants'."""
    vocab_size: int
    fingerprints: tuple[str, ...]
    since: int
    """Unix seconds when it was first seen here."""


@dataclass
class DirectoryCounters:
    """Exported as metrics."""

    served: int = field(default=0, metadata={"help": "Names served now", "kind": "gauge"})
    refreshes: int = field(default=0, metadata={"help": "Answers of the catalog"})
    failures: int = field(default=0, metadata={"help": "Questions the catalog did not answer"})


class ModelDirectory:
    """The served names as last heard."""

    def __init__(self, catalog: grpc.aio.Channel, texts: Mapping[str, TextModel], refresh_s: float) -> None:
        self.counters = DirectoryCounters()
        self._stub = CatalogStub(catalog)  # type: ignore[no-untyped-call, unused-ignore]
        self._texts = texts
        self._refresh_s = refresh_s
        self._models: dict[str, ServedModel] = {}
        self._unserved: frozenset[str] = frozenset()
        self._asking = asyncio.Lock()
        self._asked = 0.0

    async def start(self, within_s: float, where: str) -> None:
        """The first answer. Raises StartError."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not await self._refresh():
            if asyncio.get_running_loop().time() > deadline:
                raise StartError(
                    f"the catalog at {where} does not answer",
                    remedy="start the catalog first, or correct the setting `catalog`",
                )
            await asyncio.sleep(random.uniform(0.1, 0.5))  # noqa: S311

    async def run(self) -> None:
        """Keeps up with the catalog until cancelled."""
        while True:
            await asyncio.sleep(self._refresh_s * random.uniform(0.7, 1.3))  # noqa: S311
            await self._refresh()

    def all(self) -> list[ServedModel]:
        """By name."""
        return [self._models[name] for name in sorted(self._models)]

    async def find(self, name: str) -> ServedModel:
        """Raises ApiError (404)."""
        if name not in self._models and name in self._texts:
            async with self._asking:
                now = asyncio.get_running_loop().time()
                if name not in self._models and now - self._asked > _ON_DEMAND_EVERY_S:
                    await self._refresh()
        found = self._models.get(name)
        if found is None:
            raise model_not_found(
                name, "has no tokenizer at this ingress" if name in self._unserved else "does not exist"
            )
        return found

    async def _refresh(self) -> bool:
        self._asked = asyncio.get_running_loop().time()
        try:
            answer: ListModelsResponse = await self._stub.ListModels(ListModelsRequest(), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            self.counters.failures += 1
            log.debug("catalog does not answer", code=error.code().name, detail=error.details())
            return False
        self.counters.refreshes += 1
        self._take(answer)
        return True

    def _take(self, answer: ListModelsResponse) -> None:
        facts = {model.fingerprint: model for model in answer.models}
        served, unserved = {}, set()
        for name in answer.names:
            variants = [facts[one] for one in name.fingerprints if one in facts]
            if not variants:
                continue
            text = self._texts.get(name.name)
            if text is None:
                unserved.add(name.name)
            else:
                served[name.name] = self._served(name.name, text, variants)
        for missing in unserved - self._unserved:
            log.warning("a served model has no tokenizer here: add it to the setting `models`", model=missing)
        self._models, self._unserved = served, frozenset(unserved)
        self.counters.served = len(served)

    def _served(self, name: str, text: TextModel, variants: list[Model]) -> ServedModel:
        known = self._models.get(name)
        return ServedModel(
            name=name,
            text=text,
            max_context=max(model.max_context for model in variants),
            vocab_size=max(model.vocab_size for model in variants) or text.vocab_size,
            fingerprints=tuple(model.fingerprint for model in variants),
            since=known.since if known is not None else int(time.time()),
        )
