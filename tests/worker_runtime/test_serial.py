"""The serialized loop: the batched loop's tokens, one job at a time, the same ends for the same reasons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.worker.runtime.errors import RuntimeClosedError, RuntimeFullError, RuntimeRefusalError
from services.worker.runtime.job import Failed, Finished, Prefilled, Quiesced, Started, Token
from services.worker.runtime.sampling import Sampling
from services.worker.runtime.serial import SerialLoop
from tests.worker_runtime.harness import Harness, Subject

SAMPLINGS = (
    None,
    Sampling(temperature=0.8, seed=5, top_p=0.9, logprobs=2),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(temperature=1.0, seed=9, top_k=20, min_p=0.05),
)


def serialized(subject: Subject, max_jobs: int = 64) -> Harness:
    harness = Harness(subject)
    harness.loop = SerialLoop(  # type: ignore[assignment]
        subject.model, harness.kv, harness.sink, step_tokens=64, max_context=4_096, threads=1, max_jobs=max_jobs
    )
    return harness


@pytest.fixture
def serial(tiny: Subject) -> Iterator[Harness]:
    with serialized(tiny) as running:
        yield running


def test_the_same_tokens_as_batched(tiny: Subject, serial: Harness, harness: Harness) -> None:
    jobs = [(f"j{i}", tiny.prompt(30 + 90 * i, i), 6 + i, SAMPLINGS[i % len(SAMPLINGS)]) for i in range(8)]
    for side in (serial, harness):
        for key, prompt, new, sampling in jobs:
            side.loop.submit(side.job(key, prompt, new, sampling))
        side.finish(*(key for key, *_ in jobs))
    for key, *_ in jobs:
        assert serial.output(key) == harness.output(key), key
        one, other = ([e for e in side.events(key) if isinstance(e, Token)] for side in (serial, harness))
        assert [e.computed for e in one] == [e.computed for e in other]
        assert [e.logprobs is None for e in one] == [e.logprobs is None for e in other]


def test_one_job_ends_before_the_next_begins(tiny: Subject, serial: Harness) -> None:
    for key in "abc":
        serial.loop.submit(serial.job(key, tiny.prompt(150, ord(key)), 4))
    serial.finish(*"abc")
    order = [event.key for batch in serial.batches for event in batch]
    assert order == sorted(order)
    events = serial.events("a")
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert [event.computed for event in events if isinstance(event, Prefilled)] == [64, 128, 150]


def test_cancels_of_a_waiting_and_a_running_job(tiny: Subject, serial: Harness) -> None:
    serial.loop.submit(serial.job("running", tiny.prompt(40, 1), 900))
    serial.loop.submit(serial.job("waiting", tiny.prompt(40, 2), 5))
    serial.seen("running", Token, 3)
    serial.loop.cancel("waiting")
    serial.loop.cancel("running")
    serial.finish("running", "waiting")
    ended = serial.ended("running")
    assert isinstance(ended, Quiesced) and isinstance(serial.ended("waiting"), Quiesced)
    assert ended.computed == 39 + len(serial.output("running"))
    assert len(serial.run(serial.job("next", tiny.prompt(40, 3), 2))) == 2


def test_a_job_that_fails_fails_alone(tiny: Subject, serial: Harness) -> None:
    tables = serial.tables(60)
    serial.kv.keys[0][tables[serial.kv.layout.groups[0].name][0]] = torch.nan
    bad = serial.job("bad", tiny.prompt(40, 1), 5, computed=16, pages=tables)
    serial.loop.submit(bad)
    serial.finish("bad")
    assert isinstance(serial.ended("bad"), Failed)
    assert len(serial.run(serial.job("good", tiny.prompt(40, 2), 3))) == 3


def test_what_it_refuses_and_closing(tiny: Subject) -> None:
    with serialized(tiny, max_jobs=2) as serial:
        serial.loop.submit(serial.job("a", tiny.prompt(40, 1), 900))
        with pytest.raises(RuntimeRefusalError):
            serial.loop.submit(serial.job("a", tiny.prompt(40, 1), 5))
        serial.loop.submit(serial.job("b", tiny.prompt(40, 2), 5))
        with pytest.raises(RuntimeFullError):
            serial.loop.submit(serial.job("c", tiny.prompt(40, 3), 5))
        serial.seen("a", Token, 1)
        found = serial.loop.measurements()
        assert (found.decoding_lanes, found.waiting_jobs) == (1, 1)
        serial.loop.close(10.0)
        assert isinstance(serial.ended("a"), Quiesced) and isinstance(serial.ended("b"), Quiesced)
        with pytest.raises(RuntimeClosedError):
            serial.loop.submit(serial.job("d", tiny.prompt(40, 4), 5))
