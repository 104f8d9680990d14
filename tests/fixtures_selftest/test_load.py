"""The load generator keeps its promises: else a result without errors or delays proves nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.load import Arrivals, chat_pieces, percentile, run_load

BODY: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@given(st.floats(0.1, 1_000), st.integers(0, 300), st.floats(0, 20), st.integers(0, 2**32))
def test_arrivals_are_bounded_ascending_and_the_same_for_a_seed(
    rate: float, count: int, within: float, seed: int
) -> None:
    arrivals = Arrivals(rate, count, within, seed)
    due = arrivals.due()
    assert due == Arrivals(rate, count, within, seed).due() == sorted(due)
    assert len(due) <= count and all(0 <= at <= within for at in due)


def test_arrivals_are_poisson() -> None:
    """Gaps of an exponential distribution: mean and standard deviation are both 1/rate."""
    due = Arrivals(rate=50, count=20_000, within_s=1e9, seed=7).due()
    gaps = [later - earlier for earlier, later in zip([0.0, *due], due, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert due != Arrivals(rate=50, count=20_000, within_s=1e9, seed=8).due()


async def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    running, most = 0, 0

    async def stuck(_: int) -> AsyncIterator[str]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.5)
        yield "x"
        running -= 1

    report = await run_load(stuck, Arrivals(rate=200, count=40, within_s=5))
    assert most == 40, "all were under way at once: none waited for another"
    assert not report.errors and all(one.ttft_ms is not None and one.ttft_ms >= 490 for one in report.samples)


async def test_times_count_from_the_moment_a_request_was_due() -> None:
    """A generator that cannot keep up shows it in every latency, and says by how much it was late."""
    hold = 0.4

    async def blocks_the_loop(index: int) -> AsyncIterator[str]:
        if index == 0:
            time.sleep(hold)  # noqa: ASYNC251 - blocking is what is tried here
        yield "x"

    report = await run_load(blocks_the_loop, Arrivals(rate=1_000, count=20, within_s=5, seed=1))
    others = report.samples[1:]
    assert min(one.late_ms for one in others) > 1e3 * hold * 0.8
    assert all(one.ttft_ms is not None and one.ttft_ms >= one.late_ms for one in others)


async def test_failures_are_recorded_and_end_nobody_else() -> None:
    async def some(index: int) -> AsyncIterator[str]:
        if index == 1:
            raise ValueError("broken")
        if index == 2:
            return
        yield "a"
        await asyncio.sleep(0.02)
        yield "b"
        if index == 3:
            raise ValueError("cut")
        if index == 4:
            await asyncio.sleep(60)

    report = await run_load(some, Arrivals(rate=1_000, count=6, within_s=5), patience_s=0.5)
    by_index = {one.index: one for one in report.samples}
    assert [by_index[i].error is None for i in range(6)] == [True, False, False, False, False, True]
    assert "broken" in (by_index[1].error or "") and "without a piece" in (by_index[2].error or "")
    assert by_index[3].pieces == 2 and "cut" in (by_index[3].error or "")
    assert "not ended" in (by_index[4].error or "")
    assert by_index[0].gaps_ms[0] >= 19
    assert len(report.errors) == 4 and "4 errors" in report.summary()


async def test_cancelling_a_load_leaves_nothing_running() -> None:
    ended = 0

    async def endless(_: int) -> AsyncIterator[str]:
        nonlocal ended
        try:
            yield "x"
            await asyncio.sleep(60)
        finally:
            ended += 1

    before = len(asyncio.all_tasks())
    load = asyncio.create_task(run_load(endless, Arrivals(rate=1_000, count=5, within_s=1)))
    await asyncio.sleep(0.1)
    load.cancel()
    await asyncio.wait([load], timeout=5)
    assert load.done() and len(asyncio.all_tasks()) == before


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([3.0], 0.01) == 3.0 and percentile([], 0.5) != percentile([], 0.5)


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """An HTTP server that always answers so and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def sse(*events: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + "".join(f"data: {event}\n\n" for event in events).encode()


PIECE = '{"choices": [{"delta": {"content": "%s"}}]}'


@pytest.mark.parametrize(
    ("reply", "pieces", "error"),
    [
        (sse(PIECE % "a", '{"choices": []}', PIECE % "b", "[DONE]"), 2, None),
        (sse(PIECE % "a"), 1, "without its end marker"),
        (sse(PIECE % "a", '{"error": {"message": "lost"}}'), 1, "lost"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}", 0, "HTTP 429"),
        (b"", 0, "disconnected"),
    ],
    ids=["whole", "cut", "error event", "refused", "closed"],
)
async def test_only_a_whole_stream_counts_as_one(reply: bytes, pieces: int, error: str | None) -> None:
    async with answering(reply) as url, httpx.AsyncClient() as http:
        report = await run_load(lambda _: chat_pieces(http, url, BODY), Arrivals(rate=100, count=3, within_s=5))
    assert [one.pieces for one in report.samples] == [pieces] * 3
    for one in report.samples:
        assert (one.error is None) if error is None else (one.error is not None and error in one.error)
