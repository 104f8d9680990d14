"""What the router shows to whoever asks: explanations and workers, as messages of its contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libs.continuation.chain import Node as ChainLink
from libs.contracts.segue.v1 import catalog_pb2, common_pb2, router_pb2, worker_pb2
from libs.controller.candidates import Variant
from libs.controller.catalog_facts import Endpoint
from libs.controller.discovery import Registry, WorkerRecord
from libs.controller.fleet import Fleet
from libs.controller.wire_fields import to_proto
from services.router.clock import now_ms
from services.router.planner import Explanation


def explained(explanation: Explanation) -> router_pb2.ExplainResponse:
    """Ranking, pruned counts, chains, obstacle and revision."""
    answer = router_pb2.ExplainResponse(revision=explanation.revision)
    for option in explanation.plan.ranked:
        candidate = to_proto(option.candidate)
        assert isinstance(candidate, common_pb2.Candidate)
        answer.ranked.append(candidate)
    for pruned in explanation.plan.pruned:
        answer.pruned.add(reason=pruned.reason, count=pruned.count)
    for variant in explanation.variants:
        answer.chains.append(_chain(variant))
    if explanation.plan.obstacle is not None:
        answer.infeasible = explanation.plan.obstacle.detail
    return answer


def _chain(variant: Variant) -> router_pb2.ExplainedChain:
    chain = variant.chain
    shown = router_pb2.ExplainedChain(fingerprint=variant.model.fingerprint, root=chain.base)
    durable = {node.chunk.hash for node in variant.nodes if node.chunk.receipts}
    for node in chain.chunks:
        shown.nodes.append(_node(node, node.hash in durable))
    known_end = variant.nodes[-1].chunk.end if variant.nodes else 0
    found = variant.tail
    if found is not None and known_end == chain.full_end:
        tail = found.chunk
        shown.nodes.add(hash=tail.hash, start=tail.start, end=tail.end, durable=True, tail=True)
    elif chain.tail is not None:
        shown.nodes.append(_node(chain.tail, False))
    return shown


def _node(node: ChainLink, durable: bool) -> router_pb2.ChainNode:
    return router_pb2.ChainNode(hash=node.hash, start=node.start, end=node.end, durable=durable, tail=node.is_tail)


def workers(
    registry: Registry, fleet: Fleet, endpoints: Sequence[Endpoint], revision: int
) -> router_pb2.ListWorkersResponse:
    """Every worker in the map or with a tunnel, by id."""
    listed: Mapping[str, Endpoint] = {endpoint.worker: endpoint for endpoint in endpoints}
    records = {record.worker: record for record in registry.records()}
    answer = router_pb2.ListWorkersResponse(revision=revision)
    for name in sorted(listed.keys() | records.keys()):
        answer.workers.append(_worker(name, listed.get(name), records.get(name), fleet))
    return answer


def _worker(name: str, endpoint: Endpoint | None, record: WorkerRecord | None, fleet: Fleet) -> router_pb2.WorkerStatus:
    status = router_pb2.WorkerStatus(listed=endpoint is not None)
    if endpoint is not None:
        shown = to_proto(endpoint)
        assert isinstance(shown, catalog_pb2.Endpoint)
        status.endpoint.CopyFrom(shown)
    if record is not None:
        status.tunnels = len(record.tunnels)
        status.resident = fleet.index.count(name)
        status.heard_ms = max(0, round(now_ms() - record.heard_ms))
        if record.heartbeat is not None:
            heartbeat = to_proto(replace(record.heartbeat, resident=(), gone=()))
            assert isinstance(heartbeat, worker_pb2.Heartbeat)
            status.heartbeat.CopyFrom(heartbeat)
    return status
