"""Host memory: one budget, no copy where none is needed, and that it says what came and went."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libs.chunks.errors import MissingObjectError, TierFullError
from libs.chunks.memory import HostMemory, _sum
from libs.chunks.verified import open_verified
from libs.continuation.errors import ContentMismatchError
from tests.chunks.samples import sample


def owned(encoded) -> memoryview:
    return np.frombuffer(bytearray(encoded.to_bytes()), np.uint8).data


def test_adopting_copies_nothing_and_needs_no_second_check() -> None:
    encoded, wanted = sample(1)
    data = owned(encoded)
    memory = HostMemory(1 << 20)
    assert memory.adopt(encoded.key, data, verified=True).created
    opened = open_verified(memory, wanted, within=1)
    assert not opened.fresh
    at = np.frombuffer(opened.held.data, np.uint8).ctypes.data
    assert at == np.frombuffer(data, np.uint8).ctypes.data
    assert not memory.adopt(encoded.key, owned(encoded), verified=True).created
    assert memory.used == encoded.size
    opened.release()


def test_what_was_adopted_unseen_is_checked_once() -> None:
    encoded, wanted = sample(2)
    memory = HostMemory(1 << 20)
    memory.adopt(encoded.key, owned(encoded), verified=False)
    first, again = (open_verified(memory, wanted, within=1) for _ in range(2))
    assert first.fresh and not again.fresh
    first.release()
    again.release()


@given(st.binary(min_size=1, max_size=200), st.data())
def test_the_sum_tells_every_single_bit(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    bent = bytearray(data)
    bent[bit // 8] ^= 1 << (bit % 8)
    assert _sum(memoryview(data)) != _sum(memoryview(bent))


def test_it_tells_what_came_and_went() -> None:
    news: list[tuple[str, str]] = []
    made = [sample(seed) for seed in range(3)]
    memory = HostMemory(
        2 * made[0][0].size,
        on_here=lambda key: news.append(("here", key.hash)),
        on_gone=lambda key: news.append(("gone", key.hash)),
    )
    for encoded, _ in made:
        memory.put(encoded.key, encoded.parts, within=1)
    memory.reject(made[2][0].key, ContentMismatchError("damaged"))
    memory.remove(made[1][0].key, within=1)
    names = [encoded.key.hash for encoded, _ in made]
    assert news == [
        ("here", names[0]), ("here", names[1]), ("gone", names[0]), ("here", names[2]), ("gone", names[2]),
        ("gone", names[1]),
    ]  # fmt: skip


class MemoryBooks(RuleBasedStateMachine):
    """Counted = what can be found + what was taken out while somebody reads it; never above the cap."""

    MADE: ClassVar = [sample(seed, tokens=range(seed, seed + 16 * (1 + seed % 16))) for seed in range(16)]

    @initialize(cap=st.integers(20_000, 300_000))
    def start(self, cap: int) -> None:
        self.here: set[str] = set()
        self.memory = HostMemory(
            cap, on_here=lambda key: self.here.add(key.hash), on_gone=lambda key: self.here.discard(key.hash)
        )
        self.held: list[tuple[bytes, object]] = []

    @rule(which=st.integers(0, 15), adopt=st.booleans())
    def fill(self, which: int, adopt: bool) -> None:
        encoded, _ = self.MADE[which]
        try:
            if adopt:
                self.memory.adopt(encoded.key, owned(encoded), verified=True)
            else:
                self.memory.put(encoded.key, encoded.parts, within=1)
            assert self.memory.holds(encoded.key)
        except TierFullError:
            assert encoded.size > self.memory.cap or self.held

    @rule(which=st.integers(0, 15))
    def lease(self, which: int) -> None:
        encoded, wanted = self.MADE[which]
        try:
            self.held.append((encoded.to_bytes(), open_verified(self.memory, wanted, within=1)))
        except MissingObjectError:
            assert not self.memory.holds(encoded.key)

    @rule(which=st.integers(0, 30))
    def release(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held))[1].release()

    @rule(which=st.integers(0, 15), damaged=st.booleans())
    def take_out(self, which: int, damaged: bool) -> None:
        key = self.MADE[which][0].key
        if damaged:
            self.memory.reject(key, ContentMismatchError("damaged"))
        else:
            self.memory.remove(key, within=1)
        assert not self.memory.holds(key)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory = self.memory
        counted = sum(memory.stat(key, within=1).size for key in memory.objects())
        assert counted <= memory.used <= memory.cap
        assert memory.used == counted or self.held
        assert memory.counts.used_bytes == memory.used and memory.counts.leases == len(self.held)
        assert self.here == {key.hash for key in memory.objects()}
        assert set(memory._data) == set(memory.objects())

    @invariant()
    def held_bytes_stay(self) -> None:
        for data, opened in getattr(self, "held", []):
            assert bytes(opened.view.data) == data


TestMemoryBooks = MemoryBooks.TestCase
TestMemoryBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
