"""When the catalog need not be asked: an idle worker holds the request up to less than a chunk."""

from __future__ import annotations

import pytest

from libs.controller import candidates
from libs.controller.coverage import covered
from libs.controller.fleet import Fleet
from libs.controller.protocol import Load, Resident, Tier
from tests.controller.world import MODEL, a_request, heartbeat, observe

LENGTH = 700  # 699 processed: two chunks (512), 187 left over, tails up to 688


def held(end: int, tier: Tier = Tier.GPU) -> Resident:
    chain = candidates.variant(MODEL, a_request(LENGTH)).chain
    name = {node.end: node.hash for node in (*chain.chunks, *chain.tails())}[end]
    return Resident(name, end, tier, MODEL.fingerprint)


def verdict(resident: Resident, avoid: tuple[str, ...] = (), **changes: object) -> bool:
    request = a_request(LENGTH)
    fleet = observe(Fleet(), heartbeat("w0", resident=(resident,), **changes), heartbeat("w1"))
    return covered(request, candidates.variant(MODEL, request), fleet, 0.0, avoid)


@pytest.mark.parametrize(("end", "is_covered"), [(256, False), (512, True), (528, True), (688, True)])
def test_less_than_a_chunk_is_not_worth_a_question(end: int, is_covered: bool) -> None:
    assert verdict(held(end)) is is_covered


def test_only_device_pages_of_a_worker_that_may_begin_at_once_count() -> None:
    assert not verdict(held(688, Tier.RAM))
    assert not verdict(held(688), draining=True)
    assert not verdict(held(688), load=Load(queue_ms=51.0))
    assert verdict(held(688), load=Load(queue_ms=49.0))
    assert not verdict(held(688), avoid=("w0",))


def test_nothing_resident_is_never_covered_however_short_the_request() -> None:
    for length in (2, 17, 40, 300):
        request = a_request(length)
        assert not covered(request, candidates.variant(MODEL, request), observe(Fleet(), heartbeat("w0")), 0.0)
