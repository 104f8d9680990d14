"""Each checker of the catalog's claims is shown the fault it is there for, and must see it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prove import p4_epochs, p4_etcd_away, p4_faults, p4_golden, p4_tenancy, p4_tiers_speed
from prove.checks import Checks
from prove.judging import Tally
from prove.p4_tenancy import Found, Times, paired_p
from prove.report import Outcome
from prove.routed import Tenant

SECRET = "07" * 32
TENANTS = [Tenant("acme", SECRET), Tenant("umbrella", SECRET)]


def failed(outcome: Outcome) -> list[str]:
    assert isinstance(outcome.figure, dict)
    return [str(name) for name in outcome.figure["failed"]]


# --- 4-tenancy ---


def honest(seed: int = 1) -> Found:
    draw = random.Random(seed)
    times = Times(*([mean * draw.lognormvariate(0.0, 0.08) for _ in range(400)] for mean in (100.0, 100.0, 20.0)))
    return Found(times, hits=400, said=["worker: up", "segue_worker_pages 3"])


def tenancy(found: Found, owned: list[set[str]] | None = None) -> list[str]:
    return failed(p4_tenancy.judged(found, TENANTS, owned or [{"aa"}, {"bb"}], timed=True))


def test_two_tenants_that_share_nothing_pass() -> None:
    assert tenancy(honest()) == []


@pytest.mark.parametrize("word", [TENANTS[0].name, TENANTS[1].salt])
def test_a_name_or_salt_in_a_label_is_seen(word: str) -> None:
    assert tenancy(replace(honest(), said=[f'segue_requests_total{{tenant="{word}"}} 3'])) == [
        "names or salts in logs, labels and spans"
    ]


def test_a_shared_chunk_a_foreign_hit_and_a_missing_own_hit_are_seen() -> None:
    assert tenancy(honest(), [{"aa", "cc"}, {"bb", "cc"}]) == ["chunks of both"]
    assert tenancy(replace(honest(), foreign_tokens=256)) == ["cached tokens of the other's prompts"]
    assert tenancy(replace(honest(), hits=399)) == ["own prompts: hits"]


def test_a_cache_that_answers_the_other_sooner_is_told_by_its_times() -> None:
    leaky = honest()
    leaky.times.seen = [0.95 * one for one in leaky.times.seen]
    assert "p of equal means, seen and fresh" in tenancy(leaky)


def test_times_too_few_or_too_wild_to_show_five_percent_do_not_pass() -> None:
    draw = random.Random(3)
    wild = honest()
    wild.times.seen, wild.times.fresh = ([draw.lognormvariate(4.6, 0.9) for _ in range(400)] for _ in range(2))
    assert "p with 5 % planted" in tenancy(wild)


def test_the_t_test_is_right_about_as_often_as_it_says_also_while_the_machine_slows_down() -> None:
    draw = random.Random(4)

    def pairs() -> tuple[list[float], list[float]]:
        drift = [1 + number / 100 for number in range(200)]
        one, other = ([slow * draw.lognormvariate(1.6, 0.2) for slow in drift] for _ in range(2))
        return one, other

    alarms = sum(paired_p(*pairs()) < 0.05 for _ in range(400))
    assert 8 <= alarms <= 34, "5 % of 400 are 20"


# --- 4-epochs ---


def epochs() -> p4_epochs.Found:
    events = {"lease lost": 1, "etcd killed": 1, "etcd restored": 1}
    return p4_epochs.Found([*range(100, 108)], events, 3, [], {"older ended by itself": True})


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (lambda f: f.epochs.__setitem__(4, 103), "epochs not above the one before"),
        (lambda f: f.epochs.__delitem__(slice(3, None)), "processes"),
        (lambda f: f.events.pop("etcd restored"), "etcd restored"),
        (lambda f: f.changed.append("lease lost: 1 became 2"), "epochs that changed in a process's life"),
        (lambda f: f.duplicate.update({"older ended by itself": False}), "duplicate: older ended by itself"),
        (lambda f: f.duplicate.clear(), "duplicate tried"),
        (lambda f: setattr(f, "reattached", 2), "attached again after each"),
    ],
)
def test_each_fault_of_the_epochs_is_seen(plant: Callable[[p4_epochs.Found], Any], seen: str) -> None:
    found = epochs()
    assert failed(p4_epochs.judged(found, 6)) == []
    plant(found)
    assert seen in failed(p4_epochs.judged(found, 6))


# --- 4-etcd-away ---


def away() -> p4_etcd_away.Found:
    attached = [{f"w{i}": 0.01 for i in range(6)}, {f"w{i}": 0.3 * i for i in range(6)}]
    return p4_etcd_away.Found(
        streamed=9, short=200, short_away=90, fewest_tunnels=1, looks=9, attached_s=attached, same_epochs=True,
        same_processes=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"broken": ["stream 3: UNAVAILABLE"]}, "broken streams and requests"),
        ({"streamed": 0}, "tokens streamed"),
        ({"fewest_tunnels": 0}, "fewest tunnels to a worker"),
        ({"lost": ["worker disconnected"]}, "tunnels lost"),
        ({"same_epochs": False}, "same epochs"),
        ({"same_processes": False}, "same processes"),
        ({"short_away": 3}, "requests served while away"),
        ({"attached_s": [{}, {f"w{i}": 0.3 * i for i in range(6)}]}, "hung: workers attached again"),
        ({"attached_s": [{f"w{i}": 0.0 for i in range(6)}] * 2}, "gone: spread of their return, s"),
    ],
)
def test_each_thing_that_an_outage_breaks_is_seen(change: dict[str, Any], seen: str) -> None:
    assert failed(p4_etcd_away.judged(away(), full=True)) == []
    assert failed(p4_etcd_away.judged(replace(away(), **change), full=True)) == [seen]


# --- 4-golden ---


def test_ids_that_differ_between_processes_or_implementations_are_seen() -> None:
    one: dict[str, Any] = {"root": "aa", "owner": "bb"}
    other: dict[str, Any] = {"root": "cc", "owner": "bb"}
    honest = [[one, one], [other, other]]

    def verdict(said: dict[str, list[list[dict[str, Any]]]], golden: dict[str, Any] = one) -> list[str]:
        checks = Checks()
        p4_golden.judge(checks, said, golden, 2)
        return [str(check["name"]) for check in checks.failed]

    assert verdict({"0": honest, "1": honest}) == []
    assert verdict({"0": honest, "1": [[one, one], [one, other]]}) == ["processes that say otherwise"]
    assert verdict({"0": [[one, one], [other, one]]}) == ["inputs on which the two differ"]
    assert verdict({"0": honest}, other) == ["golden ids by the library", "golden ids by the reference"]
    assert "inputs answered by each process" in verdict({"0": honest, "1": []})
    assert verdict({"0": [[one, one], [one, one]]}) == ["different roots"]


# --- 4-faults ---


def test_a_wrong_token_an_uncounted_fault_and_a_late_answer_are_seen() -> None:
    names = [f"fault {number}" for number in range(17)]

    def verdict(number: int, **changes: Any) -> list[str]:
        cases = [p4_faults.Case(name, [900.0, 1_290.0], [1_000.0, 980.0], [0, 0], counted=2) for name in names]
        cases[number] = replace(cases[number], **changes)
        tallies = {name: Tally(2, 20) for name in names}
        if "name" in changes:
            tallies["wrong"] = Tally(2, 20, wrong=["token 3 is 5, not 7"])
        return failed(p4_faults.judged(cases, tallies, timed=True))

    assert verdict(0) == []
    assert verdict(3, name="wrong") == ["wrong: exact"]
    assert verdict(3, counted=0) == ["fault 3: counted"]
    assert verdict(3, ttft_ms=[900.0, 1_291.0]) == ["fault 3: ms beyond recompute + budget"]
    assert failed(p4_faults.judged([], {}, timed=True)) == ["faults"]


# --- 4-tiers-speed ---


def test_a_slow_get_is_seen_and_noise_is_allowed_for() -> None:
    def verdict(ours: float, raw: list[float], peer: dict[str, float] | None = None) -> list[str]:
        figures = peer or dict.fromkeys(("disk store", "disk load", "s3 store", "s3 load"), 1.0)
        found = p4_tiers_speed.Found([ours] * len(raw), raw, {}, figures)
        return failed(p4_tiers_speed.judged(found, timed=True))

    assert verdict(1.42, [1.0] * 8) == []
    assert verdict(1.5, [1.0] * 8) == ["our time over the bare client's"]
    assert verdict(1.9, [1.0, 1.6] * 4) == [], "the bare client itself differs by as much"
    assert verdict(1.0, [1.0] * 8, {"disk store": 1.0}) == ["figures of lmcache beside ours"]


def test_the_other_bench_is_read_by_operation() -> None:
    report: Any = {
        "metrics": {
            "config": {},
            "op_0": {"operation": "Store", "throughput_avg_mbps": 300.5, "total_keys": 4, "total_success": 4},
            "op_1": {"operation": "Lookup", "throughput_avg_mbps": 0.0, "total_keys": 4, "total_success": 0},
            "op_2": {"operation": "Load", "throughput_avg_mbps": 2103.6, "total_keys": 4, "total_success": 4},
        }
    }
    assert p4_tiers_speed.rates("disk", report) == {"disk store": 300.5, "disk load": 2103.6}
    report["metrics"]["op_2"]["total_success"] = 3
    assert p4_tiers_speed.rates("s3", report) == {"s3 store": 300.5}, "a load that failed is no figure"
