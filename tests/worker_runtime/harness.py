"""A device loop with a plain page allocator and a recording sink, and the teacher-forced comparison with the oracle."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from services.worker.model.load import LoadedModel
from services.worker.runtime.iteration import Budgets
from services.worker.runtime.job import Event, Failed, Finished, FixedPages, Job, JobPages, Prefilled, Quiesced, Token
from services.worker.runtime.kv import KVStore
from services.worker.runtime.loop import DeviceLoop
from services.worker.runtime.sampling import Sampling
from services.worker.runtime.step import first_page

PAGE = 16
DEADLINE_S = 60.0


@dataclass
class Subject:
    """A loaded model and the same checkpoint in plain transformers."""

    model: LoadedModel
    reference: Any

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Oracle logits `[len(tokens), vocab]`: one contiguous forward, transformers' own attention and masks."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(tokens)])).logits[0].float()

    def prompt(self, length: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [2, *(rng.randrange(6, self.model.descriptor.vocab) for _ in range(length - 1))]

    def worst_gap(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """How far, at most, an output token's oracle logit lies below the largest at its place."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(output)), torch.tensor(list(output))]
        return float((logits.max(dim=1).values - chosen).max())


@dataclass
class Harness:
    """Runs jobs over a store whose free pages are shuffled, so that no table is ever contiguous by luck."""

    subject: Subject
    lanes: int = 8
    token_budget: int = 64
    pages: int = 1400
    max_context: int = 4096
    max_jobs: int = 64
    on_events: Callable[[Sequence[Event]], None] | None = None
    batches: list[list[Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.subject.model.identity.layout
        self.kv = KVStore(layout, {group.name: self.pages for group in layout.groups}, PAGE, torch.device("cpu"))
        self.free = {group.name: list(range(self.pages)) for group in layout.groups}
        rng = random.Random(1)
        for pages in self.free.values():
            rng.shuffle(pages)
        self.changed = threading.Condition()
        self.loop = DeviceLoop(
            self.subject.model,
            self.kv,
            Budgets(self.lanes, self.token_budget),
            self.sink,
            max_context=self.max_context,
            threads=1,
            max_jobs=self.max_jobs,
        )

    def __enter__(self) -> Harness:
        self.loop.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.loop.close(DEADLINE_S)

    def sink(self, events: Sequence[Event]) -> None:
        if self.on_events is not None:
            self.on_events(events)
        with self.changed:
            self.batches.append(list(events))
            self.changed.notify_all()

    def events(self, key: Hashable) -> list[Event]:
        return [event for batch in list(self.batches) for event in batch if event.key == key]

    def output(self, key: Hashable) -> list[int]:
        return [event.token for event in self.events(key) if isinstance(event, Token)]

    def ended(self, key: Hashable) -> Event | None:
        found = [event for event in self.events(key) if isinstance(event, Finished | Quiesced | Failed)]
        assert len(found) <= 1, "a job ends once"
        return found[0] if found else None

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), "the loop did not get there in time"

    def finish(self, *keys: Hashable) -> None:
        self.wait(lambda: all(self.ended(key) is not None for key in keys))

    def seen(self, key: Hashable, kind: type[Prefilled] | type[Token], count: int = 1) -> None:
        self.wait(lambda: sum(isinstance(event, kind) for event in self.events(key)) >= count)

    def tables(self, tokens: int) -> dict[str, list[int]]:
        """Fresh page ids for positions [0, tokens), per group."""
        count = -(-tokens // PAGE)
        return {name: [pages.pop() for _ in range(count)] for name, pages in self.free.items()}

    def job(
        self,
        key: Hashable,
        tokens: Sequence[int],
        new: int,
        sampling: Sampling | None = None,
        *,
        computed: int = 0,
        output_start: int | None = None,
        pages: JobPages | Mapping[str, Sequence[int]] | None = None,
        stop: Collection[int] = (),
        choice: int = 0,
    ) -> Job:
        if pages is None:
            pages = self.tables(len(tokens) + new)
        return Job(
            key=key,
            tokens=tokens,
            computed=computed,
            pages=FixedPages(pages) if isinstance(pages, Mapping) else pages,
            max_new_tokens=new,
            output_start=len(tokens) if output_start is None else output_start,
            sampling=sampling or Sampling(),
            stop_token_ids=frozenset(stop),
            choice=choice,
        )

    def run(self, job: Job) -> list[int]:
        self.loop.submit(job)
        self.finish(job.key)
        ended = self.ended(job.key)
        assert isinstance(ended, Finished), ended
        return self.output(job.key)

    def forget_behind_window(self, tables: Mapping[str, Sequence[int]], position: int) -> dict[str, list[int]]:
        """The tables with every entry that a query at `position` may not need replaced by a hole."""
        return {
            group.name: [
                page if index >= first_page(group, position, PAGE) else -1
                for index, page in enumerate(tables[group.name])
            ]
            for group in self.subject.model.identity.layout.groups
        }
