"""The device loop's promises: one end per job, cancels at the next boundary, errors kept to their job, ordered
close."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from services.worker.engine import compute_of
from services.worker.runtime.errors import RuntimeClosedError, RuntimeFullError, RuntimeRefusalError
from services.worker.runtime.job import Event, Failed, Finished, Job, Prefilled, Quiesced, Started, Token
from services.worker.runtime.measurements import Meter
from services.worker.runtime.sampling import Sampling
from services.worker.settings import WorkerSettings
from tests.worker_runtime.harness import PAGE, Harness, Subject


def cancel_on(harness: Harness, key: str, kind: type[Event]) -> None:
    """From the loop's own thread, in the middle of a turn: the earliest moment a cancel can follow an event."""

    def watch(events: Sequence[Event]) -> None:
        if any(event.key == key and isinstance(event, kind) for event in events):
            harness.loop.cancel(key)

    harness.on_events = watch


@pytest.mark.parametrize("kind", [Started, Prefilled, Token])
def test_cancel_takes_effect_at_the_next_boundary(tiny: Subject, harness: Harness, kind: type[Event]) -> None:
    cancel_on(harness, "a", kind)
    harness.loop.submit(harness.job("a", tiny.prompt(400, seed=1), 200))
    harness.finish("a")
    events = harness.events("a")
    assert isinstance(events[-1], Quiesced)
    first = next(index for index, batch in enumerate(harness.batches) if any(isinstance(e, kind) for e in batch))
    assert harness.batches[first + 1] == [events[-1]], "nothing happens between the event and the end"
    assert events[-1].computed == max(e.computed for e in events[:-1])


