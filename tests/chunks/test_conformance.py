"""One suite for every tier: a real directory, a real S3 server. Keys differ per test by the sample's seed."""

from __future__ import annotations

import itertools
import threading

import pytest

from libs.chunks.errors import AbortedError, MissingObjectError, OtherObjectError, TierClosedError
from libs.chunks.verified import open_verified
from libs.continuation.errors import ObjectError, TokenMismatchError
from libs.continuation.objects import EncodedObject
from tests.chunks.samples import sample

SEEDS = itertools.count(1)
WITHIN = 10.0


@pytest.fixture
def made():
    return sample(next(SEEDS))


def stored(bench, made: EncodedObject):
    return bench.tier.put(made.key, made.parts, within=WITHIN)


def test_what_is_put_comes_back_verified(bench, made):
    encoded, wanted = made
    assert stored(bench, encoded).created
    with open_verified(bench.tier, wanted, within=WITHIN).view as view:
        assert bytes(view.data) == encoded.to_bytes()
        assert view.token_ids().tolist() == list(wanted.tokens)
    found = bench.tier.stat(encoded.key, within=WITHIN)
    assert found is not None and found.size == encoded.size


def test_put_leaves_an_existing_object_alone(bench, made):
    encoded, _ = made
    first, again = stored(bench, encoded), stored(bench, encoded)
    assert first.created and not again.created
    assert (first.size, first.etag) == (again.size, again.etag)


def test_one_of_many_writers_creates(bench, made):
    encoded, wanted = made
    results = []
    threads = [threading.Thread(target=lambda: results.append(stored(bench, encoded))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.created for result in results].count(True) == 1 and len(results) == 6
    open_verified(bench.tier, wanted, within=WITHIN).release()


def test_missing_is_missing(bench, made):
    _, wanted = made
    assert bench.tier.stat(wanted.key, within=WITHIN) is None
    with pytest.raises(MissingObjectError):
        open_verified(bench.tier, wanted, within=WITHIN)


def test_removed_is_gone_but_held_bytes_stay(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    opened = open_verified(bench.tier, wanted, within=WITHIN)
    bench.tier.remove(wanted.key, within=WITHIN)
    bench.tier.remove(wanted.key, within=WITHIN)
    assert bytes(opened.view.data) == encoded.to_bytes()
    with pytest.raises(MissingObjectError):
        open_verified(bench.tier, wanted, within=WITHIN)
    opened.release()
    assert bench.tier.stat(wanted.key, within=WITHIN) is None
    assert stored(bench, encoded).created


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap", "grow", "garbage"])
def test_damage_is_found_and_never_served(bench, made, damage):
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
    with pytest.raises((ObjectError, OtherObjectError)):
        open_verified(bench.tier, wanted, within=WITHIN)


def test_every_flipped_bit_of_the_tokens_is_found(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    wrong = type(wanted)(wanted.metadata, wanted.group, wanted.content, [*wanted.tokens[:-1], wanted.tokens[-1] ^ 1])
    with pytest.raises(TokenMismatchError):
        open_verified(bench.tier, wrong, within=WITHIN)


def test_damage_after_verification_is_found_too(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    open_verified(bench.tier, wanted, within=WITHIN).release()
    bench.bend(encoded.key, flipped(encoded.to_bytes()))
    with pytest.raises(ObjectError):
        open_verified(bench.tier, wanted, within=WITHIN)


def test_aborted(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    abort = threading.Event()
    abort.set()
    with pytest.raises(AbortedError):
        bench.tier.get(wanted.key, wanted.size, within=WITHIN, abort=abort)


def test_reading_is_priced(bench, made):
    encoded, wanted = made
    stored(bench, encoded)
    before = bench.tier.meter.price().samples
    open_verified(bench.tier, wanted, within=WITHIN).release()
    assert bench.tier.meter.price().samples > before


def test_probe_measures(bench):
    bench.tier.probe()
    price = bench.tier.meter.price()
    assert price.samples >= 2 and 0 < price.latency_ms < 1_000 and 100 < price.bytes_per_ms < 1e9


def test_closed(bench, made):
    encoded, wanted = made
    bench.tier.close()
    bench.tier.close()
    for call in (
        lambda: stored(bench, encoded),
        lambda: bench.tier.get(wanted.key, wanted.size, within=1),
        lambda: bench.tier.stat(wanted.key, within=1),
    ):
        with pytest.raises(TierClosedError):
            call()
