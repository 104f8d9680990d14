"""One suite for every tier, each over its real medium: memory, a directory, a gRPC peer, an S3 server.

Keys differ per test by the sample's seed. `test_planted.py` runs the same functions on tiers with a bug in each.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from libs.chunks.errors import (
    AbortedError,
    MissingObjectError,
    OtherObjectError,
    SlowTierError,
    TierClosedError,
    TierFullError,
)
from libs.chunks.memory import HostMemory
from libs.chunks.tier import Transfer, Wanted
from libs.chunks.verified import open_verified
from libs.continuation.errors import ObjectError, TokenMismatchError
from libs.continuation.objects import EncodedObject
from tests.chunks.bench import Bench
from tests.chunks.samples import sample

SEEDS = itertools.count(1)
WITHIN = 10.0

Made = tuple[EncodedObject, Wanted]


@pytest.fixture
def made() -> Made:
    return sample(next(SEEDS))


def stored(bench: Bench, made: EncodedObject):
    return bench.keeper.put(made.key, made.parts, within=WITHIN)


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_what_is_put_comes_back_verified(bench, made):
    encoded, wanted = made
    assert stored(bench, encoded).created
    with open_verified(bench.source, wanted, within=WITHIN).view as view:
        assert bytes(view.data) == encoded.to_bytes()
        assert view.token_ids().tolist() == list(wanted.tokens)
    found = bench.source.stat(encoded.key, within=WITHIN)
    assert found is not None and found.size == encoded.size


def test_put_leaves_an_existing_object_alone(bench, made):
    """Keys end in the content id; whoever comes second with anything under the same key changes nothing."""
    encoded, wanted = made
    first = stored(bench, encoded)
    again = bench.keeper.put(encoded.key, [memoryview(bytes(encoded.size))], within=WITHIN)
    assert first.created and not again.created
    assert (first.size, first.etag) == (again.size, again.etag)
    opened = open_verified(bench.source, wanted, within=WITHIN)
    assert bytes(opened.view.data) == encoded.to_bytes()
    opened.release()


def test_one_of_many_writers_creates(bench, made):
    encoded, wanted = made
    results = []
    threads = [threading.Thread(target=lambda: results.append(stored(bench, encoded))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.created for result in results].count(True) == 1 and len(results) == 6
    open_verified(bench.source, wanted, within=WITHIN).release()


def test_missing_is_missing(bench, made):
    _, wanted = made
    assert bench.source.stat(wanted.key, within=WITHIN) is None
    with pytest.raises(MissingObjectError):
        open_verified(bench.source, wanted, within=WITHIN)


def test_removed_is_gone_but_held_bytes_stay(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    opened = open_verified(bench.source, wanted, within=WITHIN)
    bench.keeper.remove(wanted.key, within=WITHIN)
    bench.keeper.remove(wanted.key, within=WITHIN)
    assert bytes(opened.view.data) == encoded.to_bytes()
    with pytest.raises(MissingObjectError):
        open_verified(bench.source, wanted, within=WITHIN)
    opened.release()
    opened.release()
    assert bench.source.stat(wanted.key, within=WITHIN) is None
    assert stored(bench, encoded).created


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap", "grow", "garbage"])
def test_damage_is_found_counted_and_never_served(bench, made, damage):
    encoded, wanted = made
    other, _ = sample(10_000 + next(SEEDS))
    data = encoded.to_bytes()
    bent = {
        "flip": flipped(data),
        "truncate": data[:-100],
        "empty": b"",
        "swap": other.to_bytes(),
        "grow": data + b"\0",
        "garbage": bytes(len(data)),
    }[damage]
    stored(bench, encoded)
    bench.bend(encoded.key, bent)
    before = bench.damaged()
    with pytest.raises((ObjectError, OtherObjectError)) as caught:
        open_verified(bench.source, wanted, within=WITHIN)
    # Something of another size is refused before it is read where the medium tells; else its bytes are found damaged.
    assert bench.damaged() == before + isinstance(caught.value, ObjectError)
    with pytest.raises(MissingObjectError if bench.aside else (ObjectError, OtherObjectError)):
        open_verified(bench.source, wanted, within=WITHIN)
    if bench.aside:
        assert stored(bench, encoded).created  # a good copy may take its place
        open_verified(bench.source, wanted, within=WITHIN).release()


def test_other_tokens_under_one_hash_are_refused(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    wrong = Wanted(wanted.metadata, wanted.group, wanted.content, [*wanted.tokens[:-1], wanted.tokens[-1] ^ 1])
    with pytest.raises(TokenMismatchError):
        open_verified(bench.source, wrong, within=WITHIN)


def test_other_tokens_are_refused_also_by_bytes_verified_before(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    open_verified(bench.source, wanted, within=WITHIN).release()
    wrong = Wanted(wanted.metadata, wanted.group, wanted.content, [*wanted.tokens[:-1], wanted.tokens[-1] ^ 1])
    with pytest.raises(TokenMismatchError):
        open_verified(bench.source, wrong, within=WITHIN)


def test_damage_after_verification_is_found_too(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    open_verified(bench.source, wanted, within=WITHIN).release()
    bench.bend(encoded.key, flipped(encoded.to_bytes()))
    with pytest.raises(ObjectError):
        open_verified(bench.source, wanted, within=WITHIN)


def test_many_readers_each_get_their_own(bench):
    objects = [sample(20_000 + next(SEEDS)) for _ in range(4)]
    for encoded, _ in objects:
        stored(bench, encoded)
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(6):
                encoded, wanted = draw.choice(objects)
                opened = open_verified(bench.source, wanted, within=WITHIN)
                assert bytes(opened.view.data) == encoded.to_bytes()
                opened.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures


def test_reading_while_writing_finds_nothing_or_the_whole(bench, made):
    encoded, wanted = made
    seen: list[bool] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                try:
                    open_verified(bench.source, wanted, within=WITHIN).release()
                    seen.append(True)
                except MissingObjectError:
                    seen.append(False)
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(5):
            stored(bench, encoded)
            bench.keeper.remove(encoded.key, within=WITHIN)
    finally:
        done.set()
        reader.join(20)
    assert seen and not failures, failures


def test_aborted(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    transfer = Transfer()
    transfer.set()
    with pytest.raises(AbortedError):
        bench.source.get(wanted.key, wanted.size, within=WITHIN, abort=transfer)


def test_what_has_moved_is_counted(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    transfer = Transfer()
    open_verified(bench.source, wanted, within=WITHIN, abort=transfer).release()
    assert transfer.moved == encoded.size


def test_no_time_left_is_an_answer_too(bench, made):
    """At once, with the bytes or with a typed error."""
    encoded, wanted = made
    stored(bench, encoded)
    started = time.monotonic()
    with suppress(SlowTierError):
        open_verified(bench.source, wanted, within=1e-6).release()
    assert time.monotonic() - started < 5.0


def test_reading_is_priced(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    before = bench.source.meter.price().samples
    open_verified(bench.source, wanted, within=WITHIN).release()
    assert bench.source.meter.price().samples > before


def test_probe_measures(bench):
    bench.source.probe()
    price = bench.source.meter.price()
    assert price.samples >= 1 and 0 < price.latency_ms < 1_000 and 100 < price.bytes_per_ms < 1e9


def test_closed(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    bench.source.close()
    bench.source.close()
    calls = [
        lambda: bench.source.get(wanted.key, wanted.size, within=1),
        lambda: bench.source.stat(wanted.key, within=1),
    ]
    if bench.keeper is bench.source:
        calls.append(lambda: stored(bench, encoded))
    for call in calls:
        with pytest.raises(TierClosedError):
            call()


# --- tiers with a byte cap ---


def test_the_budget_is_exact_also_after_restarts(capped):
    size = sample(0)[0].size
    cap = 3 * size + size // 2
    tier = capped(cap)
    for round_ in range(3):
        for seed in range(8):
            encoded, _ = sample(30_000 + 8 * round_ + seed)
            tier.put(encoded.key, encoded.parts, within=WITHIN)
            assert tier.used == len(tier.objects()) * size <= cap
        there = tier.objects()
        tier = capped(cap)
        # Files are found again; memory is empty, and its budget whole.
        assert tier.used == len(tier.objects()) * size <= cap
        assert set(tier.objects()) <= set(there)


def test_what_is_leased_stays_and_counts(capped):
    objects = [sample(40_000 + seed) for seed in range(3)]
    size = objects[0][0].size
    tier = capped(2 * size)
    for encoded, _ in objects[:2]:
        tier.put(encoded.key, encoded.parts, within=WITHIN)
    held = [open_verified(tier, wanted, within=WITHIN) for _, wanted in objects[:2]]
    with pytest.raises(TierFullError):
        tier.put(objects[2][0].key, objects[2][0].parts, within=WITHIN)
    # Removed, but still being read: its bytes are there and count.
    tier.remove(objects[0][0].key, within=WITHIN)
    assert tier.used == 2 * size and bytes(held[0].view.data) == objects[0][0].to_bytes()
    with pytest.raises(TierFullError):
        tier.put(objects[2][0].key, objects[2][0].parts, within=WITHIN)
    held[0].release()
    assert tier.used == size
    tier.put(objects[2][0].key, objects[2][0].parts, within=WITHIN)
    assert tier.used == 2 * size and bytes(held[1].view.data) == objects[1][0].to_bytes()
    held[1].release()
    assert tier.counts.leases == 0


def test_what_was_used_outlives_what_was_not(capped):
    objects = [sample(50_000 + seed) for seed in range(4)]
    tier = capped(3 * objects[0][0].size)
    for encoded, _ in objects[:3]:
        tier.put(encoded.key, encoded.parts, within=WITHIN)
    for _, wanted in (objects[0], objects[2]):
        open_verified(tier, wanted, within=WITHIN).release()
    tier.put(objects[3][0].key, objects[3][0].parts, within=WITHIN)
    assert set(tier.objects()) == {objects[index][0].key for index in (0, 2, 3)}


def test_larger_than_the_budget_is_refused_and_evicts_nothing(capped):
    small, large = sample(60_000, tokens=range(16)), sample(60_001)
    tier = capped(large[0].size - 1)
    tier.put(small[0].key, small[0].parts, within=WITHIN)
    with pytest.raises(TierFullError):
        tier.put(large[0].key, large[0].parts, within=WITHIN)
    assert tier.objects() == (small[0].key,)


def test_reading_while_evicting_and_writing(capped):
    """By count, not by time. Memory is also given bytes to keep as they are, which it evicts alike."""
    made = [sample(70_000 + seed) for seed in range(12)]
    tier = capped(4 * made[0][0].size)
    seen = Counter[str]()
    failures: list[BaseException] = []

    def store(encoded: EncodedObject, adopt: bool) -> bool:
        if adopt and isinstance(tier, HostMemory):
            return tier.adopt(encoded.key, memoryview(bytearray(encoded.to_bytes())), verified=True).created
        return tier.put(encoded.key, encoded.parts, within=WITHIN).created

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(250):
                encoded, wanted = draw.choice(made)
                try:
                    if draw.random() < 0.5:
                        seen["created"] += store(encoded, draw.random() < 0.5)
                    else:
                        opened = open_verified(tier, wanted, within=WITHIN)
                        assert bytes(opened.view.data) == encoded.to_bytes()
                        opened.release()
                        seen["read"] += 1
                except (MissingObjectError, TierFullError) as error:
                    seen[type(error).__name__] += 1
                assert tier.used <= tier.cap
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert seen["read"] > 10 and seen["created"] > 4 + 10, "nothing was evicted"
    assert tier.used == sum(tier.stat(key, within=WITHIN).size for key in tier.objects())
    assert tier.counts.leases == 0
