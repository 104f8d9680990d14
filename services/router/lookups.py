"""Chunk facts of a chain: what is remembered, and one look-up at the catalog for the rest, within a budget.

Chunks never change, so only the unknown suffix is asked for; where something remembered is old enough for its replicas
to have changed, the whole chain is asked for again. A plan waits for the answer no longer than its budget; the answer
then still comes and is remembered for the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import grpc

from libs.continuation.chain import TAIL_TOKENS, tails_after
from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.candidates import Variant
from libs.controller.catalog_facts import Node
from libs.controller.facts import FactCache
from libs.controller.protocol import GenerationRequest
from libs.controller.wire_fields import from_proto
from libs.service.logs import get_logger
from services.router.clock import Spawn, now_ms
from services.router.metrics import RouterMetrics

_CALL_S = 2.0
_UNDER_WAY = 256
"""Look-ups at once; beyond it plans are made without."""

log = get_logger(__name__)


@dataclass(slots=True)
class _Answer:
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A variant with what is known of its chain. `revision` 0 = from memory."""

    entry: Variant
    revision: int = 0


class Lookups:
    """See the module."""

    def __init__(self, channel: grpc.aio.Channel, cache: FactCache, metrics: RouterMetrics, spawn: Spawn) -> None:
        self.cache = cache
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._metrics = metrics
        self._spawn = spawn
        self._under_way = 0

    def remembered(self, entry: Variant, request: GenerationRequest) -> Variant:
        """The variant with what is remembered of its chain."""
        nodes, _ = self._known(entry)
        return replace(entry, nodes=nodes, tail=self._tail(entry, nodes, request))

    async def complete(
        self, entry: Variant, request: GenerationRequest, budget_s: float, *, always: bool = False
    ) -> Facts:
        """As `remembered`, after asking the catalog for what is not known (`always`: for everything)."""
        nodes, stale = self._known(entry)
        whole = always or stale
        if not whole and self._complete(entry, nodes, request):
            return Facts(self.remembered(entry, request))
        if self._under_way >= _UNDER_WAY:
            self._metrics.lookup("skipped")
            return Facts(self.remembered(entry, request))
        answer = _Answer()
        self._under_way += 1
        asking = self._spawn(self._ask(entry, request, () if whole else nodes, answer), "look-up")
        done, _ = await asyncio.wait({asking}, timeout=budget_s)
        if not done:
            self._metrics.lookup("late")
        elif answer.revision:
            self._metrics.lookup("in_time")
        return Facts(self.remembered(entry, request), answer.revision)

    def _known(self, entry: Variant) -> tuple[tuple[Node, ...], bool]:
        hashes = [node.hash for node in entry.chain.chunks]
        known = self.cache.known(entry.model.fingerprint, hashes, now_ms())
        return known.nodes, known.stale

    def _tail(self, entry: Variant, nodes: tuple[Node, ...], request: GenerationRequest) -> Node | None:
        """The longest remembered tail under the last known node."""
        end = nodes[-1].chunk.end if nodes else 0
        rest = request.tokens[end : request.processed]
        if len(rest) < TAIL_TOKENS:
            return None
        last = nodes[-1].chunk.hash if nodes else entry.chain.base
        for tail in reversed(tails_after(last, rest, end)):
            node = self.cache.node(entry.model.fingerprint, tail.hash)
            if node is not None:
                return node
        return None

    def _complete(self, entry: Variant, nodes: tuple[Node, ...], request: GenerationRequest) -> bool:
        """Whether the catalog could add nothing: every full chunk is known, and the longest tail that can be."""
        if len(nodes) < len(entry.chain.chunks):
            return False
        longest = (request.processed - entry.chain.full_end) // TAIL_TOKENS * TAIL_TOKENS
        if not longest:
            return True
        tail = self._tail(entry, nodes, request)
        return tail is not None and tail.chunk.end == entry.chain.full_end + longest

    async def _ask(self, entry: Variant, request: GenerationRequest, known: tuple[Node, ...], answer: _Answer) -> None:
        fingerprint = entry.model.fingerprint
        start = known[-1].chunk.end if known else 0
        wanted = catalog_pb2.LookupRequest(
            fingerprint=fingerprint,
            tenant_salt=request.tenant_salt,
            after=known[-1].chunk.hash if known else "",
            tokens=request.tokens[start : request.processed],
            start=start,
        )
        try:
            found = await self._stub.Lookup(wanted, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            self._metrics.lookup("failed")
            log.debug("look-up failed", code=error.code().name, detail=error.details())
            return
        finally:
            self._under_way -= 1
        nodes = [from_proto(Node, node) for node in found.nodes]
        if not known:
            # The catalog has answered for the whole chain: what it does not name any more was collected.
            self.cache.forget(fingerprint, (node.hash for node in entry.chain.chunks[len(nodes) :]))
        if found.HasField("tail"):
            nodes.append(from_proto(Node, found.tail))
        self.cache.put(fingerprint, nodes, now_ms())
        answer.revision = int(found.revision)
