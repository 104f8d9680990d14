"""Exactness of many generations: the reference's verdicts, with float ties told from wrong tokens.

Exact means what an uninterrupted run would have produced, up to a float tie: a greedy token whose logit lies within
1e-4 of the largest, or a draw that falls within 1e-4 of the boundary of the drawn token's interval. Such ties are
counted as *flips* and reported per 100,000 tokens; anything else is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from cli.demo.exact import REFERENCE
from libs.controller.protocol import TokenLogprobs
from prove.processes import started

TIE = 1e-4
_LINE_WITHIN_S = 120.0
_DOCKET = 4_096


@dataclass(frozen=True)
class Generation:
    """What was delivered for a prompt. `sampling` as in cli/reference.py; None = greedy."""

    id: str
    prompt: Sequence[int]
    output: Sequence[int]
    sampling: Mapping[str, object] | None = None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass
class Tally:
    """Verdicts added up."""

    generations: int = 0
    tokens: int = 0
    flips: int = 0
    wrong: list[str] = field(default_factory=list)
    largest_gap: float = 0.0
    logprob_gap: float = 0.0
    logprobs: int = 0

    @property
    def exact(self) -> bool:
        return self.generations > 0 and not self.wrong

    def figures(self) -> dict[str, JsonValue]:
        """For a report."""
        return {
            "generations": self.generations,
            "tokens": self.tokens,
            "flips": self.flips,
            "flips_per_100000": round(1e5 * self.flips / max(1, self.tokens), 2),
            "largest_gap": self.largest_gap,
            "logprobs": self.logprobs,
            "largest_logprob_gap": self.logprob_gap,
            "wrong": list(self.wrong[:20]),
        }

    def add(self, other: Tally) -> None:
        self.generations += other.generations
        self.tokens += other.tokens
        self.flips += other.flips
        self.wrong += other.wrong
        self.largest_gap = max(self.largest_gap, other.largest_gap)
        self.logprob_gap = max(self.logprob_gap, other.logprob_gap)
        self.logprobs += other.logprobs


class Judge:
    """The reference, kept running: transformers' own forward in a process without Segue's code."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self._argv = [sys.executable, "-I", str(REFERENCE), str(folder)]
        self._env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}

    async def judge(self, cases: Sequence[Generation]) -> Tally:
        """Verdicts on all of them. Raises RuntimeError where the reference ends early."""
        return (await self.judge_groups({"": cases}))[""]

    async def judge_groups(self, groups: Mapping[str, Sequence[Generation]]) -> dict[str, Tally]:
        """Verdicts by group, in one process."""
        async with self.court() as court:
            for name, cases in groups.items():
                for case in cases:
                    await court.submit(name, case)
            return await court.verdicts()

    @asynccontextmanager
    async def court(self) -> AsyncIterator[Court]:
        """The reference at work beside whoever submits cases."""
        async with started(self._argv, env=self._env, talk=True) as process, asyncio.TaskGroup() as tasks:
            court = Court(process)
            tasks.create_task(court.sit())
            try:
                yield court
            finally:
                court.close()


class Court:
    """Cases of several groups, judged in the order they came in, while more come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._cases: asyncio.Queue[tuple[str, Generation] | None] = asyncio.Queue(_DOCKET)
        self._judged = asyncio.Event()
        self._tallies: dict[str, Tally] = {}

    async def submit(self, group: str, case: Generation) -> None:
        """Waits while the docket is full."""
        self._tallies.setdefault(group, Tally())
        await self._cases.put((group, case))

    async def verdicts(self) -> dict[str, Tally]:
        """On all that was submitted; nothing may follow."""
        await self._cases.put(None)
        await self._judged.wait()
        return self._tallies

    async def sit(self) -> None:
        """Judges until the end is submitted. Raises RuntimeError where the reference ends early."""
        while (entry := await self._cases.get()) is not None:
            group, case = entry
            _count(self._tallies[group], case, await self._judge(case))
        self._judged.set()

    def close(self) -> None:
        """Ends `sit`, whatever is still on the docket."""
        while not self._cases.empty():
            self._cases.get_nowait()
        self._cases.put_nowait(None)

    async def _judge(self, case: Generation) -> Mapping[str, object]:
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None and sink is not None
        line = {
            "id": case.id,
            "tokens": list(case.prompt),
            "generated": list(case.output),
            "sampling": dict(case.sampling or {}),
            "logprobs": [[one.logprob, list(zip(one.top_ids, one.top_logprobs, strict=True))] for one in case.logprobs],
        }
        source.write(json.dumps(line).encode() + b"\n")
        await source.drain()
        async with asyncio.timeout(_LINE_WITHIN_S):
            said = await sink.readline()
        if not said:
            raise RuntimeError(f"the reference ended at {case.id}")
        verdict: dict[str, object] = json.loads(said)
        return verdict


def _count(tally: Tally, case: Generation, verdict: Mapping[str, object]) -> None:
    name, tokens = case.id, len(case.output)
    tally.generations += 1
    tally.tokens += tokens
    mismatches = verdict["mismatches"]
    assert isinstance(mismatches, list)
    if not case.sampling:
        gap = float(str(verdict["max_gap"]))
        tally.largest_gap = max(tally.largest_gap, gap)
        tally.flips += tokens - int(str(verdict["argmax"]))
        if gap > TIE:
            tally.wrong.append(f"{name}: a token {gap:g} below the largest logit")
    tally.flips += len(mismatches)
    far = [one for one in mismatches if not one["distance"] <= TIE]
    tally.wrong += [f"{name}: token {one['index']} is {one['token']}, not {one['expected']}" for one in far]
    if case.logprobs:
        gap = float(str(verdict["logprob_gap"]))
        tally.logprobs += len(case.logprobs)
        tally.logprob_gap = max(tally.logprob_gap, gap)
        if gap > TIE or len(case.logprobs) != tokens:
            tally.wrong.append(f"{name}: {len(case.logprobs)} log-probabilities of {tokens} tokens, {gap:g} off")
