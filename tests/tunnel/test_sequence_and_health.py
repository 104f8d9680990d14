"""The pure state of a direction, and of a tunnel's health."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.tunnel import CorruptFrameError, Degraded, Health, HealthLimits, ProtocolError
from libs.tunnel.sequence import ReceiveSequence, SendWindow

LIMITS = HealthLimits(ping_multiple=4, ping_floor_s=0.05, min_samples=3, good_to_clear=3, stall_s=1, pong_timeout_s=10)


@given(st.lists(st.integers(0, 40), max_size=40))
def test_only_the_next_number_is_accepted(numbers: list[int]) -> None:
    sequence = ReceiveSequence(4)
    last = 0
    for number in numbers:
        if number == last + 1:
            sequence.accept(number)
            last = number
        else:
            with pytest.raises(CorruptFrameError) as caught:
                sequence.accept(number)
            assert caught.value.reason == ("gap" if number > last else "replay")
        assert sequence.last == last


def test_acknowledgement_is_due_every_n() -> None:
    sequence = ReceiveSequence(3)
    due = []
    for number in range(1, 8):
        sequence.accept(number)
        due.append(sequence.needs_ack())
        if due[-1]:
            assert sequence.take_ack() == number
    assert due == [False, False, True, False, False, True, False]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=60))
def test_window_counts_what_is_unacknowledged(steps: list[tuple[bool, int]]) -> None:
    window = SendWindow(8, 500)
    held: list[tuple[int, int]] = []
    for is_send, number in steps:
        if is_send:
            seq = window.take()
            window.hold(seq, number)
            held.append((seq, number))
        else:
            seq = min(number, window.last_sent)
            if seq < window.acked:
                with pytest.raises(ProtocolError):
                    window.on_ack(seq)
            else:
                window.on_ack(seq)
                held = [(other, size) for other, size in held if other > seq]
        assert window.unacked_frames == len(held)
        assert window.unacked_bytes == sum(size for _, size in held)
        assert window.has_room() == (len(held) < 8 and window.unacked_bytes < 500)


def test_an_acknowledgement_of_the_future_is_refused() -> None:
    window = SendWindow(8, 500)
    window.take()
    with pytest.raises(ProtocolError):
        window.on_ack(2)


def pinged(health: Health, now: float, rtt: float) -> float:
    health.ping_sent(b"nonce", now)
    assert health.pong(b"nonce", now + rtt)
    return now + 1


def test_slow_pings_degrade_and_good_ones_clear() -> None:
    health, now = Health(LIMITS), 0.0
    for _ in range(5):
        now = pinged(health, now, 0.02)
    assert not health.degraded and health.median_rtt == pytest.approx(0.02)
    now = pinged(health, now, 0.09)
    assert health.reasons == {Degraded.PING_SLOW}
    now = pinged(health, now, 0.02)
    now = pinged(health, now, 0.02)
    assert health.degraded
    pinged(health, now, 0.02)
    assert not health.degraded


def test_noise_below_the_floor_is_not_slow() -> None:
    health, now = Health(LIMITS), 0.0
    for _ in range(5):
        now = pinged(health, now, 0.0002)
    pinged(health, now, 0.04)
    assert not health.degraded


def test_a_missing_pong_degrades_and_then_loses() -> None:
    health, now = Health(LIMITS), 0.0
    for _ in range(3):
        now = pinged(health, now, 0.01)
    health.ping_sent(b"other", now)
    assert health.check(now + 0.04, None) and not health.degraded
    assert health.check(now + 1, None) and health.reasons == {Degraded.PING_SLOW}
    assert health.check(now + 10, None)
    assert not health.check(now + 10.1, None)


def test_own_sleep_is_no_evidence() -> None:
    health = Health(LIMITS)
    health.ping_sent(b"nonce", 0.0)
    health.forgive(60.0)
    assert health.check(61.0, None)


def test_stall_and_full_channel_reset_the_count_of_good_pings() -> None:
    health, now = Health(LIMITS), 0.0
    health.mark(Degraded.CHANNEL_FULL)
    for _ in range(2):
        now = pinged(health, now, 0.01)
    assert health.check(now + 2, now)
    assert health.reasons == {Degraded.CHANNEL_FULL, Degraded.SEND_STALLED}
    for _ in range(2):
        now = pinged(health, now, 0.01)
    assert health.degraded
    pinged(health, now, 0.01)
    assert not health.degraded


def test_a_foreign_pong_is_ignored() -> None:
    health = Health(LIMITS)
    health.ping_sent(b"mine", 0.0)
    assert not health.pong(b"yours", 0.1)
    assert health.awaiting_pong
