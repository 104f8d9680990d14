"""The object store over a link that breaks: every failure typed, bounded in time, and never wrong bytes."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from libs.chunks.errors import (
    AbortedError,
    AccessRefusedError,
    MissingBucketError,
    OtherObjectError,
    SlowTierError,
    TierError,
    UnreachableError,
)
from libs.chunks.object_store import Bucket, ObjectStore
from libs.chunks.tier import Transfer
from libs.chunks.verified import open_verified
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import LayerGroup
from tests.chunks.links import Link
from tests.chunks.samples import sample
from tests.fixtures.fault_proxy import Direction

DOWN = frozenset({Direction.DOWN})
# 8 layers of 64: 1 MiB per object.
LARGE = LayerGroup(None, 1, 64, "float32", tuple(range(8)))


@pytest.fixture
def link(s3_server) -> Iterator[Link]:
    made = Link(s3_server.endpoint)
    yield made
    made.close()


@pytest.fixture
def far(link: Link, bucket: Bucket) -> Iterator[ObjectStore]:
    """The store behind the link."""
    made = ObjectStore(replace(bucket, endpoint=link.proxy.address), range_bytes=256 << 10, stall_s=0.5)
    yield made
    made.close()


@pytest.fixture
def large(store: ObjectStore):
    encoded, wanted = sample(time.monotonic_ns(), group=LARGE)
    store.put(encoded.key, encoded.parts, within=10)
    return encoded, wanted


def took(work: Callable[[], object], error: type[TierError]) -> float:
    started = time.monotonic()
    with pytest.raises(error):
        work()
    return time.monotonic() - started


def test_ranges_make_up_the_whole(far: ObjectStore, large) -> None:
    encoded, wanted = large
    opened = open_verified(far, wanted, within=10)
    assert bytes(opened.view.data) == encoded.to_bytes()
    opened.release()


def test_refused(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: setattr(proxy, "refuse", True))
    link.do(lambda proxy: proxy.reset())
    assert took(lambda: open_verified(far, large[1], within=3), UnreachableError) < 3.5


def test_nobody_listens(bucket: Bucket, large) -> None:
    store = ObjectStore(replace(bucket, endpoint="127.0.0.1:9"), stall_s=0.5)
    assert took(lambda: store.check(2.0), UnreachableError) < 2.5
    assert took(lambda: open_verified(store, large[1], within=2), UnreachableError) < 2.5
    store.close()


@pytest.mark.parametrize("within", [0.3, 1.0])
def test_silence_is_bounded(link: Link, far: ObjectStore, large, within: float) -> None:
    link.do(lambda proxy: proxy.blackhole(directions=DOWN))
    assert took(lambda: open_verified(far, large[1], within=within), SlowTierError) < within + 0.7
    assert far.counts.slow >= 1


def test_a_slow_link_is_bounded_too(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: proxy.delay(5.0, DOWN))
    assert took(lambda: open_verified(far, large[1], within=0.4), SlowTierError) < 1.2


def test_reset_in_the_middle_of_a_body_is_tried_again(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: proxy.cut_after(300_000, DOWN))

    def heal() -> None:
        deadline = time.monotonic() + 10
        while far.counts.retried == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        link.do(lambda proxy: proxy.heal())

    healing = threading.Thread(target=heal)
    healing.start()
    opened = open_verified(far, large[1], within=10)
    assert bytes(opened.view.data) == large[0].to_bytes() and far.counts.retried >= 1
    opened.release()
    healing.join(10)


def test_reset_in_every_body_ends(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: proxy.cut_after(1_000, DOWN))
    assert took(lambda: open_verified(far, large[1], within=3), UnreachableError) < 3.5


def test_it_recovers_by_itself(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: proxy.blackhole())
    took(lambda: open_verified(far, large[1], within=0.3), SlowTierError)
    link.do(lambda proxy: proxy.heal())
    link.do(lambda proxy: proxy.reset())
    open_verified(far, large[1], within=5).release()


def test_abort_ends_a_wait(link: Link, far: ObjectStore, large) -> None:
    link.do(lambda proxy: proxy.delay(0.4, DOWN))
    abort = Transfer()
    threading.Timer(0.05, abort.set).start()
    started = time.monotonic()
    with pytest.raises((AbortedError, SlowTierError)):
        open_verified(far, large[1], within=10, abort=abort)
    assert time.monotonic() - started < 3


def test_wrong_secret(bucket: Bucket, large) -> None:
    store = ObjectStore(replace(bucket, secret_key="wrong" * 8))
    for work in (
        store.check,
        lambda: open_verified(store, large[1], within=5),
        lambda: store.put(sample(5)[0].key, sample(5)[0].parts, within=5),
    ):
        with pytest.raises(AccessRefusedError, match="secret key"):
            work()
    store.close()


def test_missing_bucket(bucket: Bucket) -> None:
    store = ObjectStore(replace(bucket, bucket="nobody-made-this"))
    with pytest.raises(MissingBucketError, match="nobody-made-this"):
        store.check()
    store.close()


def test_secrets_are_not_shown(bucket: Bucket) -> None:
    assert bucket.secret_key not in repr(bucket)


def test_another_object_under_the_key(store: ObjectStore, raw_client) -> None:
    encoded, wanted = sample(time.monotonic_ns())
    raw_client.put_object(store.bucket, encoded.key.text, io.BytesIO(b"something else"), 14)
    with pytest.raises(OtherObjectError):
        open_verified(store, wanted, within=5)


@pytest.mark.parametrize("left", [b"", b"something else"])
def test_what_another_size_says_is_not_ours_is_written_over(store: ObjectStore, raw_client, left: bytes) -> None:
    """Some stores keep an empty object of a writer that died while it sent: nobody could publish that chunk again."""
    encoded, wanted = sample(time.monotonic_ns())
    raw_client.put_object(store.bucket, encoded.key.text, io.BytesIO(left), len(left))
    before = store.counts.replaced
    stored = store.put(encoded.key, encoded.parts, within=5)
    assert not stored.created and stored.size == encoded.size and store.counts.replaced == before + 1
    opened = open_verified(store, wanted, within=5)
    assert bytes(opened.view.data) == encoded.to_bytes()
    opened.release()
    assert store.put(encoded.key, encoded.parts, within=5).etag == stored.etag
    assert store.counts.replaced == before + 1


def test_put_through_a_link_that_swallows_the_answer(link: Link, far: ObjectStore, store: ObjectStore) -> None:
    """The object is there, the answer is not: the next try finds it and agrees."""
    encoded, _ = sample(time.monotonic_ns())
    link.do(lambda proxy: proxy.blackhole(directions=DOWN))
    with pytest.raises(SlowTierError):
        far.put(encoded.key, encoded.parts, within=1.0)
    link.do(lambda proxy: proxy.heal())
    link.do(lambda proxy: proxy.reset())
    again = far.put(encoded.key, encoded.parts, within=5)
    assert not again.created and again.size == encoded.size and again.etag


@pytest.mark.parametrize("size", [1, 4095, 256 << 10, (256 << 10) + 1, 1_000_003])
def test_any_size_in_ranges(far: ObjectStore, raw_client, size: int) -> None:
    key = ObjectKey("ab" * 32, "cd" * 16, "ef" * 32, "full-kv1-d4-float32", f"{size:064x}")
    data = np.random.default_rng(size).bytes(size)
    raw_client.put_object(far.bucket, key.text, io.BytesIO(data), size)
    assert bytes(far.get(key, size, within=10).data) == data


# 14 MiB: three parts of 5 MiB.
HUGE = LayerGroup(None, 1, 256, "float32", tuple(range(28)))


@pytest.fixture(scope="module")
def huge():
    return sample(time.monotonic_ns(), group=HUGE)


@pytest.fixture
def parted(link: Link, bucket: Bucket) -> Iterator[ObjectStore]:
    """A store behind the link that writes in parts of 5 MiB."""
    made = ObjectStore(replace(bucket, endpoint=link.proxy.address), part_bytes=5 << 20, stall_s=0.5)
    yield made
    made.close()


def uploads(raw_client, store: ObjectStore) -> int:
    """Multipart uploads under way: parts that cost room."""
    found = raw_client._list_multipart_uploads(store.bucket)
    return len(found.uploads)


def test_a_large_object_is_written_in_parts_unless_it_is_there(parted: ObjectStore, raw_client, huge) -> None:
    encoded, wanted = huge
    parted.remove(encoded.key, within=10)
    first = parted.put(encoded.key, encoded.parts, within=20)
    again = parted.put(encoded.key, encoded.parts, within=20)
    assert first.created and first.etag.endswith("-3") and not again.created and again.etag == first.etag
    opened = open_verified(parted, wanted, within=20)
    assert bytes(opened.view.data) == encoded.to_bytes()
    opened.release()
    assert uploads(raw_client, parted) == 0


def test_a_large_object_is_written_over_what_is_not_it(parted: ObjectStore, raw_client, huge) -> None:
    encoded, wanted = huge
    raw_client.put_object(parted.bucket, encoded.key.text, io.BytesIO(b""), 0)
    assert parted.put(encoded.key, encoded.parts, within=20).size == encoded.size
    open_verified(parted, wanted, within=20).release()
    assert uploads(raw_client, parted) == 0


def test_of_many_that_write_in_parts_one_creates(parted: ObjectStore, raw_client, huge) -> None:
    encoded, wanted = huge
    parted.remove(encoded.key, within=10)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(parted.put(encoded.key, encoded.parts, within=30)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.created for result in results].count(True) == 1 and len(results) == 3
    open_verified(parted, wanted, within=20).release()
    assert uploads(raw_client, parted) == 0


def test_a_write_in_parts_that_fails_leaves_nothing(link: Link, parted: ObjectStore, raw_client, huge) -> None:
    encoded, _ = huge
    parted.remove(encoded.key, within=10)
    link.do(lambda proxy: proxy.cut_after(6_000_000, frozenset({Direction.UP})))
    with pytest.raises(TierError):
        parted.put(encoded.key, encoded.parts, within=4)
    link.do(lambda proxy: proxy.heal())
    assert parted.stat(encoded.key, within=5) is None
    assert parted.put(encoded.key, encoded.parts, within=20).created
