"""What each kind of fault does to the world. A fault that finds nothing to harm does nothing, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from libs.controller import router_events as rx
from libs.controller import worker_events as wx
from libs.simulation import forgeries
from libs.simulation.planning import Misplan
from libs.simulation.schedule import Do, Fault
from libs.simulation.storage import OBJECT

if TYPE_CHECKING:
    from libs.simulation.world import World

__all__ = ["Fault", "apply"]


def apply(world: World, fault: Fault) -> bool:
    """Does it; whether it had an object."""
    return _DO[fault.do](world, fault)


def _partition(world: World, fault: Fault) -> bool:
    world.links.of(fault.who, fault.whom).partition(fault.ms)
    return True


def _jitter(world: World, fault: Fault) -> bool:
    world.links.of(fault.who, fault.whom).jitter(fault.ms, fault.pattern)
    return True


def _repeat(world: World, fault: Fault) -> bool:
    world.links.of(fault.who, fault.whom).repeat(fault.ms, fault.n)
    return True


def _lose_tunnel(world: World, fault: Fault) -> bool:
    router, worker = world.routers[fault.who], world.workers[fault.whom]
    tunnels = [tunnel for tunnel in router.tunnels.values() if tunnel.worker == fault.whom]
    if not router.alive or not tunnels:
        return False
    tunnel = tunnels[fault.n % len(tunnels)]
    tunnel.router_up = tunnel.worker_up = False
    router.lost(tunnel)
    world.agenda.after(fault.ms, worker.lost, tunnel)
    world.redial(tunnel)
    return True


def _retire(world: World, fault: Fault) -> bool:
    router, worker = world.routers[fault.who], world.workers[fault.whom]
    tunnels = [tunnel for tunnel in router.tunnels.values() if tunnel.worker == fault.whom]
    if not router.alive:
        return False
    for tunnel in tunnels:
        tunnel.router_up = tunnel.worker_up = False
        router.lost(tunnel, orderly=True)
        world.agenda.after(world.schedule.settings.latency_ms, worker.lost, tunnel)
        world.redial(tunnel)
    return bool(tunnels)


def _lose_attach(world: World, fault: Fault) -> bool:
    if not world.routers[fault.who].alive:
        return False
    world.ingress.attach_lost(fault.who)
    return True


def _crash(world: World, fault: Fault) -> bool:
    if fault.who in world.routers:
        router = world.routers[fault.who]
        if not router.alive:
            return False
        router.crash(fault.ms)
        return True
    worker = world.workers[fault.who]
    if not worker.alive:
        return False
    worker.crash(fault.ms)
    return True


def _drain(world: World, fault: Fault) -> bool:
    worker = world.workers[fault.who]
    if not worker.alive:
        return False
    worker.feed(wx.DrainRequested())
    worker.hurry()
    world.agenda.after(fault.ms, _cut, world, fault.who, worker.boot)
    return True


def _cut(world: World, name: str, boot: int) -> None:
    worker = world.workers[name]
    if worker.alive and worker.boot == boot:
        worker.feed(wx.DrainExpired())


def _mute(world: World, fault: Fault) -> bool:
    world.mute(fault.who, fault.whom, fault.ms)
    return True


def _stale(world: World, fault: Fault) -> bool:
    world.stale(fault.who, fault.whom, fault.ms)
    return True


def _slow(world: World, fault: Fault) -> bool:
    world.slow(fault.who, fault.whom, fault.ms, fault.n)
    return True


def _chunk(world: World, fault: Fault) -> str | None:
    names = sorted(world.store.sound.get(fault.who, {}))
    return names[fault.n % len(names)] if names else None


def _vanish(world: World, fault: Fault) -> bool:
    name = _chunk(world, fault)
    if name is None:
        return False
    world.watch.durable.destroyed.add((fault.who, name))
    world.store.drop(fault.who, name)
    return True


def _corrupt(world: World, fault: Fault) -> bool:
    name = _chunk(world, fault)
    if name is None:
        return False
    world.store.spoil(fault.who, name)
    return True


def _collect(world: World, fault: Fault) -> bool:
    names = sorted(world.catalog.facts)
    if not names:
        return False
    name = names[fault.n % len(names)]
    for place in tuple(world.catalog.facts[name].places):
        world.catalog.withdraw(name, place)
    for place in (*world.workers, OBJECT):
        # A publication may be on its way: it will name what this deletes.
        if world.store.has(place, name):
            world.watch.durable.destroyed.add((place, name))
            world.store.drop(place, name)
    return True


def _catalog_away(world: World, fault: Fault) -> bool:
    world.catalog.away_until = max(world.catalog.away_until, world.agenda.now + fault.ms)
    return True


def _cancel(world: World, fault: Fault) -> bool:
    call = world.ingress.calls[fault.who]
    if call.outcome or not call.submissions:
        return False
    world.ingress.cancel(fault.who)
    return True


def _cancel_by_id(world: World, fault: Fault) -> bool:
    router = world.routers[fault.whom]
    if not router.alive:
        return False
    router.feed(rx.RequestCancelled(fault.who, None))
    return True


def _resubmit(world: World, fault: Fault) -> bool:
    world.ingress.again(fault.who)
    return True


def _device_error(world: World, fault: Fault) -> bool:
    worker = world.workers[fault.who]
    return worker.alive and worker.runtime.fail(fault.n)


def _pressure(world: World, fault: Fault) -> bool:
    worker = world.workers[fault.who]
    return worker.alive and worker.pool.evict_all() > 0


def _relabel(world: World, fault: Fault) -> bool:
    return world.workers[fault.who].relabel()


def _misplan(world: World, fault: Fault) -> bool:
    world.routers[fault.who].planner.misplans.append(Misplan(fault.n % len(Misplan)))
    return True


def _stray_timer(world: World, fault: Fault) -> bool:
    router = world.routers[fault.who]
    if not router.alive or not router.stray:
        return False
    router.fire(router.stray[fault.n % len(router.stray)])
    return True


def _stray_plan(world: World, fault: Fault) -> bool:
    router = world.routers[fault.who]
    if not router.alive or router.last_plan is None:
        return False
    router.feed(router.last_plan)
    return True


def _stray_cancel(world: World, fault: Fault) -> bool:
    router, live = world.routers[fault.who], world.watch.shadows[fault.who].live
    if not router.alive or not live:
        return False
    name, origin = next(iter(live.items()))
    router.feed(rx.RequestCancelled(name, origin + 1_000_000))
    router.feed(rx.DeadlineReached(name, origin + 1_000_000))
    return True


def _forge(world: World, fault: Fault) -> bool:
    router = world.routers[fault.who]
    return router.alive and forgeries.to_router(world, router, fault.n)


def _forge_offer(world: World, fault: Fault) -> bool:
    worker = world.workers[fault.who]
    return worker.alive and forgeries.to_worker(world, worker, fault.n)


def _wake(world: World, fault: Fault) -> bool:
    router = world.routers[fault.who]
    if not router.alive:
        return False
    router.feed(rx.CapacityFreed(max(1, fault.n)))
    return True


_DO: dict[Do, Callable[[World, Fault], bool]] = {
    Do.PARTITION: _partition,
    Do.JITTER: _jitter,
    Do.REPEAT: _repeat,
    Do.LOSE_TUNNEL: _lose_tunnel,
    Do.LOSE_ATTACH: _lose_attach,
    Do.RETIRE: _retire,
    Do.CRASH: _crash,
    Do.DRAIN: _drain,
    Do.MUTE: _mute,
    Do.STALE: _stale,
    Do.SLOW: _slow,
    Do.VANISH: _vanish,
    Do.CORRUPT: _corrupt,
    Do.COLLECT: _collect,
    Do.CATALOG_AWAY: _catalog_away,
    Do.CANCEL: _cancel,
    Do.CANCEL_BY_ID: _cancel_by_id,
    Do.RESUBMIT: _resubmit,
    Do.DEVICE_ERROR: _device_error,
    Do.PRESSURE: _pressure,
    Do.RELABEL: _relabel,
    Do.MISPLAN: _misplan,
    Do.STRAY_TIMER: _stray_timer,
    Do.STRAY_PLAN: _stray_plan,
    Do.STRAY_CANCEL: _stray_cancel,
    Do.FORGE: _forge,
    Do.FORGE_OFFER: _forge_offer,
    Do.WAKE: _wake,
}
