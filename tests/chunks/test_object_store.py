"""The object store over a link that breaks: every failure typed, bounded in time, and never wrong bytes."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

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
from libs.chunks.verified import open_verified
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import LayerGroup
from tests.chunks.samples import sample
from tests.fixtures.fault_proxy import Direction, FaultProxy

DOWN = frozenset({Direction.DOWN})
# 8 layers of 64: 1 MiB per object.
LARGE = LayerGroup(None, 1, 64, "float32", tuple(range(8)))


class Link:
    """A fault proxy before the S3 server, on a loop of its own."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxy = FaultProxy(host, int(port))
        self._call(self.proxy.__aenter__())

    def do(self, fault: Callable[[FaultProxy], None]) -> None:
        async def run() -> None:
            fault(self.proxy)

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._call(self.proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


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
    abort = threading.Event()
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
        store.put(encoded.key, encoded.parts, within=5)
    with pytest.raises(OtherObjectError):
        open_verified(store, wanted, within=5)


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
