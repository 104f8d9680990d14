"""One job at a time, straight through: the serialized twin of the device loop.

No lanes, no policy, no batch: a job is taken, its prompt read in steps of at most `step_tokens` rows, its tokens drawn
one by one, then the next job is taken. It drives the same model, pages and sampler through the same protocol
(`job.Runtime`) and says the same events, so that a worker of batch size one can run on it, and so that it can stand as
oracle beside the batched loop: the same tokens, the same page accounting.

Commands take effect between steps. Errors end the job at fault with Failed; the next one is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence

import torch

from services.worker.model.load import LoadedModel
from services.worker.runtime.attention import StepState
from services.worker.runtime.errors import NotFiniteError, RuntimeClosedError, RuntimeFullError, RuntimeRefusalError
from services.worker.runtime.job import Event, Failed, Finished, Job, Prefilled, Quiesced, Sink, Started, Token
from services.worker.runtime.kv import KVStore
from services.worker.runtime.measurements import Measurements, Meter
from services.worker.runtime.sampling import SamplerState, token_logprobs
from services.worker.runtime.step import PageTables, Span, build_step

_log = logging.getLogger(__name__)


class SerialLoop:
    """Implements `job.Runtime`. Runs from `start()` to `close()`; arguments as for `DeviceLoop`."""

    def __init__(
        self,
        model: LoadedModel,
        kv: KVStore,
        sink: Sink,
        *,
        step_tokens: int,
        max_context: int,
        threads: int = 0,
        max_jobs: int = 64,
    ) -> None:
        if max_context > model.descriptor.max_context:
            raise RuntimeRefusalError(f"max_context={max_context} is above the model's {model.descriptor.max_context}")
        self._model, self._kv, self._sink = model, kv, sink
        self._step_tokens, self._max_context = step_tokens, max_context
        self._threads, self._max_jobs = threads, max_jobs
        self._tables = PageTables(kv.layout, 1, max_context, kv.page_size, model.device)
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Job, SamplerState]] = deque()
        self._cancelled: set[Hashable] = set()
        self._running: Job | None = None
        self._pending = 0
        """Tokens the running job has still to feed before its next one is drawn."""
        self._closing = False
        self._meter = Meter(warming=True)
        self._thread = threading.Thread(target=self._run, name="serial-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job. Raises RuntimeRefusalError, RuntimeFullError, RuntimeClosedError, or what its mask raises."""
        job.validate(self._kv.layout, self._kv.page_size, self._max_context, self._model.descriptor.vocab)
        sampler = SamplerState(job.sampling, job.tokens, job.output_start, job.choice, job.mask)
        with self._wake:
            held = [waiting.key for waiting, _ in self._waiting] + ([self._running.key] if self._running else [])
            if self._closing:
                raise RuntimeClosedError(f"job {job.key!r} came after the loop was closed")
            if job.key in held:
                raise RuntimeRefusalError(f"job {job.key!r} is already held: keys must be unique among running jobs")
            if len(held) >= self._max_jobs:
                raise RuntimeFullError(f"{self._max_jobs} jobs are held: submit when one has ended")
            self._waiting.append((job, sampler))
            self._wake.notify()

    def cancel(self, key: Hashable) -> None:
        """Ends a job at the next step with Quiesced. Ignored where the job is unknown or has ended."""
        with self._wake:
            if (self._running and self._running.key == key) or any(job.key == key for job, _ in self._waiting):
                self._cancelled.add(key)
                self._wake.notify()

    def measurements(self) -> Measurements:
        """A snapshot."""
        with self._wake:
            meter, pending = self._meter, self._pending
            waiting = [(len(job.tokens) - max(job.computed, job.likely), len(job.tokens)) for job, _ in self._waiting]
            reading = [(pending, len(self._running.tokens))] if pending > 1 and self._running else []
            return Measurements(
                iterations=meter.iterations,
                primed_rows=meter.primed_rows,
                decode_rows=meter.decode_rows,
                prompt_rows=meter.prompt_rows,
                tokens=meter.tokens,
                decode_step_ms=dict(meter.decode_step_ms),
                prefill_token_ms=dict(meter.prefill_token_ms),
                decoding_lanes=int(pending == 1),
                prefilling_lanes=int(pending > 1),
                waiting_jobs=len(waiting),
                pending_prompts=(*reading, *waiting),
            )

    def warmed(self) -> None:
        """What runs from now on is work: see `measurements`."""
        with self._wake:
            self._meter.warming = False

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the loop at the next step; whatever it held ends with Quiesced. Raises TimeoutError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the loop did not reach the end of a step within {timeout_s} s")

    # What follows runs on the loop's thread.

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while (taken := self._take()) is not None:
                job, sampler = taken
                try:
                    self._one(job, sampler)
                finally:
                    with self._wake:
                        self._running, self._pending = None, 0
                        self._cancelled.discard(job.key)

    def _take(self) -> tuple[Job, SamplerState] | None:
        """The next job, waiting for one; None once the loop is closed. Jobs cancelled while they waited end here."""
        while True:
            with self._wake:
                while not (self._waiting or self._closing):
                    self._wake.wait()
                given_up = [entry for entry in self._waiting if self._closing or entry[0].key in self._cancelled]
                for entry in given_up:
                    self._waiting.remove(entry)
                    self._cancelled.discard(entry[0].key)
                taken = None
                if not given_up and self._waiting:
                    taken = self._waiting.popleft()
                    self._running, self._pending = taken[0], len(taken[0].tokens) - taken[0].computed
            self._say([Quiesced(job.key, job.computed) for job, _ in given_up])
            if taken is not None or self._closing:
                return taken

    def _stopped(self, key: Hashable) -> bool:
        with self._wake:
            return self._closing or key in self._cancelled

    def _one(self, job: Job, sampler: SamplerState) -> None:
        """A whole job. Its end is said exactly once."""
        computed = job.computed
        tokens = list(job.tokens)
        try:
            computed = job.pages.begin(job.computed)
            if not job.computed <= computed < len(tokens):
                raise RuntimeRefusalError(f"job {job.key!r} was to begin at {computed} of {len(tokens)} tokens")
            news: list[Event] = [Started(job.key, computed)]
            primed = False
            while True:
                if self._stopped(job.key):
                    self._say([*news, Quiesced(job.key, computed)])
                    return
                end = min(computed + self._step_tokens, len(tokens))
                span = Span(0, computed, tokens[computed:end], end == len(tokens))
                token, logits = self._step(job, sampler, span, len(tokens), primed)
                primed = True
                if computed < len(job.tokens):
                    news.append(Prefilled(job.key, end))
                computed = end
                if logits is not None:
                    tokens.append(token)
                    sampler.advance(token)
                    wanted = job.sampling.logprobs
                    logprobs = None if wanted is None else token_logprobs(logits, token, wanted)
                    index = len(tokens) - len(job.tokens) - 1
                    news.append(Token(job.key, token, index, computed, logprobs))
                    if token in job.stop_token_ids:
                        news.append(Finished(job.key, "stop", computed))
                    elif index + 1 == job.max_new_tokens:
                        news.append(Finished(job.key, "length", computed))
                with self._wake:
                    self._pending = len(tokens) - computed
                self._say(news)
                if news and isinstance(news[-1], Finished):
                    return
                news = []
        except Exception as error:  # this job's alone: its page tables', its grammar's, or the device's own
            _log.exception("job %r failed", job.key)
            self._say([Failed(job.key, error, computed)])

    def _step(
        self, job: Job, sampler: SamplerState, span: Span, position: int, primed: bool
    ) -> tuple[int, torch.Tensor | None]:
        """Computes the rows of a span; the token drawn after its last row, with its logits, where that is wanted."""
        began = time.perf_counter()
        changed = job.pages.prepare(span.end)
        for name in changed if primed else [group.name for group in self._kv.layout.groups]:
            self._tables.prime(0, name, job.pages.tables[name])
        decodes, prompts = ([span], []) if len(span.tokens) == 1 else ([], [span])
        step = build_step(self._tables, decodes, prompts, self._model.dtype)
        hidden = self._model.hidden(StepState(step, self._kv))
        token, logits = -1, None
        if span.wants_logits:
            logits = self._model.logits(hidden.index_select(0, step.logit_rows))[0]
            top = float(logits.max())
            if top != top:
                raise NotFiniteError(f"the logits at position {position} hold NaN")
            token = int(logits.argmax()) if sampler.takes_argmax else sampler.choose(logits, position)
        elif self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self._book(span, (time.perf_counter() - began) * 1e3, primed=not primed or bool(changed))
        return token, logits

    def _book(self, span: Span, ms: float, *, primed: bool) -> None:
        rows = len(span.tokens)
        with self._wake:
            self._meter.primed_rows += primed
            self._meter.tokens += span.wants_logits
            if rows == 1:
                self._meter.iteration(ms, 1, 0, 0, drew=False)
            else:
                self._meter.iteration(ms, 0, rows, span.end, drew=span.wants_logits)

    def _say(self, events: Sequence[Event]) -> None:
        if not events:
            return
        try:
            self._sink(events)
        except Exception:
            _log.exception("the sink of the serialized loop raised; %d events are lost", len(events))
