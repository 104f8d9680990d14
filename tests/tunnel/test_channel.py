"""The bounded merging channel: order and content always, bounds always, refusal loud."""

from hypothesis import given
from hypothesis import strategies as st

from libs.tunnel import ChannelLimits, never_merge
from libs.tunnel.channel import Channel, Put
from tests.tunnel.harness import concatenate

LIMITS = ChannelLimits(max_items=8, max_bytes=200, high_items=4, high_bytes=120, congested_s=2.0)
REFUSED = {Put.OVERFLOW, Put.EXPIRED}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("take"), st.just(b"")),
        st.tuples(st.just("all"), st.just(b"")),
    ),
    max_size=80,
)


def picky(first: bytes, second: bytes) -> bytes | None:
    """Merges only within one kind, as deltas do and a result does not."""
    return first + second if (first[0] ^ second[0]) % 2 == 0 else None


@given(steps=STEPS, merge=st.sampled_from([concatenate, picky, never_merge]), pace=st.sampled_from([0.0, 0.3]))
def test_order_content_and_bounds(steps: list[tuple[str, bytes]], merge: object, pace: float) -> None:
    channel = Channel(LIMITS, merge, 100)  # type: ignore[arg-type]
    stored, taken, now = bytearray(), bytearray(), 0.0
    for step, payload in steps:
        now += pace
        if step == "put":
            if channel.put(payload, now) in REFUSED:
                break
            stored += payload
        elif step == "take":
            if len(channel):
                taken += channel.take()
        else:
            for piece in channel.take_all():
                assert merge is never_merge or len(piece) <= 100
                taken += piece
        assert len(channel) <= LIMITS.max_items and channel.size <= LIMITS.max_bytes
        assert stored.startswith(taken)
        assert channel.size == len(stored) - len(taken)
    taken += b"".join(channel.take_all())
    assert taken == stored


def test_a_burst_is_absorbed_by_merging() -> None:
    channel = Channel(LIMITS, concatenate, 1000)
    for _ in range(100):
        assert channel.put(b"x", 0.0) not in REFUSED
    assert len(channel) <= LIMITS.high_items
    assert channel.merged > 90
    assert b"".join(channel.take_all()) == b"x" * 100


def test_without_merging_the_bound_is_hard() -> None:
    channel = Channel(LIMITS, never_merge, 1000)
    results = [channel.put(b"x", 0.0) for _ in range(9)]
    assert results == [Put.STORED] * 8 + [Put.OVERFLOW]


def test_merging_alone_does_not_end_congestion() -> None:
    channel = Channel(LIMITS, concatenate, 1000)
    for _ in range(5):
        channel.put(b"x", 10.0)
    assert channel.congested_since == 10.0 and len(channel) < LIMITS.high_items
    assert channel.put(b"x", 12.0) is not Put.EXPIRED
    assert channel.put(b"x", 12.1) is Put.EXPIRED and channel.expired(12.1)


def test_a_consumer_that_catches_up_ends_it() -> None:
    channel = Channel(LIMITS, never_merge, 1000)
    for _ in range(5):
        channel.put(b"x", 10.0)
    for left in (4, 3, 2):
        assert channel.congested_since == 10.0
        channel.take()
        assert len(channel) == left
    assert channel.congested_since is None
    assert channel.put(b"x", 99.0) is Put.STORED


def test_pressure_by_bytes() -> None:
    channel = Channel(LIMITS, never_merge, 1000)
    assert channel.put(b"x" * 110, 0.0) is Put.STORED
    assert channel.put(b"x" * 20, 0.0) is Put.STORED and channel.congested_since == 0.0
    assert channel.put(b"x" * 71, 0.0) is Put.OVERFLOW
    assert channel.put(b"x" * 70, 0.0) is Put.STORED