def test_a_cancelled_jobs_pages_are_untouched_and_continue(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(400, seed=2)
    tables = harness.tables(450)
    cancel_on(harness, "a", Prefilled)
    harness.loop.submit(harness.job("a", prompt, 20, pages=tables))
    harness.finish("a")
    boundary = harness.events("a")[-1].computed
    assert 0 < boundary < 400
    harness.on_events = None
    output = harness.run(harness.job("again", prompt, 20, pages=tables, computed=boundary))
    assert tiny.worst_gap(prompt, output) < 1e-4


def test_cancel_while_waiting_and_after_the_end(tiny: Subject) -> None:
    with Harness(tiny, lanes=1) as harness:
        harness.loop.submit(harness.job("runs", tiny.prompt(100, seed=3), 100))
        harness.loop.submit(harness.job("waits", tiny.prompt(100, seed=4), 5))
        harness.seen("runs", Token)
        harness.loop.cancel("waits")
        harness.loop.cancel("unknown")
        harness.finish("waits", "runs")
        assert harness.events("waits") == [Quiesced("waits", 0)]
        harness.loop.cancel("runs")
        assert harness.run(harness.job("next", tiny.prompt(10, seed=5), 3))
        assert isinstance(harness.ended("runs"), Finished)


def test_random_cancels_leave_nothing_behind(tiny: Subject) -> None:
    """200 jobs, half of them cancelled at a random event; the others are exact, and every job ends once."""
    rng = random.Random(5)
    with Harness(tiny, lanes=4, pages=6000, max_jobs=200) as harness:
        doomed = {key: rng.choice([Started, Prefilled, Token]) for key in range(0, 200, 2)}
        prompts = {key: tiny.prompt(rng.choice([3, 40, 150]), seed=key) for key in range(200)}

        def watch(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, doomed.get(event.key, ())) and rng.random() < 0.5:
                    harness.loop.cancel(event.key)

        harness.on_events = watch
        for key, prompt in prompts.items():
            harness.loop.submit(harness.job(key, prompt, rng.randint(1, 12)))
        harness.finish(*prompts)
        ends = [harness.ended(key) for key in prompts]
        assert sum(isinstance(end, Quiesced) for end in ends) > 30
        assert all(isinstance(harness.ended(key), Finished) for key in prompts if key not in doomed)
        for key in list(prompts)[1:40:2]:
            assert tiny.worst_gap(prompts[key], harness.output(key)) < 1e-4
        measured = harness.loop.measurements()
        assert (measured.decoding_lanes, measured.prefilling_lanes, measured.waiting_jobs) == (0, 0, 0)


def test_lanes_are_stable_and_only_refills_are_primed(tiny: Subject) -> None:
    with Harness(tiny, lanes=2) as harness:
        harness.run(harness.job("a", tiny.prompt(20, seed=6), 50))
        measured = harness.loop.measurements()
        assert measured.primed_rows == 1
        assert measured.decode_rows == 49
        assert measured.tokens == 50
        assert measured.decode_step_ms[1].count == 49
        assert set(measured.prefill_token_ms) == {256}


@pytest.mark.parametrize("handlers", ["batched", "serialized"])
async def test_what_the_first_prompt_compiles_is_no_price(
    tiny: Subject, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, handlers: str
) -> None:
    """A worker that is thought to be slow gets no work, and is not measured again."""
    slow = 1_000.0
    booked: list[float] = []
    iteration = Meter.iteration

    def book(meter: Meter, ms: float, decode_rows: int, prompt_rows: int, longest_prompt: int, *, drew: bool) -> None:
        booked.append(ms)
        iteration(meter, slow if len(booked) == 1 else ms, decode_rows, prompt_rows, longest_prompt, drew=drew)

    monkeypatch.setattr(Meter, "iteration", book)
    settings = WorkerSettings.model_validate(
        {"worker": "w", "model": str(folders["tiny"]), "kv_bytes": "16MiB", "handlers": handlers, "threads": 1}
    )
    runtime = compute_of(settings, folders["tiny"], tiny.model).runtime
    runtime.start(lambda _: None)
    try:
        await runtime.warmup()
        found = runtime.counters()
        assert found.iterations == len(booked) and found.decode_step_ms
        assert max(one.count for one in found.prefill_token_ms.values()) >= 4
        assert next(cost.ms_per_token for cost in runtime.prefill() if cost.up_to_tokens == 512) * 300 < slow / 2
    finally:
        await runtime.aclose()


def test_rows_ahead_of_a_prompt_in_its_step_are_told(tiny: Subject) -> None:
    harness = Harness(tiny, lanes=4)
    for key, length in (("a", 100), ("b", 20), ("c", 30)):
        harness.loop.submit(harness.job(key, tiny.prompt(length, seed=length), 3))
    with harness:
        harness.finish("a", "b", "c")
    told = {
        key: [(event.computed, event.ahead) for event in harness.events(key) if isinstance(event, Prefilled)]
        for key in "abc"
    }
    # 64 rows a step: all of one's, then what is left of it and the others in order.
    assert told == {"a": [(64, 0), (100, 0)], "b": [(20, 36)], "c": [(8, 56), (30, 0)]}


def test_serialized_and_batched_draw_the_same_tokens(tiny: Subject) -> None:
    prompts = {key: tiny.prompt(30 + 50 * key, seed=key) for key in range(8)}
    sampling = Sampling(temperature=1.0, seed=5)
    outputs = []
    for lanes in (1, 8):
        with Harness(tiny, lanes=lanes) as harness:
            for key, prompt in prompts.items():
                harness.loop.submit(harness.job(key, prompt, 16, sampling if key % 2 else None))
            harness.finish(*prompts)
            outputs.append([harness.output(key) for key in prompts])
            if lanes == 1:
                keys = [event.key for batch in harness.batches for event in batch]
                assert keys == sorted(keys), "one lane never interleaves"
    assert outputs[0] == outputs[1]


@dataclass
class Growing:
    """Page tables of a pool that maps windowed pages as the job goes and uses those behind the window again."""

    harness: Harness
    tables: Mapping[str, list[int]]
    start: int | None = None
    broken_at: int | None = None
    span: int = 512 + 64 + 2 * PAGE
    threads: set[str] = field(default_factory=set)

    def begin(self, computed: int) -> int:
        self.threads.add(threading.current_thread().name)
        return computed if self.start is None else self.start

    def prepare(self, end: int) -> Collection[str]:
        self.threads.add(threading.current_thread().name)
        if self.broken_at is not None and end > self.broken_at:
            raise LookupError("the pool lost a page")
        changed = []
        for group in self.harness.subject.model.identity.layout.groups:
            table = self.tables[group.name]
            if group.window is None or len(table) * PAGE >= end:
                continue
            while len(table) * PAGE < end:
                behind = len(table) - self.span // PAGE
                if behind >= 0:
                    table.append(table[behind])
                    table[behind] = -1
                else:
                    table.append(self.harness.free[group.name].pop())
            changed.append(group.name)
        return changed


def growing(harness: Harness, tokens: int, **options: int) -> Growing:
    full = harness.tables(tokens)
    layout = harness.subject.model.identity.layout
    tables = {group.name: full[group.name] if group.window is None else [] for group in layout.groups}
    return Growing(harness, tables, **options)


def test_windowed_pages_may_be_reused_while_the_job_runs(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(1500, seed=7)
    pages = growing(harness, 1600)
    output = harness.run(harness.job("a", prompt, 90, pages=pages))
    assert tiny.worst_gap(prompt, output) < 1e-4
    windowed = pages.tables[next(g.name for g in tiny.model.identity.layout.groups if g.window)]
    assert windowed.count(-1) > 50, "pages were used again"
    assert pages.threads == {"device-loop"}
    decode_uploads = harness.loop.measurements().primed_rows - 24
    assert 4 <= decode_uploads <= 8, "one upload per new page, none for the other decodes"


def test_a_job_may_begin_later_than_it_was_submitted(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(300, seed=8)
    tables = harness.tables(400)
    harness.run(harness.job("first", prompt, 1, pages=tables))
    output = harness.run(harness.job("late", prompt, 20, pages=Growing(harness, tables, start=290)))
    assert harness.events("late")[0] == Started("late", 290)
    assert tiny.worst_gap(prompt, output) < 1e-4


def test_an_error_of_one_jobs_pages_is_its_own(tiny: Subject, harness: Harness) -> None:
    harness.loop.submit(harness.job("sound", tiny.prompt(200, seed=9), 60))
    harness.loop.submit(harness.job("lost", tiny.prompt(100, seed=10), 60, pages=growing(harness, 200, broken_at=120)))
    harness.loop.submit(harness.job("absurd", tiny.prompt(9, seed=10), 5, pages=growing(harness, 20, start=9)))
    holes = {name: [-1] * 20 for name in harness.free}
    harness.loop.submit(harness.job("holes", tiny.prompt(9, seed=10), 5, pages=holes))
    harness.finish("sound", "lost", "absurd", "holes")
    assert isinstance(harness.ended("sound"), Finished)
    lost = harness.ended("lost")
    assert isinstance(lost, Failed)
    assert isinstance(lost.error, LookupError)
    assert lost.computed == 120
    assert isinstance(harness.ended("absurd"), Failed)
    assert isinstance(harness.ended("holes"), Failed)


def test_nan_fails_its_own_job_alone(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(100, seed=11)
    tables = harness.tables(200)
    harness.run(harness.job("first", prompt, 1, pages=tables))
    for group in tiny.model.identity.layout.groups:
        rows = harness.kv.read(group.name, tables[group.name][:1], 0, 1)
        harness.kv.write(
            group.name, tables[group.name][:1], 0, {i: (k * float("nan"), v) for i, (k, v) in rows.items()}
        )
    harness.loop.submit(harness.job("sound", tiny.prompt(50, seed=12), 20))
    harness.loop.submit(harness.job("damaged", prompt, 20, pages=tables, computed=99))
    harness.finish("sound", "damaged")
    assert isinstance(harness.ended("damaged"), Failed)
    assert isinstance(harness.ended("sound"), Finished)


def test_a_failing_forward_fails_its_batch_and_the_loop_goes_on(
    tiny: Subject, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny.model), "hidden", explode)
        harness.loop.submit(harness.job("a", tiny.prompt(20, seed=13), 5))
        harness.finish("a")
    assert isinstance(harness.ended("a"), Failed)
    assert len(harness.run(harness.job("b", tiny.prompt(20, seed=13), 5))) == 5


def test_a_raising_sink_does_not_end_the_loop(tiny: Subject, harness: Harness) -> None:
    calls = 0

    def explode(_: Sequence[Event]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the sink is broken")

    harness.on_events = explode
    harness.loop.submit(harness.job("a", tiny.prompt(20, seed=14), 5))
    harness.finish("a")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"computed": 20}, "computed"),
        ({"computed": -1}, "computed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"output_start": 21}, "output_start"),
        ({"tokens": [3] * 19 + [512]}, "vocabulary"),
        ({"tokens": []}, "computed"),
        ({"sampling": Sampling(top_p=2.0)}, "top_p"),
        ({"max_new_tokens": 60}, "pages"),
    ],
)
def test_jobs_that_cannot_run_are_refused(
    tiny: Subject, harness: Harness, change: dict[str, object], reason: str
) -> None:
    job = harness.job("a", tiny.prompt(20, seed=15), 12)
    with pytest.raises(RuntimeRefusalError, match=reason):
        harness.loop.submit(Job(**{name: getattr(job, name) for name in Job.__slots__} | change))
    assert len(harness.run(job)) == 12


def test_bounds_and_unique_keys(tiny: Subject) -> None:
    with Harness(tiny, lanes=1, max_jobs=2) as harness:
        harness.loop.submit(harness.job("a", tiny.prompt(20, seed=16), 500))
        harness.loop.submit(harness.job("b", tiny.prompt(20, seed=16), 5))
        with pytest.raises(RuntimeRefusalError, match="unique"):
            harness.loop.submit(harness.job("b", tiny.prompt(20, seed=16), 5))
        with pytest.raises(RuntimeFullError):
            harness.loop.submit(harness.job("c", tiny.prompt(20, seed=16), 5))
        harness.loop.cancel("a")
        harness.finish("a", "b")
        assert harness.run(harness.job("c", tiny.prompt(20, seed=16), 5))


def test_close_ends_everything_at_a_boundary(tiny: Subject) -> None:
    harness = Harness(tiny, lanes=2)
    with harness:
        for key in range(5):
            harness.loop.submit(harness.job(key, tiny.prompt(30, seed=key), 1000))
        harness.seen(0, Token, 3)
    assert all(isinstance(harness.ended(key), Quiesced) for key in range(5))
    with pytest.raises(RuntimeClosedError):
        harness.loop.submit(harness.job("late", tiny.prompt(5, seed=1), 1))
    assert not any(thread.name == "device-loop" for thread in threading.enumerate())
