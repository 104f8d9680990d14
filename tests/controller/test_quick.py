"""Values that are made quickly are the same values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from libs.controller import protocol
from libs.controller.protocol import Candidate, DecodeCost, Gone, PrefillCost, RankedCandidate, Resident, Tier, TierCost
from libs.controller.quick import quick

MADE = [
    Resident("aa", 256, Tier.RAM, "f", groups=("g",)),
    Gone("aa", tier=Tier.GPU),
    Candidate("w", 1, "f", Tier.SSD, 512, ttft_ms=3.0, prefix_hash="bb"),
    RankedCandidate(Candidate("w", 1, "f", Tier.NONE), uncorrected_queue_ms=2.0),
    TierCost(Tier.PEER, 1.0, 2.0),
    PrefillCost(512, 0.1),
    DecodeCost(4, 12.0),
]


@pytest.mark.parametrize("one", MADE, ids=lambda one: type(one).__name__)
def test_a_value_is_frozen_equal_hashable_and_travels(one: object) -> None:
    kind = type(one)
    assert f"_set_{fields(kind)[0].name}" in kind.__init__.__code__.co_names, "not made by @quick"  # type: ignore[arg-type]
    plain = dataclass(frozen=True, slots=True)(
        type(kind.__name__, (), {"__annotations__": {field.name: object for field in fields(kind)}})  # type: ignore[arg-type]
    )
    values = [getattr(one, field.name) for field in fields(kind)]  # type: ignore[arg-type]
    assert repr(one) == repr(plain(*values)).rpartition("<locals>.")[2]
    assert one == kind(*values) == copy.copy(one) == pickle.loads(pickle.dumps(one)) and hash(one) == hash(
        kind(*values)
    )
    for name in (fields(kind)[0].name, "another"):  # type: ignore[arg-type]
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(one, name, 1)


def test_what_is_missing_or_unknown_is_refused_and_defaults_hold() -> None:
    with pytest.raises(TypeError, match="tier"):
        Gone("aa")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="another"):
        Gone("aa", Tier.GPU, another=1)  # type: ignore[call-arg]
    assert Candidate("w", 1, "f", Tier.NONE).correction == 1.0
    assert replace(MADE[0], end=512) == Resident("aa", 512, Tier.RAM, "f", groups=("g",))  # type: ignore[type-var]


def test_a_class_that_does_more_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Listed:
        names: list[str] = field(default_factory=list)

    with pytest.raises(TypeError, match="Listed"):
        quick(Listed)
    assert protocol.Heartbeat("w", 1, 1).tiers == ()
