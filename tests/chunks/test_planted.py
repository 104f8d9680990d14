"""The suite finds what it is there for: a plain tier passes it, and the same tier with one bug does not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from libs.chunks.cost import CostMeter, Price
from libs.chunks.errors import AbortedError, MissingObjectError, TierClosedError
from libs.chunks.memory import HostMemory
from libs.chunks.tier import Held, MemoryHeld, Stored, TierKind, Transfer
from tests.chunks import conformance as suite
from tests.chunks.bench import Bench
from tests.chunks.samples import sample


class Plain:
    """The least tier: a dictionary. `bug` names what it gets wrong."""

    kind = TierKind.RAM

    def __init__(self, bug: str = "") -> None:
        self.bug, self.data, self.damaged, self.closed = bug, {}, 0, False
        self.meter, self.lock = CostMeter(Price(1.0, 1e6)), threading.Lock()

    def get(self, key, size, *, within, abort: Transfer | None = None) -> Held:
        if self.closed and self.bug != "serves when closed":
            raise TierClosedError("closed", remedy="")
        if abort is not None and abort.is_set() and self.bug != "cannot be aborted":
            raise AbortedError("aborted", remedy="")
        with self.lock:
            if key not in self.data:
                raise MissingObjectError("missing", remedy="")
            data = self.data[key]
        if abort is not None and self.bug != "counts no bytes":
            abort.came(len(data))
        # A reader's bytes are its own, but for the bug that hands out the buffer itself.
        held = MemoryHeld(memoryview(data) if self.bug == "held bytes change" else memoryview(bytearray(data)))
        held.verified = self.bug == "trusts anything"
        return held

    def stat(self, key, *, within):
        if self.closed:
            raise TierClosedError("closed", remedy="")
        return Stored(len(self.data[key])) if key in self.data else None

    def put(self, key, parts, *, within) -> Stored:
        if self.closed:
            raise TierClosedError("closed", remedy="")
        with self.lock:
            if key in self.data and self.bug != "overwrites":
                return Stored(len(self.data[key]))
            self.data[key] = bytearray(b"".join(parts))
            if self.bug == "shows half":
                self.data[key] = self.data[key][: len(self.data[key]) // 2]
            return Stored(len(self.data[key]), created=self.bug != "never creates")

    def remove(self, key, *, within) -> None:
        with self.lock:
            found = self.data.pop(key, None)
        if found is not None and self.bug == "held bytes change":
            np.frombuffer(found, np.uint8)[:] = 0

    def reject(self, key, error) -> None:
        self.damaged += self.bug != "counts no damage"
        if self.bug != "serves damage again":
            self.data.pop(key, None)

    def probe(self) -> None:
        self.meter.observe(1_000, 1.0)
        self.meter.observe(1_000_000, 2.0)

    def close(self) -> None:
        self.closed = True


def plain_bench(bug: str = "") -> Bench:
    tier = Plain(bug)

    def bend(key, data: bytes) -> None:
        tier.data[key] = bytearray(data)

    return Bench(tier, tier, bend, lambda: tier.damaged, aside=True)


EVERY: list[Callable] = [
    suite.test_what_is_put_comes_back_verified,
    suite.test_put_leaves_an_existing_object_alone,
    suite.test_one_of_many_writers_creates,
    suite.test_missing_is_missing,
    suite.test_removed_is_gone_but_held_bytes_stay,
    suite.test_other_tokens_under_one_hash_are_refused,
    suite.test_other_tokens_are_refused_also_by_bytes_verified_before,
    suite.test_damage_after_verification_is_found_too,
    suite.test_aborted,
    suite.test_what_has_moved_is_counted,
    suite.test_no_time_left_is_an_answer_too,
    suite.test_reading_is_priced,
    suite.test_closed,
]


@pytest.mark.parametrize("test", EVERY)
def test_a_plain_tier_passes(test) -> None:
    test(plain_bench(), sample(1))


def test_a_plain_tier_passes_the_rest() -> None:
    for damage in ("flip", "truncate", "empty", "swap", "grow", "garbage"):
        suite.test_damage_is_found_counted_and_never_served(plain_bench(), sample(1), damage)
    suite.test_many_readers_each_get_their_own(plain_bench())
    suite.test_reading_while_writing_finds_nothing_or_the_whole(plain_bench(), sample(1))
    suite.test_probe_measures(plain_bench())


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        ("overwrites", suite.test_put_leaves_an_existing_object_alone),
        ("never creates", suite.test_one_of_many_writers_creates),
        ("shows half", suite.test_what_is_put_comes_back_verified),
        ("held bytes change", suite.test_removed_is_gone_but_held_bytes_stay),
        ("trusts anything", suite.test_damage_after_verification_is_found_too),
        ("cannot be aborted", suite.test_aborted),
        ("counts no bytes", suite.test_what_has_moved_is_counted),
        ("serves when closed", suite.test_closed),
    ],
)
def test_a_bug_is_found(bug: str, test: Callable) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        test(plain_bench(bug), sample(1))


@pytest.mark.parametrize("bug", ["counts no damage", "serves damage again", "trusts anything"])
def test_a_bug_about_damage_is_found(bug: str) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        suite.test_damage_is_found_counted_and_never_served(plain_bench(bug), sample(1), "flip")


# --- the budget ---


class Overfull(HostMemory):
    """Forgets what is leased when it makes room."""

    def _room(self, key, size):
        for entry in list(self._books):
            if self.used + size > self.cap:
                self._books.take_out(entry)
                self._drop(entry)
        return super()._room(key, size)


class Leaky(HostMemory):
    """Gives back less than it took."""

    def _drop(self, entry) -> None:
        entry.size -= 1
        super()._drop(entry)


@pytest.mark.parametrize(
    ("tier", "test"),
    [
        (Overfull, suite.test_what_is_leased_stays_and_counts),
        (Leaky, suite.test_the_budget_is_exact_also_after_restarts),
    ],
)
def test_a_bug_in_the_books_is_found(tier: type[HostMemory], test: Callable) -> None:
    test(HostMemory)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test(tier)
