"""Host memory and peers in a plan: by layer group, and with the peers that hold it named for whoever restores."""

from __future__ import annotations

from libs.controller import candidates
from libs.controller.catalog_facts import ReplicaState
from libs.controller.fleet import Fleet
from libs.controller.protocol import Gone, Heartbeat, RankedCandidate, Resident, Tier, TierCost
from libs.controller.residency import ResidencyIndex
from tests.controller.world import MODEL, a_request, heartbeat, nodes_of, observe

NAMES = [group.name for group in MODEL.groups]
COSTS = (
    TierCost(Tier.RAM, 0.1, 1e7, 16),
    TierCost(Tier.PEER, 1.0, 1e6, 16),
    TierCost(Tier.OBJECT, 50.0, 1e5, 16),
    TierCost(Tier.GPU, 0.1, 1e7),
)


def plans(*beats: Heartbeat) -> dict[tuple[str, Tier], RankedCandidate]:
    """A request of four durable chunks."""
    request = a_request(1_100)
    nodes, _ = nodes_of(request, [set(NAMES)] * 4, [[] for _ in range(4)])
    entry = candidates.variant(MODEL, request, nodes)
    ranked = candidates.plan(request, [entry], observe(Fleet(), *beats), 0.0).ranked
    return {(option.candidate.worker, option.candidate.tier): option for option in ranked}


def in_memory(groups: tuple[str, ...] = ()) -> tuple[Resident, ...]:
    request = a_request(1_100)
    chain = candidates.variant(MODEL, request).chain
    return tuple(Resident(node.hash, node.end, Tier.RAM, MODEL.fingerprint, groups=groups) for node in chain.chunks)


def test_what_is_whole_in_memory_is_restored_from_there() -> None:
    found = plans(heartbeat("w0", tiers=COSTS, resident=in_memory()))
    best = found["w0", Tier.RAM].candidate
    assert best.cached_tokens == 1_024 and best.load_ms < 5


def test_a_group_that_is_not_in_memory_comes_from_elsewhere() -> None:
    """And the candidate says so: it is as slow as its farthest tier."""
    found = plans(heartbeat("w0", tiers=COSTS, resident=in_memory((NAMES[0],))))
    assert ("w0", Tier.RAM) not in found
    assert found["w0", Tier.OBJECT].candidate.load_ms > 50


def test_a_peer_that_holds_it_in_memory_is_named_by_its_directory() -> None:
    found = plans(heartbeat("w0", tiers=COSTS), heartbeat("w1", tiers=COSTS, resident=in_memory()))
    option = found["w0", Tier.PEER]
    for node in option.chain:
        named = {(r.node, r.group, r.state, r.content_id) for r in node.replicas}
        assert named == {("node-w1", name, ReplicaState.READY, "") for name in NAMES}
    # The one that holds it needs nobody.
    assert all(not node.replicas for node in found["w1", Tier.RAM].chain)


def test_only_the_groups_that_a_peer_holds_are_named() -> None:
    found = plans(heartbeat("w0", tiers=COSTS), heartbeat("w1", tiers=COSTS, resident=in_memory((NAMES[0],))))
    option = found["w0", Tier.OBJECT]
    assert {r.group for node in option.chain for r in node.replicas} == {NAMES[0]}


def test_the_index_follows_groups_as_they_come_and_go() -> None:
    index = ResidencyIndex()

    def beat(resident: tuple[Resident, ...] = (), gone: tuple[Gone, ...] = ()) -> None:
        index.apply(heartbeat("w", resident=resident, gone=gone), 0.0, reset=False)

    beat((Resident("aa", 256, Tier.RAM, "f", groups=("one",)),))
    assert index.in_memory("w", "aa", "one") and not index.in_memory("w", "aa", "other")
    beat((Resident("aa", 256, Tier.RAM, "f"),))
    assert index.in_memory("w", "aa", "one") and index.in_memory("w", "aa", "other")
    beat((Resident("aa", 256, Tier.RAM, "f", groups=("other",)), Resident("aa", 256, Tier.GPU, "f")))
    assert not index.in_memory("w", "aa", "one")
    beat(gone=(Gone("aa", Tier.RAM),))
    assert not index.in_memory("w", "aa", "other") and Tier.GPU in index.holders("aa")["w"]
    index.forget("w")
    assert not len(index) and not index.parts
