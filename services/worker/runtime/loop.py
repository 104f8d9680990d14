"""The device loop: the one thread that submits work to the device.

Each turn it takes the commands that arrived (jobs, cancels), lets the pure policy (`iteration`) choose the next batch,
runs one forward pass over its rows, draws the tokens and hands the turn's events to the sink. Nothing else runs on this
thread: no storage, no network, no waiting but for work. Commands take effect between iterations, so a cancelled job's
pages are untouched from its Quiesced event on.

A job ends with exactly one of Finished, Quiesced, Failed. An error in a forward pass fails the jobs of that batch
alone; a row of NaN, or an error of a job's page tables or grammar, fails that job alone; an error in the sink is
logged and the loop goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.model.load import LoadedModel
from services.worker.runtime.attention import StepState
from services.worker.runtime.errors import NotFiniteError, RuntimeClosedError, RuntimeFullError, RuntimeRefusalError
from services.worker.runtime.iteration import Budgets, LaneView, plan
from services.worker.runtime.job import Event, Failed, Finished, Job, Quiesced, Sink, Started
from services.worker.runtime.kv import KVStore
from services.worker.runtime.lanes import Lane
from services.worker.runtime.measurements import Measurements, Meter
from services.worker.runtime.sampling import SamplerState, token_logprobs
from services.worker.runtime.step import PageTables, Span, build_step, first_page

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submitted:
    job: Job
    sampler: SamplerState

    @property
    def pending(self) -> int:
        return len(self.job.tokens) - max(self.job.computed, self.job.likely)


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: Hashable


class DeviceLoop:
    """Implements `job.Runtime` over a loaded model and its KV store. Runs from `start()` to `close()`.

    threads: compute threads of the device loop on a CPU; 0 leaves the library's default. max_jobs bounds what it holds.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVStore,
        budgets: Budgets,
        sink: Sink,
        *,
        max_context: int,
        threads: int = 0,
        max_jobs: int = 64,
    ) -> None:
        if max_context > model.descriptor.max_context:
            raise RuntimeRefusalError(f"max_context={max_context} is above the model's {model.descriptor.max_context}")
        self._model = model
        self._kv = kv
        self._budgets = budgets
        self._sink = sink
        self._max_context = max_context
        self._threads = threads
        self._max_jobs = max_jobs
        self._tables = PageTables(kv.layout, budgets.lanes, max_context, kv.page_size, model.device)
        self._admissions = 0
        self._lock = threading.Lock()
        # Changed under the lock, by the loop's thread alone; so that thread may read them without it.
        self._lanes: dict[int, Lane] = {}
        self._waiting: deque[_Submitted] = deque()
        self._meter = Meter(warming=True)
        self._began = 0.0  # of the iteration under way, by perf_counter; 0 = none
        # Changed by any thread, under the lock.
        self._wake = threading.Condition(self._lock)
        self._commands: deque[_Submitted | _Cancel] = deque()
        self._held: set[Hashable] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="device-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job. Raises RuntimeRefusalError, RuntimeFullError, RuntimeClosedError, or what its mask raises."""
        job.validate(self._kv.layout, self._kv.page_size, self._max_context, self._model.descriptor.vocab)
        # Replaying a long output into the sampler is the caller's time, not the loop's.
        sampler = SamplerState(job.sampling, job.tokens, job.output_start, job.choice, job.mask)
        with self._wake:
            if self._closing:
                raise RuntimeClosedError(f"job {job.key!r} came after the device loop was closed")
            if job.key in self._held:
                raise RuntimeRefusalError(f"job {job.key!r} is already held: keys must be unique among running jobs")
            if len(self._held) >= self._max_jobs:
                raise RuntimeFullError(f"{self._max_jobs} jobs are held: submit when one has ended")
            self._held.add(job.key)
            self._commands.append(_Submitted(job, sampler))
            self._wake.notify()

    def cancel(self, key: Hashable) -> None:
        """Ends a job at the next iteration boundary with Quiesced. Ignored where the job is unknown or has ended."""
        with self._wake:
            if key in self._held:
                self._commands.append(_Cancel(key))
                self._wake.notify()

    def measurements(self) -> Measurements:
        """A snapshot."""
        with self._lock:
            lanes = list(self._lanes.values())
            queued = (command for command in self._commands if isinstance(command, _Submitted))
            waiting = [(entry.pending, len(entry.job.tokens)) for entry in (*self._waiting, *queued)]
            prefilling = [(lane.pending, len(lane.tokens)) for lane in lanes if lane.pending > 1]
            meter = self._meter
            return Measurements(
                iterations=meter.iterations,
                primed_rows=meter.primed_rows,
                decode_rows=meter.decode_rows,
                prompt_rows=meter.prompt_rows,
                tokens=meter.tokens,
                decode_step_ms=dict(meter.decode_step_ms),
                prefill_token_ms=dict(meter.prefill_token_ms),
                prefill_beside_decode_token_ms=dict(meter.prefill_beside_decode_token_ms),
                decoding_lanes=len(lanes) - len(prefilling),
                prefilling_lanes=len(prefilling),
                waiting_jobs=len(waiting),
                pending_prompts=(*prefilling, *waiting),
                elapsed_ms=(time.perf_counter() - self._began) * 1e3 if self._began else 0.0,
            )

    def warmed(self) -> None:
        """What runs from now on is work: see `measurements`."""
        with self._lock:
            self._meter.warming = False

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the loop at the next iteration boundary; whatever it held ends with Quiesced. Raises TimeoutError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the device loop did not reach an iteration boundary within {timeout_s} s")

    # What follows runs on the loop's thread.

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode(), _own_stream(self._model.device):
            while self._turn():
                pass

    def _turn(self) -> bool:
        """One iteration, waiting for work where there is none; False once the loop is closed."""
        with self._wake:
            while not (self._commands or self._closing or self._lanes or self._waiting):
                self._wake.wait()
            events = self._take_commands()
            closing = self._closing
            if closing:
                events += self._quiesce_all()
        if not closing:
            events += self._refill()
            events += self._iterate()
        if events:
            try:
                self._sink(events)
            except Exception:
                _log.exception("the sink of the device loop raised; %d events are lost", len(events))
        return not closing

    def _take_commands(self) -> list[Event]:
        events: list[Event] = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Cancel):
                events += self._quiesce(command.key)
            else:
                self._waiting.append(command)
        return events

    def _quiesce(self, key: Hashable) -> list[Event]:
        for lane in self._lanes.values():
            if lane.job.key == key:
                self._release(lane)
                return [Quiesced(key, lane.computed)]
        for entry in self._waiting:
            if entry.job.key == key:
                self._waiting.remove(entry)
                self._held.discard(key)
                return [Quiesced(key, entry.job.computed)]
        return []

    def _quiesce_all(self) -> list[Event]:
        keys = [lane.job.key for lane in self._lanes.values()] + [entry.job.key for entry in self._waiting]
        return [event for key in keys for event in self._quiesce(key)]

    def _release(self, lane: Lane) -> None:
        del self._lanes[lane.index]
        self._held.discard(lane.job.key)

    def _views(self) -> list[LaneView]:
        return [lane.view() for lane in self._lanes.values()]

    def _refill(self) -> list[Event]:
        """Puts queued jobs into the lanes that the policy refills."""
        events: list[Event] = []
        for index in plan(self._views(), [entry.pending for entry in self._waiting], self._budgets).refills:
            with self._lock:
                entry = self._waiting.popleft()
            job = entry.job
            try:
                start = job.pages.begin(job.computed)
                if not job.computed <= start < len(job.tokens):
                    raise RuntimeRefusalError(f"job {job.key!r} was to begin at {start} of {len(job.tokens)} tokens")
            except Exception as error:  # the page tables' own error: this job's alone
                _log.exception("job %r could not begin", job.key)
                events.append(Failed(job.key, error, job.computed))
                with self._lock:
                    self._held.discard(job.key)
                continue
            with self._lock:
                self._lanes[index] = Lane(index, job, entry.sampler, self._admissions, start)
            self._admissions += 1
            events.append(Started(job.key, start))
        return events

    def _iterate(self) -> list[Event]:
        self._began = began = time.perf_counter()
        batch = plan(self._views(), (), self._budgets)
        shares = [*((index, 1) for index in batch.decodes), *batch.prompts]
        events, spans, primed = self._prepare(shares)
        decodes = sorted((span for span in spans if span.lane in batch.decodes), key=lambda span: -span.start)
        prompts = [span for span in spans if span.lane not in batch.decodes]
        if spans:
            events += self._forward(decodes, prompts)
        elapsed_ms = (time.perf_counter() - began) * 1e3
        ended = {event.key for event in events if isinstance(event, Finished | Failed)}
        with self._lock:
            self._began = 0.0
            self._meter.primed_rows += primed
            self._meter.tokens += sum(span.wants_logits for span in spans)
            if spans:
                rows = sum(len(span.tokens) for span in prompts)
                longest = max((span.end for span in prompts), default=0)
                drew = any(span.wants_logits for span in prompts)
                self._meter.iteration(elapsed_ms, len(decodes), rows, longest, drew=drew)
            for lane in [lane for lane in self._lanes.values() if lane.job.key in ended]:
                self._release(lane)
        return events

    def _prepare(self, shares: Sequence[tuple[int, int]]) -> tuple[list[Event], list[Span], int]:
        """Has each lane's next rows mapped; returns failures, rows to compute, and how many lanes' tables were
        uploaded.
        """
        events: list[Event] = []
        spans: list[Span] = []
        primed = 0
        for index, count in shares:
            lane = self._lanes[index]
            span = lane.span(count)
            try:
                changed = lane.job.pages.prepare(span.end)
                names = changed if lane.primed else [group.name for group in self._kv.layout.groups]
                for name in names:
                    self._tables.prime(index, name, self._checked(lane, name, span))
                lane.primed = True
                primed += bool(names)
                spans.append(span)
            except Exception as error:  # the page tables' own error: this job's alone
                _log.exception("the pages of job %r could not be prepared", lane.job.key)
                events.append(self._failed(span, error))
        return events, spans, primed

    def _checked(self, lane: Lane, name: str, span: Span) -> Sequence[int]:
        """A table whose entries that the span touches are pages of the store."""
        table = lane.job.pages.tables[name]
        first = first_page(self._kv.layout.group(name), span.start, self._kv.page_size)
        end = -(-span.end // self._kv.page_size)
        touched = table[first:end]
        if len(touched) < end - first or min(touched) < 0 or max(touched) >= self._kv.pages[name]:
            raise RuntimeRefusalError(
                f"rows {span.start}..{span.end - 1} of job {lane.job.key!r} touch pages {first}..{end - 1} of group "
                f"{name}, mapped to {list(touched)} of {self._kv.pages[name]}: map them before the rows are computed"
            )
        return table

    def _forward(self, decodes: Sequence[Span], prompts: Sequence[Span]) -> list[Event]:
        spans = [*decodes, *prompts]
        events: list[Event] = []
        try:
            step = build_step(self._tables, decodes, prompts, self._model.dtype)
            hidden = self._model.hidden(StepState(step, self._kv))
            wanted = [span for span in spans if span.wants_logits]
            logits = self._model.logits(hidden.index_select(0, step.logit_rows)) if wanted else None
            # The copies to the host also wait for the device: the events below promise completed state.
            top, argmax = _reduce(logits) if logits is not None else ([], [])
            if logits is None and self._model.device.type == "cuda":
                torch.cuda.current_stream(self._model.device).synchronize()
        except Exception as error:  # the device's error, whatever its type, belongs to this batch and not to the worker
            _log.exception("a forward pass over %d rows failed", sum(len(span.tokens) for span in spans))
            return [self._failed(span, error) for span in spans]
        row = ahead = 0
        for number, span in enumerate(spans):
            lane, before = self._lanes[span.lane], ahead
            ahead += len(span.tokens) if number >= len(decodes) else 0
            if not span.wants_logits or logits is None:
                events += lane.fed(span, before)
                continue
            try:
                if top[row] != top[row]:
                    raise NotFiniteError(f"the logits at position {len(lane.tokens)} hold NaN")
                events += self._draw(lane, span, before, logits[row], argmax[row])
            except Exception as error:  # a row's NaN, or a grammar's own error: this job's alone
                _log.exception("no token could be drawn for job %r", lane.job.key)
                events.append(self._failed(span, error))
            row += 1
        return events

    def _draw(self, lane: Lane, span: Span, ahead: int, logits: Tensor, argmax: int) -> list[Event]:
        token = argmax if lane.sampler.takes_argmax else lane.sampler.choose(logits, len(lane.tokens))
        alternatives = lane.job.sampling.logprobs
        logprobs = None if alternatives is None else token_logprobs(logits, token, alternatives)
        return [*lane.fed(span, ahead), *lane.drew(token, logprobs)]

    def _failed(self, span: Span, error: Exception) -> Failed:
        """The rows of this span are not to be trusted: complete is what came before them."""
        return Failed(self._lanes[span.lane].job.key, error, span.start)


def _reduce(logits: Tensor) -> tuple[list[float], list[int]]:
    """Per row the largest logit (NaN where there is one) and its lowest index, on the host."""
    top, argmax = logits.max(dim=1)
    return top.tolist(), argmax.tolist()


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA a stream above the transfers' (lower numbers come first); elsewhere nothing."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)  # the weights and zeroed pages were written on the default stream
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
