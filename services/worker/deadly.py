"""A test hook: a prompt that kills its worker, as a request does that runs into a bug below Python.

Off unless the setting `crash_on` names a token sequence. Then a request whose prompt has that sequence in it ends this
process with SIGKILL at its first prefill: with the first step of it computed, before anything of it is told. It stands
in for what cannot be had on demand (a fault in a driver or a kernel), so that the cluster's answer to it can be tried.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from libs.controller.protocol import AssignmentId
from services.worker.handlers import Job, JobEvent, JobPages, JobStart, QueueState, Runtime


class DeadlyRuntime:
    """A `handlers.Runtime` around another one. `sequence`: token ids, at least one."""

    def __init__(self, runtime: Runtime, sequence: Sequence[int]) -> None:
        self._runtime, self._sequence = runtime, tuple(sequence)

    def start(self, sink: Callable[[Sequence[JobEvent]], None]) -> None:
        """See Runtime."""
        self._runtime.start(sink)

    def submit(self, job: Job) -> None:
        """See Runtime; the end of this process is set where the prompt asks for it."""
        request = job.request
        if has(request.tokens[: request.output_start], self._sequence):
            job = replace(job, pages=_DeadlyPages(job.pages))
        self._runtime.submit(job)

    def cancel(self, assignment: AssignmentId) -> None:
        """See Runtime."""
        self._runtime.cancel(assignment)

    def queue(self, coming: Sequence[int] = ()) -> QueueState:
        """See Runtime."""
        return self._runtime.queue(coming)

    async def warmup(self) -> None:
        """See Runtime."""
        await self._runtime.warmup()

    async def aclose(self) -> None:
        """See Runtime."""
        await self._runtime.aclose()


class _DeadlyPages:
    """Pages of a job that must not be computed."""

    def __init__(self, pages: JobPages) -> None:
        self._pages = pages

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        return self._pages.tables

    def begin(self) -> JobStart:
        return self._pages.begin()

    def prepare(self, end: int) -> Sequence[str]:
        return self._pages.prepare(end)

    def computed(self, end: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        self._pages.computed(end)  # on the way out


def has(tokens: Sequence[int], sequence: Sequence[int]) -> bool:
    """Whether the sequence is somewhere in the tokens, in a row."""
    wanted, length = tuple(sequence), len(sequence)
    return any(tuple(tokens[at : at + length]) == wanted for at in range(len(tokens) - length + 1))
