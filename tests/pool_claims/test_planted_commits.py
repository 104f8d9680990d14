"""The judge of commits under load, on waves with a fault and on honest ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy

import pytest

from prove import p6_commit
from prove.checks import Checks
from prove.commit_waves import Covered, Wave
from prove.cut_streams import WAYS, Cut
from prove.judging import Tally
from prove.p6_commit import CLOSES, DRAINS
from prove.streams import Seen

PROMPT, TOKENS = [2, 7, 7], [5, 6, 7, 8]


def answer(attempts: int) -> Seen:
    return Seen(
        status=200,
        text="abcd",
        pieces=4,
        finish_reasons=["length"],
        usages=[{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}],
        ends=1,
        served={"token_ids": list(TOKENS), "attempts": attempts, "cached_tokens": 1, "computed_tokens": 2},
    )


def honest(name: str) -> Wave:
    """Two streams, one commit over one tunnel with both of their routes."""
    closes = name == CLOSES
    cuts = [Cut(name, way, PROMPT, {}, answer(1), answer(2 if closes else 1)) for way in WAYS[:2]]
    return Wave(
        cuts,
        [Covered(2, 1, 2, 0 if closes else 1, 2)],
        Counter({"retired": 2} if closes else {"done": 2}),
        Counter({"at-once": 2} if closes else {"emptied": 2}),
        2 if closes else 0,
        [],
        [0, 0, 0, 0],
    )


def failed(name: str, seen: Wave, flips: int = 0) -> list[str]:
    checks = Checks()
    p6_commit.tunnels(checks, name, [seen])
    p6_commit.streams(checks, name, seen.cuts, Tally(generations=2, tokens=8, flips=flips))
    return [str(one["name"]).removeprefix(f"{name}: ") for one in checks.failed]


def altered(tokens: list[int], text: str) -> Callable[[Wave], None]:
    def alter(seen: Wave) -> None:
        one = seen.cuts[0].seen
        one.text, one.served["token_ids"] = text, tokens
        one.usages[0] |= {"completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)}

    return alter


def _twice_finished(seen: Wave) -> None:
    seen.cuts[1].seen.finish_reasons.append("length")


def _usage_of_the_last_attempt(seen: Wave) -> None:
    seen.cuts[1].seen.usages[0]["completion_tokens"] = 2


def _no_commit(seen: Wave) -> None:
    seen.commits.clear()


def _too_late(seen: Wave) -> None:
    seen.commits[0] = Covered(2, 0, 0, 0, 0)


def _tunnel_left(seen: Wave) -> None:
    seen.left.append("7: draining")


def _permit_leaked(seen: Wave) -> None:
    seen.held[2] = 1


def _cut_by_force(seen: Wave) -> None:
    seen.removals["deadline"] += 1


ALIKE: dict[Callable[[Wave], None], str] = {
    altered([5, 6, 7], "abc"): "streams unlike those alone",
    altered([5, 6, 6, 7, 8], "abbcd"): "streams unlike those alone",
    altered(TOKENS, "abccd"): "texts of the same tokens that differ",
    _twice_finished: "complete, one finish reason, usage exact",
    _usage_of_the_last_attempt: "complete, one finish reason, usage exact",
    _no_commit: "commits in mid-stream",
    _too_late: "commits in mid-stream",
    _tunnel_left: "older tunnels left",
    _permit_leaked: "held at rest",
    _cut_by_force: "tunnels that ended by force",
}


@pytest.mark.parametrize("name", [DRAINS, CLOSES])
def test_an_honest_wave_passes(name: str) -> None:
    assert not failed(name, honest(name))


@pytest.mark.parametrize("name", [DRAINS, CLOSES])
@pytest.mark.parametrize("plant", ALIKE)
def test_a_fault_is_noticed(name: str, plant: Callable[[Wave], None]) -> None:
    seen = deepcopy(honest(name))
    plant(seen)
    assert ALIKE[plant] in failed(name, seen)


def test_a_float_tie_is_none() -> None:
    seen = honest(DRAINS)
    altered([5, 6, 7, 9], "abce")(seen)
    assert not failed(DRAINS, seen, flips=1)


def test_a_pool_that_closes_what_it_should_drain_and_the_other_way_round() -> None:
    assert failed(DRAINS, honest(CLOSES)) == [
        "covered tunnels that were seen to drain",
        "routes closed, and resumed",
        "streams of more than one attempt",
        "tunnels that ended once empty",
        "tunnels closed at once",
    ]
    assert failed(CLOSES, honest(DRAINS)) == [
        "resumed, of routes closed",
        "streams of more than one attempt",
        "tunnels closed at once",
    ]


def test_routes_that_were_closed_and_not_resumed() -> None:
    seen = honest(CLOSES)
    seen.resumes = 1
    assert failed(CLOSES, seen) == ["resumed, of routes closed"]
