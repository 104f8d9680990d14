"""Messages that no honest peer of this version sends. Nearly all of them must change nothing, and be counted.

Those to a router are about its first active attempt, those to a worker about its oldest assignment; what the invariants
do not see anyway is checked here. Two count: a failure before its acceptance (as if it had overtaken it), and a
completion that claims too little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from libs.controller import router_events as rx
from libs.controller import worker_events as wx
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    DeclineReason,
    Delta,
    FinishReason,
    GenerationRequest,
    Heartbeat,
    Offer,
    OfferReply,
    Result,
    ResultStatus,
    Tier,
    TokenLogprobs,
)
from libs.simulation import declared
from libs.simulation.shadow import Active

if TYPE_CHECKING:
    from libs.simulation.links import Tunnel
    from libs.simulation.router_node import RouterNode
    from libs.simulation.worker_node import WorkerNode
    from libs.simulation.world import World

_ABOUT_ACTIVE: tuple[Callable[[Active, int, tuple[int, ...], int], rx.RouterEvent | None], ...] = (
    lambda a, due, right, left: rx.DeltaReceived("nobody", Delta(a.assignment, a.epoch, due, right)),
    lambda a, due, right, left: rx.DeltaReceived(a.worker, Delta(a.assignment, a.epoch + 1, due, right)),
    lambda a, due, right, left: rx.DeltaReceived(a.worker, Delta(a.assignment, a.epoch, due, ())),
    lambda a, due, right, left: rx.DeltaReceived(
        a.worker, Delta(a.assignment, a.epoch, due, right, (TokenLogprobs(0.0),) * (len(right) + 1))
    ),
    lambda a, due, right, left: (
        rx.DeltaReceived(a.worker, Delta(a.assignment, a.epoch, due - 1, (0, *right))) if due else None
    ),
    lambda a, due, right, left: rx.DeltaReceived(
        a.worker, Delta(a.assignment, a.epoch, due, (right or (1,)) * (left + 1))
    ),
    lambda a, due, right, left: rx.ReplyReceived(
        "nobody", OfferReply(a.assignment, a.epoch, False, DeclineReason.QUEUE_FULL)
    ),
    lambda a, due, right, left: rx.ResultReceived(
        a.worker, Result(a.assignment, a.epoch + 1, ResultStatus.COMPLETED, FinishReason.LENGTH)
    ),
    lambda a, due, right, left: rx.DeltaReceived(a.worker, Delta(a.assignment, a.epoch, due + 1, right or (1,))),
    lambda a, due, right, left: rx.ReplyReceived(a.worker, OfferReply(a.assignment, a.epoch + 1, True)),
    lambda a, due, right, left: (
        rx.ReplyReceived(a.worker, OfferReply(a.assignment, a.epoch, False, DeclineReason.DUPLICATE))
        if a.answered
        else None
    ),
    lambda a, due, right, left: (
        rx.ReplyReceived(a.worker, OfferReply(a.assignment, a.epoch, True)) if a.answered else None
    ),
    lambda a, due, right, left: (
        None
        if a.answered
        else rx.ResultReceived(a.worker, Result(a.assignment, a.epoch, ResultStatus.FAILED, error="device error"))
    ),
)


def to_router(world: World, node: RouterNode, n: int) -> bool:
    """One of them reaches a router; False if there is nothing it could be about."""
    kinds = len(_ABOUT_ACTIVE) + len(_TO_ROUTER)
    kind = n % kinds
    if kind >= len(_ABOUT_ACTIVE):
        return _TO_ROUTER[kind - len(_ABOUT_ACTIVE)](world, node)
    shadow = world.watch.shadows[node.name]
    if not shadow.active:
        return False
    names = list(shadow.active)
    active = shadow.active[names[n // kinds % len(names)]]
    due, left, right = _due(world, node, active)
    event = _ABOUT_ACTIVE[kind](active, due, right, left)
    if event is not None:
        node.feed(event)
    return event is not None


def _due(world: World, node: RouterNode, active: Active) -> tuple[int, int, tuple[int, ...]]:
    """Next index, tokens left of the budget, and the token that would be right (none if all are out)."""
    shadow = world.watch.shadows[node.name]
    origin = shadow.live[active.assignment.request_id]
    submission, sent = shadow.submitted[origin], shadow.delivered.get(origin, 0)
    due = submission.delivered + sent
    ask = world.asks[active.assignment.request_id]
    right = declared.tokens(ask, due, due + 1) if due < declared.length(ask) else ()
    return due, submission.request.max_new_tokens - sent, right


def _tunnel(node: RouterNode) -> Tunnel | None:
    return next(iter(node.tunnels.values()), None)


def _heard(world: World, node: RouterNode, beat: Heartbeat) -> bool:
    tunnel = _tunnel(node)
    if tunnel is None:
        return False
    node.take(beat, tunnel)
    return True


def _other_worker(world: World, node: RouterNode) -> bool:
    return _heard(world, node, Heartbeat("nobody", 1_000_000, 1, snapshot=True))


def _future_version(world: World, node: RouterNode) -> bool:
    tunnel = _tunnel(node)
    return tunnel is not None and _heard(world, node, Heartbeat(tunnel.worker, 1_000_000, 1, version=2, snapshot=True))


def _old_epoch(world: World, node: RouterNode) -> bool:
    tunnel = _tunnel(node)
    if tunnel is None:
        return False
    epoch = world.workers[tunnel.worker].machine.epoch
    return epoch > 1 and _heard(world, node, Heartbeat(tunnel.worker, 1, 1_000_000, snapshot=True))


def _again(world: World, node: RouterNode) -> bool:
    """A tunnel is said to be up that is, and one to be gone that never was; a heartbeat comes over the latter."""
    tunnel = _tunnel(node)
    if tunnel is None:
        return False
    now = world.agenda.now
    epoch = world.workers[tunnel.worker].machine.epoch
    for effects in (
        node.registry.opened(tunnel.number, tunnel.worker, now, epoch),
        node.registry.closed(1_000_000, now),
        node.registry.heard(1_000_000, Heartbeat(tunnel.worker, 1_000_000, 1), now),
    ):
        if effects:
            raise world.watch.newest.broken(f"{node.name}: a tunnel that is no news caused {effects}")
    record = node.registry.record(tunnel.worker)
    if record is not None and len(set(record.tunnels)) != len(record.tunnels):
        raise world.watch.newest.broken(f"{node.name} counts a tunnel twice in {record.tunnels}")
    return True


def _stale_map(world: World, node: RouterNode) -> bool:
    """A tunnel to a process that has been replaced: it gets no part in the pair, and its end ends nothing."""
    tunnel = _tunnel(node)
    if tunnel is None or world.workers[tunnel.worker].machine.epoch < 2:
        return False
    now = world.agenda.now
    if node.registry.opened(2_000_000, tunnel.worker, now, 1):
        raise world.watch.newest.broken(f"{node.name} took a tunnel to an old process for one to {tunnel.worker}")
    node.obey_discovery(node.registry.closed(2_000_000, now))
    return True


def _unknown_bytes(world: World, node: RouterNode) -> bool:
    tunnel = _tunnel(node)
    if tunnel is None:
        return False
    node.receive(tunnel, b"\xfa\x7f\x02hi")
    node.receive(tunnel, b"\x0a\xff")
    return True


def _older_plan(world: World, node: RouterNode) -> bool:
    shadow = world.watch.shadows[node.name]
    for name, plan_id in shadow.wanted.items():
        obstacle = rx.Obstacle(rx.ObstacleKind.TOO_LONG, "an older plan")
        node.feed(rx.Planned(name, plan_id - 1, rx.Plan(obstacle=obstacle)))
        return True
    return False


def _second_plan(kind: rx.ObstacleKind | None) -> Callable[[World, RouterNode], bool]:
    """A plan that was answered is answered otherwise: nothing feasible, or other candidates."""

    def forge(world: World, node: RouterNode) -> bool:
        shadow = world.watch.shadows[node.name]
        names = [name for name in shadow.live if name not in shadow.wanted and name in shadow.planned]
        last = node.last_plan.plan.ranked if node.last_plan is not None else ()
        if not names or (kind is None and not last):
            return False
        plan = rx.Plan(ranked=last) if kind is None else rx.Plan(obstacle=rx.Obstacle(kind, "a second answer"))
        for name in names:
            node.feed(rx.Planned(name, shadow.planned[name], plan))
        return True

    return forge


def _modest(world: World, node: RouterNode) -> bool:
    """The next completion claims fewer tokens than have come: it is believed to be the end, and counted."""
    del world
    news, node.modest = not node.modest, True
    return news


_TO_ROUTER: tuple[Callable[[World, RouterNode], bool], ...] = (
    _other_worker,
    _future_version,
    _old_epoch,
    _again,
    _stale_map,
    _unknown_bytes,
    _older_plan,
    _second_plan(None),
    _second_plan(rx.ObstacleKind.NO_CAPACITY),
    _second_plan(rx.ObstacleKind.TOO_LONG),
    _modest,
)
TO_ROUTER = len(_ABOUT_ACTIVE) + len(_TO_ROUTER)


def _offer(
    node: WorkerNode,
    deadline_ms: int = 1_000,
    fingerprint: str = declared.FINGERPRINT,
    tokens: tuple[int, ...] = (1, 2, 3),
) -> Offer:
    request = GenerationRequest("forged", "m", tokens, 1, 4, deadline_ms=deadline_ms)
    candidate = Candidate(node.name, node.machine.epoch, fingerprint, Tier.NONE)
    return Offer(AssignmentId("forged", 1), node.machine.epoch, request, fingerprint, candidate)


def _late_offer(node: WorkerNode) -> bool:
    return _take(node, _offer(node, deadline_ms=0))


def _other_model(node: WorkerNode) -> bool:
    return _take(node, _offer(node, fingerprint="0" * 64))


def _too_long(node: WorkerNode) -> bool:
    return _take(node, _offer(node, tokens=(7,) * (node.spec.context + 1)))


def _take(node: WorkerNode, value: Offer | Cancel | Heartbeat) -> bool:
    tunnel = next(iter(node.tunnels.values()), None)
    if tunnel is None:
        return False
    node.take(value, tunnel)
    return True


def _wrong_epoch(node: WorkerNode) -> bool:
    known = node.machine.assignments()
    return bool(known) and _take(node, Cancel(known[0], node.machine.epoch + 1))


def _cancel_nobody(node: WorkerNode) -> bool:
    return _take(node, Cancel(AssignmentId("nobody", 1), node.machine.epoch))


def _expired(node: WorkerNode) -> bool:
    if node.machine.draining:
        return False
    node.feed(wx.DrainExpired())
    return True


def _no_tunnel(node: WorkerNode) -> bool:
    node.feed(wx.TunnelLost(1_000_000))
    return True


def _drain_again(node: WorkerNode) -> bool:
    if not node.machine.draining:
        return False
    node.feed(wx.DrainRequested())
    return True


def _odd_bytes(node: WorkerNode) -> bool:
    tunnel = next(iter(node.tunnels.values()), None)
    if tunnel is None:
        return False
    node.receive(tunnel, b"\xfa\x7f\x02hi")
    node.receive(tunnel, b"\x0a\xff")
    return _take(node, Heartbeat("nobody", 1, 1))


_TO_WORKER: tuple[Callable[[WorkerNode], bool], ...] = (
    _late_offer,
    _other_model,
    _too_long,
    _wrong_epoch,
    _cancel_nobody,
    _expired,
    _no_tunnel,
    _drain_again,
    _odd_bytes,
)
TO_WORKER = len(_TO_WORKER)


def to_worker(world: World, node: WorkerNode, n: int) -> bool:
    """One of them reaches a worker; False if there is nothing it could be about."""
    del world
    return _TO_WORKER[n % len(_TO_WORKER)](node)
