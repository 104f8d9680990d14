"""cli/reference.py kept running for a whole session: the judge costs its imports once, not once a test."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cli.demo.exact import REFERENCE, Case, Verdict
from prove.processes import started

_WITHIN_S = 60.0


class Oracle:
    """Transformers' own forward, in a process that has none of Segue's code."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def judge(self, cases: Sequence[Case]) -> dict[str, Verdict]:
        """Verdicts by case id, as `cli.demo.exact.judge`."""
        assert len({one.id for one in cases}) == len(cases), "ids of cases must differ"
        found = {}
        async with self._turn, asyncio.timeout(_WITHIN_S):
            for one in cases:
                found[one.id] = await self._verdict(one)
        return found

    async def inexact(self, cases: Sequence[Case]) -> list[str]:
        """The cases of which the reference would have given another token, with how far off they are."""
        verdicts = await self.judge(cases)
        return [f"{v.id}: gap {v.max_gap:g}, {v.mismatches} other draws" for v in verdicts.values() if not v.exact]

    async def _verdict(self, one: Case) -> Verdict:
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None and sink is not None
        asked = {
            "id": one.id,
            "tokens": [*one.tokens],
            "generated": [*one.generated],
            "sampling": {**one.sampling} if one.sampling else {},
        }
        source.write(json.dumps(asked).encode() + b"\n")
        await source.drain()
        line = await sink.readline()
        assert line, "the reference has ended"
        v = json.loads(line)
        return Verdict(v["id"], v["tokens"], v["max_gap"], v["argmax"], len(v["mismatches"]))


@asynccontextmanager
async def oracle(folder: Path) -> AsyncIterator[Oracle]:
    """Of one model folder."""
    argv = [sys.executable, "-I", str(REFERENCE), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    async with started(argv, env=env, talk=True) as process:
        yield Oracle(process)
