"""Whole replays: conserved, deterministic, and able to tell a bad policy from a good one."""

from __future__ import annotations

import gc
import hashlib

import pytest

from libs.simulation.traces.costs import DECLARED, Error, TierSet
from libs.simulation.traces.recorded import SHIPPED, Recorded, read, scaled
from libs.simulation.traces.replay import POLICIES, Setting, figures, loaded, made, run
from libs.simulation.traces.routing import Policy
from libs.simulation.traces.suite import Wanted, compare
from libs.simulation.traces.synthetic import Copies
from libs.simulation.traces.tiers import Directory
from tests.fixtures.hash_seeds import printed

THOUSAND = SHIPPED / "dynamo_mooncake_trace_1000.jsonl"


def rows(count: int = 160) -> list[Recorded]:
    found = read(THOUSAND, count)
    return scaled(found, loaded(found, 0.6, TierSet.LOCAL, 8))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tiers", [TierSet.LOCAL, TierSet.OBJECT])
def test_every_request_ends_and_every_token_is_found_or_computed(policy: str, tiers: TierSet) -> None:
    some = rows(80)
    found = run(some, Setting(policy, tiers, Error.REDRAWN, 1))
    assert len(found.chosen) == len(some) and min(found.ttft_ms) >= DECLARED.decode_ms + 2 * DECLARED.hop_ms
    assert found.prompt_tokens == sum(row.input_tokens for row in some)
    assert sum(found.hits.values()) + found.computed_tokens == found.prompt_tokens
    assert set(found.hits) <= {"device", "ram", "ssd"} or tiers is TierSet.OBJECT


def test_the_load_is_the_one_asked_for() -> None:
    found = read(THOUSAND, 300)
    factor = loaded(found, 0.5, TierSet.LOCAL, 8)
    replayed = run(scaled(found, factor), Setting("round-robin", TierSet.LOCAL, Error.NONE, 0))
    span = (found[-1].at_ms - found[0].at_ms) * factor
    assert sum(replayed.work_ms) / (8 * span) == pytest.approx(0.5, rel=0.02)


def test_a_replay_leaves_no_cycles_behind() -> None:
    """It runs without a collector: what it drops must go by itself, or a million requests would fill the memory."""
    some, setting = rows(), Setting("segue", TierSet.PEER, Error.REDRAWN, 1)
    policy = made(setting, Directory())  # is one itself
    run(some[:40], setting)
    gc.collect()
    found = run(some, setting, policy=policy)
    assert gc.isenabled() and gc.collect() < len(found.chosen) / 4


class Worst(Policy):
    """All to one worker."""

    def choose(self, number: int, request: Recorded, now: float) -> int:
        return 0


def test_a_planted_bad_policy_is_seen_to_be_one() -> None:
    some, setting = rows(), Setting("segue", TierSet.LOCAL, Error.REDRAWN, 1)
    ours, bad = figures(run(some, setting)), figures(run(some, setting, policy=Worst()))
    assert bad.mean > 5 * ours.mean and bad.max_over_mean_busy > 7.9
    turn = figures(run(some, Setting("round-robin", TierSet.LOCAL, Error.REDRAWN, 1)))
    assert ours.mean < turn.mean


def digest() -> str:
    some, lines = rows(60), list[str]()
    for policy in ("segue", "weighted"):
        found = run(some, Setting(policy, TierSet.OBJECT, Error.REDRAWN, 3))
        lines += [repr(found.ttft_ms), repr(found.chosen), repr(found.hits), repr(found.busy_ms)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_equal_seeds_give_equal_runs_whatever_seeds_the_dictionaries() -> None:
    code = "from tests.simulation_traces.test_replay import digest; print(digest())"
    assert printed(code, ("0", "77")) == {digest()}


def test_another_seed_draws_ties_and_errors_otherwise() -> None:
    some = rows(120)
    runs = [run(some, Setting("segue", TierSet.LOCAL, Error.REDRAWN, seed)).chosen for seed in (1, 2)]
    assert runs[0] != runs[1]


def test_a_comparison_has_every_cell_and_shares_what_is_equal() -> None:
    told: list[tuple[int, int]] = []
    wanted = Wanted(
        THOUSAND,
        policies=("segue", "round-robin"),
        tiers=(TierSet.LOCAL,),
        rhos=(0.6,),
        errors=(Error.NONE, Error.REDRAWN),
        seeds=2,
        limit=40,
    )
    cells = compare(wanted, lambda done, total: told.append((done, total)))
    assert [(cell.rho, cell.error) for cell in cells] == [(0.6, Error.NONE), (0.6, Error.REDRAWN)]
    # One load, four runs of ours, one of round robin.
    assert told[-1] == (6, 6)
    assert cells[0].policies["round-robin"] == cells[1].policies["round-robin"]


def test_copies_are_apart_ascending_and_made_when_asked_for() -> None:
    some = read(THOUSAND, 50)
    copies = Copies(some, 32, 450)
    made = list(copies)
    assert len(made) == 450 and [row.at_ms for row in made] == sorted(row.at_ms for row in made)
    assert copies[7] == made[7]
    alone = {block for row in some for block in row.blocks}
    assert len({block for row in made[:400] for block in row.blocks}) == 8 * len(alone)
