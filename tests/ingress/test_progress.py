"""Resubmission and merging, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1.common_pb2 import FinishReason, GenerationRequest, Sampling, TokenLogprobs, Usage
from libs.contracts.segue.v1.router_pb2 import AttachMessage, CancelRequest, CompletedDelivery, Delivery, TokensDelivery
from libs.controller.merging import merge_deliveries
from services.ingress.progress import DeliveryGapError, Progress

REQUEST = GenerationRequest(
    request_id="r", tokens=[9, 8, 7], output_start=3, max_new_tokens=10, stop_token_ids=[1], sampling=Sampling(seed=4)
)
OUTPUT = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), max_size=30))
def test_whatever_comes_the_tokens_are_the_declared_ones_once_each(arrivals: list[tuple[int, int, bool]]) -> None:
    progress, taken = Progress(REQUEST), []
    for index, count, lost in arrivals:
        if lost:
            progress.router_lost()
            sent = progress.submission(50)
            assert list(sent.request.tokens) == [9, 8, 7, *taken]
            assert (sent.delivered, sent.request.output_start) == (len(taken), 3)
            assert sent.request.max_new_tokens + sent.delivered == 10
            assert (sent.request.deadline_ms, sent.request.sampling.seed) == (50, 4)
        try:
            taken += progress.take(TokensDelivery(index=index, tokens=OUTPUT[index : index + count]))
        except DeliveryGapError:
            assert index > len(taken)
        assert taken == progress.delivered == OUTPUT[: len(taken)]
    assert list(REQUEST.tokens) == [9, 8, 7], "the first submission is never changed"


def test_the_tokens_tell_the_end() -> None:
    progress = Progress(REQUEST)
    assert progress.ended is None
    progress.take(TokensDelivery(index=0, tokens=OUTPUT))
    assert progress.ended == FinishReason.FINISH_REASON_LENGTH
    stopped = Progress(REQUEST)
    stopped.take(TokensDelivery(index=0, tokens=[20, 1]))
    assert stopped.ended == FinishReason.FINISH_REASON_STOP


def test_usage_is_the_first_delivering_routers() -> None:
    progress = Progress(REQUEST)
    progress.note_usage(Usage(cached_tokens=1))
    progress.router_lost()  # before any token: the next router reads the prompt anew
    progress.take(TokensDelivery(index=0, tokens=[20], usage=Usage(cached_tokens=2)))
    progress.take(TokensDelivery(index=1, tokens=[21], usage=Usage(cached_tokens=3)))
    progress.router_lost()
    progress.take(TokensDelivery(index=2, tokens=[22], usage=Usage(cached_tokens=4)))
    progress.note_usage(Usage(cached_tokens=5))
    assert progress.usage is not None
    assert progress.usage.cached_tokens == 3


def test_the_next_router_is_told_the_variant_of_what_was_delivered() -> None:
    progress = Progress(REQUEST)
    assert progress.submission(50).fingerprint == ""
    progress.take(TokensDelivery(index=0, tokens=[20], fingerprint="f1"))
    progress.router_lost()
    assert progress.submission(50).fingerprint == "f1"
    progress.take(TokensDelivery(index=0, tokens=[20], fingerprint="f2"))  # nothing new, so nothing of this variant
    assert progress.submission(50).fingerprint == "f1"


def test_a_spent_deadline_is_not_sent_as_the_routers_default() -> None:
    assert Progress(REQUEST).submission(-5).request.deadline_ms == 1


def delivery(request_id: str = "r", **event: object) -> bytes:
    return AttachMessage(delivery=Delivery(request_id=request_id, **event)).SerializeToString()  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.booleans())
def test_merging_keeps_tokens_logprobs_and_the_latest_usage(sizes: list[int], logprobs: bool) -> None:
    merged, at = b"", 3
    for size in sizes:
        tokens = range(at, at + size)
        one = delivery(
            tokens=TokensDelivery(
                index=at,
                tokens=tokens,
                logprobs=[TokenLogprobs(logprob=-token) for token in tokens] if logprobs else [],
                usage=Usage(generated_tokens=at + size),
            )
        )
        at += size
        merged = one if not merged else merge_deliveries(merged, one) or b""
    told = AttachMessage.FromString(merged).delivery.tokens
    assert (told.index, list(told.tokens)) == (3, list(range(3, at)))
    assert [one.logprob for one in told.logprobs] == ([-token for token in range(3, at)] if logprobs else [])
    assert told.usage.generated_tokens == at


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (delivery(tokens=TokensDelivery(index=0, tokens=[1])), delivery(tokens=TokensDelivery(index=2, tokens=[1]))),
        (delivery(tokens=TokensDelivery(index=0, tokens=[1])), delivery(tokens=TokensDelivery(index=0, tokens=[1]))),
        (delivery("a", tokens=TokensDelivery(tokens=[1])), delivery("b", tokens=TokensDelivery(index=1, tokens=[1]))),
        (
            delivery(tokens=TokensDelivery(tokens=[1], logprobs=[TokenLogprobs()])),
            delivery(tokens=TokensDelivery(index=1, tokens=[1])),
        ),
        (delivery(tokens=TokensDelivery(tokens=[1])), delivery(completed=CompletedDelivery())),
        (delivery(tokens=TokensDelivery(tokens=[1])), AttachMessage(cancel=CancelRequest()).SerializeToString()),
        (delivery(tokens=TokensDelivery(tokens=[1])), b"\xff"),
        (b"", delivery(tokens=TokensDelivery(tokens=[1]))),
    ],
)
def test_what_is_not_consecutive_tokens_of_one_request_stays_apart(first: bytes, second: bytes) -> None:
    assert merge_deliveries(first, second) is None
