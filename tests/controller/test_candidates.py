"""Candidates against a naive search over the same world, and the rules one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.continuation import chain as chains
from libs.continuation import layout as layouts
from libs.controller import candidates
from libs.controller.catalog_facts import Chunk, LayerGroup
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.policy import decode_cost, prefill_cost
from libs.controller.protocol import Load, Pages, PrefillCost, Resident, Tier, TierCost
from libs.controller.router_events import ObstacleKind, Plan
from tests.controller.world import (
    FULL,
    MODEL,
    SALT,
    WINDOW,
    World,
    a_request,
    heartbeat,
    nodes_of,
    observe,
    random_world,
)
from tests.fixtures.hash_seeds import printed


def as_layout(group: LayerGroup) -> layouts.LayerGroup:
    return layouts.LayerGroup(group.window or None, group.kv_heads, group.head_dim, group.dtype, group.layers)


LAYOUT = layouts.Layout(tuple(as_layout(group) for group in MODEL.groups))


def stretched(table: tuple[PrefillCost, ...], length: int, step_ms: float) -> float:
    """Prefill per token while lanes decode: each iteration of prompt tokens but the last, which draws the first token,
    also carries a decode step; as many as a prompt of the bucket's length has.
    """
    longest = next(bucket.up_to_tokens for bucket in table if length <= bucket.up_to_tokens)
    more = (longest - 1) // POLICY_KNOBS.prefill_budget_tokens
    return prefill_cost(table, length) + step_ms * more / longest


def transfer_ms(cost: TierCost | None, size: int) -> float:
    """Time to move `size` bytes out of a tier, ms; nothing to move costs nothing."""
    if size == 0:
        return 0.0
    if cost is None or cost.bytes_per_ms <= 0:
        return POLICY_KNOBS.default_latency_ms + size / POLICY_KNOBS.default_bytes_per_ms
    return cost.latency_ms + size / cost.bytes_per_ms


def naive_best(world: World) -> dict[str, float]:
    """For each feasible worker the least predicted TTFT over every boundary and source, by the layout's own rules."""
    request, entry = world.request, world.variant
    length = len(request.tokens)
    nodes = [*entry.nodes]
    if entry.tail is not None:
        nodes.append(entry.tail)
    spans = [node.chunk for node in nodes]
    known = {node.chunk.hash for node in nodes}
    if entry.tail is None:
        spans += [
            Chunk(link.hash, link.parent, link.start, link.end) for link in entry.chain.chunks if link.hash not in known
        ]
    facts = {node.chunk.hash: node for node in nodes}
    fixed = world.fleet.fixed.of(MODEL.fingerprint)
    best: dict[str, float] = {}
    for beat in world.heartbeats:
        if beat.draining:
            continue
        held = world.resident[beat.worker]
        costs = {cost.tier: cost for cost in beat.tiers}
        device = max((s.end for s in spans if Tier.GPU in held.get(s.hash, ())), default=0)
        device = max([device, *(link.end for link in entry.chain.chunks if Tier.GPU in held.get(link.hash, ()))])
        lanes = beat.load.active
        step = decode_cost(beat.decode, lanes) if lanes else 0.0
        per_token = stretched(beat.prefill, length, step)
        queue = max(beat.load.queue_ms, step / 2)

        def first(tier: Tier, own: float = decode_cost(beat.decode, lanes + 1)) -> float:
            return max(0.1 * own, own + fixed[tier])

        def fits(resident: int, beat=beat) -> bool:  # type: ignore[no-untyped-def]
            pages = beat.load.pages
            total = -(-(length + request.max_new_tokens) // 16)
            needed = total - resident // 16
            return needed <= pages.free + max(0, pages.evictable - (total - needed)) and total <= pages.total

        found: list[float] = []
        if fits(0):
            found.append(queue + length * per_token + first(Tier.NONE))
        if device and fits(device):
            found.append(queue + (length - device) * per_token + first(Tier.GPU))
        size_of_chunk = beat.bytes_per_token * 256
        order = sorted(
            [Tier.RAM, Tier.SSD, Tier.OBJECT] + ([Tier.PEER] if Tier.PEER in costs else []),
            key=lambda tier: (transfer_ms(costs.get(tier), size_of_chunk), tier),
        )
        for resident in {0, device}:
            places: list[dict[str, Tier]] = []
            for span in spans:
                node = facts.get(span.hash)
                here: dict[str, Tier] = {}
                for group in MODEL.groups:
                    tiers = set()
                    if Tier.RAM in held.get(span.hash, ()):
                        tiers.add(Tier.RAM)
                    if any(
                        Tier.RAM in other.get(span.hash, ()) for w, other in world.resident.items() if w != beat.worker
                    ):
                        tiers.add(Tier.PEER)
                    if node is not None:
                        if any(receipt.group == group.name for receipt in node.chunk.receipts):
                            tiers.add(Tier.OBJECT)
                        for replica in node.replicas:
                            if replica.group == group.name:
                                tiers.add(Tier.SSD if replica.node == beat.node else Tier.PEER)
                    usable = [tier for tier in order if tier in tiers]
                    if usable:
                        here[group.name] = usable[0]
                places.append(here)
            names = {group.name for group in MODEL.groups}
            present = [names if span.end <= resident else set(here) for span, here in zip(spans, places, strict=True)]
            for index, span in enumerate(spans):
                boundary = span.end
                if boundary <= resident or layouts.longest_restorable(LAYOUT, spans, present, boundary) != boundary:
                    continue
                if not fits(resident):
                    continue
                sizes: dict[Tier, int] = {}
                for need in layouts.needed_chunks(LAYOUT, spans[: index + 1], boundary):
                    if spans[need.node].end <= resident:
                        continue
                    tier = places[need.node][need.group]
                    whole = spans[need.node].end - spans[need.node].start
                    sizes[tier] = sizes.get(tier, 0) + LAYOUT.group(need.group).bytes_per_token * whole
                farthest = costs.get(max(sizes))
                if farthest is not None and boundary - resident < farthest.break_even_tokens:
                    continue
                load = sum(transfer_ms(costs.get(tier), size) for tier, size in sizes.items())
                restore = transfer_ms(costs.get(Tier.GPU), sum(sizes.values()))
                took = max(queue, load) + restore + (length - boundary) * per_token
                found.append(took + first(max(sizes)))
        if found:
            best[beat.worker] = min(found)
    return best


def planned(world: World) -> Plan:
    knobs = replace(POLICY_KNOBS, ranked=64)
    return candidates.plan(world.request, [world.variant], world.fleet, 0.0, knobs=knobs)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_the_best_of_every_worker_is_what_a_naive_search_finds(seed: int) -> None:
    world = random_world(seed)
    naive = naive_best(world)
    plan = planned(world)
    found: dict[str, float] = {}
    for option in plan.ranked:
        candidate = option.candidate
        found[candidate.worker] = min(found.get(candidate.worker, float("inf")), candidate.ttft_ms)
    assert found == pytest.approx(naive)
    assert (plan.obstacle is None) == bool(naive)
    for option in plan.ranked:  # chains are whole: contiguous up to the boundary
        chain = option.chain
        if chain:
            assert chain[-1].chunk.end == option.candidate.cached_tokens
            assert chain[-1].chunk.hash == option.candidate.prefix_hash
            assert all(a.chunk.end == b.chunk.start for a, b in pairwise(chain))


def test_the_naive_search_notices_a_broken_window_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.controller.restores.first_needed", lambda group, boundary: 0)
    with pytest.raises(AssertionError):
        test_the_best_of_every_worker_is_what_a_naive_search_finds()


def single(tiers: tuple[TierCost, ...] = (), **changes: object) -> tuple[World, Plan]:
    request = a_request(1_100)
    names = {group.name for group in MODEL.groups}
    nodes, tail = nodes_of(request, [names] * 4, [[] for _ in range(4)], tail=True)
    beat = heartbeat("w0", tiers=tiers, **changes)
    from libs.controller.fleet import Fleet

    world = World(request, candidates.variant(MODEL, request, nodes, tail), observe(Fleet(), beat), [beat], {"w0": {}})
    return world, planned(world)


def test_a_tail_brings_all_but_the_last_tokens() -> None:
    _, plan = single()
    best = plan.ranked[0].candidate
    assert (best.tier, best.cached_tokens, best.compute_tokens) == (Tier.OBJECT, 1_088, 12)
    assert plan.ranked[0].chain[-1].chunk.tail


def test_below_break_even_a_restore_is_never_chosen() -> None:
    _, plan = single(tiers=(TierCost(Tier.OBJECT, 1.0, 1e6, 2_000),))
    assert {option.candidate.tier for option in plan.ranked} == {Tier.NONE}
    assert any(p.reason == "break-even" and p.count == 5 for p in plan.pruned)


def test_a_resident_tail_is_found_by_its_hash() -> None:
    request = a_request(700)
    entry = candidates.variant(MODEL, request)
    tail = chains.tails_after(entry.chain.chunks[0].hash, request.tokens[256:512], 256)[4]
    held = (
        Resident(entry.chain.chunks[0].hash, 256, Tier.GPU, MODEL.fingerprint),
        Resident(tail.hash, tail.end, Tier.GPU, MODEL.fingerprint),
    )
    from libs.controller.fleet import Fleet

    fleet = observe(Fleet(), heartbeat("w0", resident=held), heartbeat("w1"))
    plan = candidates.plan(request, [entry], fleet, 0.0)
    assert (plan.ranked[0].candidate.worker, plan.ranked[0].candidate.cached_tokens) == ("w0", 256 + 80)
    assert plan.ranked[0].candidate.needed_pages == -(-716 // 16) - 21


def test_a_prefill_under_way_counts_with_its_arrival_time() -> None:
    request = a_request(600)
    entry = candidates.variant(MODEL, request)
    link = entry.chain.chunks[1]
    held = (Resident(link.hash, link.end, Tier.INFLIGHT, MODEL.fingerprint, arrival_ms=90.0),)
    from libs.controller.fleet import Fleet

    fleet = observe(Fleet(), heartbeat("w0", resident=held), now_ms=1_000.0)
    plan = candidates.plan(request, [entry], fleet, 1_030.0)
    best = plan.ranked[0].candidate
    assert best.tier is Tier.INFLIGHT and best.load_ms == 60.0
    assert best.ttft_ms == pytest.approx(60 + 88 * 1.0 + 20)


def test_obstacles_say_whether_waiting_can_help() -> None:
    from libs.controller.fleet import Fleet

    request = a_request(100)
    entry = candidates.variant(MODEL, request)

    def kind(fleet: Fleet, value=request) -> ObstacleKind | None:  # type: ignore[no-untyped-def]
        obstacle = candidates.plan(value, [candidates.variant(MODEL, value)], fleet, 0.0).obstacle
        return obstacle.kind if obstacle else None

    none = candidates.plan(request, [], Fleet(), 0.0).obstacle
    assert none is not None and none.kind is ObstacleKind.UNKNOWN_MODEL
    assert kind(Fleet()) is ObstacleKind.NO_WORKER
    assert kind(observe(Fleet(), heartbeat("w", models=("other",)))) is ObstacleKind.NO_WORKER
    assert kind(observe(Fleet(), heartbeat("w", draining=True))) is ObstacleKind.NO_CAPACITY
    assert kind(observe(Fleet(), heartbeat("w", load=Load(pages=Pages(100, 2))))) is ObstacleKind.NO_CAPACITY
    assert kind(observe(Fleet(), heartbeat("w", load=Load(pages=Pages(3, 3))))) is ObstacleKind.TOO_LONG
    assert kind(observe(Fleet(), heartbeat("w", max_context=64))) is ObstacleKind.TOO_LONG
    assert kind(Fleet(), replace(request, max_new_tokens=9_000)) is ObstacleKind.TOO_LONG
    assert kind(observe(Fleet(), heartbeat("w"))) is None
    assert entry.chain.chunks == ()


def test_one_stale_gpu_candidate_leaves_the_lower_tiers_of_its_worker() -> None:
    request = a_request(1_100)
    names = {group.name for group in MODEL.groups}
    replicas = [[("w0", FULL.name), ("w0", WINDOW.name)] for _ in range(4)]
    nodes, _ = nodes_of(request, [names] * 4, replicas)
    entry = candidates.variant(MODEL, request, nodes)
    held = tuple(Resident(link.hash, link.end, Tier.GPU, MODEL.fingerprint) for link in entry.chain.chunks)
    from libs.controller.fleet import Fleet

    plan = candidates.plan(request, [entry], observe(Fleet(), heartbeat("w0", resident=held)), 0.0)
    assert [option.candidate.tier for option in plan.ranked] == [Tier.GPU, Tier.SSD, Tier.NONE]
    assert plan.ranked[1].chain[0].chunk.start == 0


def test_many_idle_workers_are_bounded_and_the_resident_one_is_found() -> None:
    from libs.controller.fleet import Fleet

    request = a_request(600)
    entry = candidates.variant(MODEL, request)
    link = entry.chain.chunks[0]
    fleet = Fleet()
    for index in range(400):
        beat = heartbeat(f"w{index:03}", prefill=(PrefillCost(8_192, 1.0 + index / 100),))
        if index == 399:
            beat = replace(
                beat, resident=(Resident(link.hash, 256, Tier.GPU, MODEL.fingerprint),), prefill=(PrefillCost(1, 0.5),)
            )
        observe(fleet, beat)
    plan = candidates.plan(request, [entry], fleet, 0.0)
    assert plan.ranked[0].candidate.worker == "w399" and len(plan.ranked) == 2 + POLICY_KNOBS.considered_others
    counts = {p.reason: p.count for p in plan.pruned}
    assert counts["bound"] == 399 - POLICY_KNOBS.considered_others


def order_digest() -> str:
    lines = []
    for seed in range(30):
        for option in planned(random_world(seed)).ranked:
            candidate = option.candidate
            lines.append(f"{candidate.worker} {candidate.tier} {candidate.cached_tokens} {candidate.ttft_ms!r}")
    return "|".join(lines)


def test_ranking_does_not_depend_on_the_hash_seed_or_on_the_order_of_heartbeats() -> None:
    code = "from tests.controller.test_candidates import order_digest; print(order_digest())"
    assert printed(code, ("0", "77")) == {order_digest()}
    for seed in range(20):
        world = random_world(seed)
        before = planned(world).ranked
        other = type(world.fleet)()
        observe(other, *reversed(world.heartbeats))
        other.fixed = world.fleet.fixed
        assert candidates.plan(world.request, [world.variant], other, 0.0).ranked == before[: POLICY_KNOBS.ranked]
    assert SALT
