"""Teacher forcing by `cli/reference.py`: transformers' own forward, in a process without Segue's code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parent.parent / "reference.py"
GREEDY_GAP = 1e-4
"""Largest distance of a greedy token's logit from the largest, fp32."""
ARGMAX_SHARE = 0.999
DRAW_TIE = 5e-5
"""A draw whose uniform lies so close to the edge of a token's interval is a tie: a logit gap of 1e-4 may move it."""
_WITHIN_S = 1_800.0


class ReferenceFailedError(RuntimeError):
    """The reference process ended with an error."""


@dataclass(frozen=True)
class Case:
    """A prompt and what was delivered for it. `sampling` as in cli/reference.py; None = greedy."""

    id: str
    tokens: Sequence[int]
    generated: Sequence[int]
    sampling: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the reference found."""

    id: str
    tokens: int
    max_gap: float
    argmax: int
    mismatches: int

    @property
    def exact(self) -> bool:
        """Every greedy token within the float tie; every draw the same."""
        return self.max_gap <= GREEDY_GAP and self.mismatches == 0


async def judge(folder: Path, cases: Sequence[Case]) -> dict[str, Verdict]:
    """Verdicts by case id. Raises ReferenceFailedError."""
    lines = [
        json.dumps(
            {"id": c.id, "tokens": list(c.tokens), "generated": list(c.generated), "sampling": dict(c.sampling or {})}
        )
        for c in cases
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", str(REFERENCE), str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_WITHIN_S):
            out, noise = await process.communicate(("\n".join(lines) + "\n").encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ReferenceFailedError(noise.decode(errors="replace")[-2_000:])
    found = [json.loads(line) for line in out.splitlines()]
    return {
        v["id"]: Verdict(v["id"], v["tokens"], v["max_gap"], v["argmax"], sum(map(_differs, v["mismatches"])))
        for v in found
    }


def all_exact(verdicts: Sequence[Verdict]) -> bool:
    """Each exact, and nearly all greedy tokens the argmax itself."""
    judged = sum(v.tokens for v in verdicts)
    return all(v.exact for v in verdicts) and sum(v.argmax for v in verdicts) >= ARGMAX_SHARE * judged


def _verdict(found: Mapping[str, Any]) -> Verdict:
    mismatches = sum(map(_differs, found["mismatches"]))
    return Verdict(found["id"], found["tokens"], found["max_gap"], found["argmax"], mismatches)


def _differs(mismatch: Mapping[str, float]) -> bool:
    """Another draw than the reference's, and no tie; NaN (a greedy choice after penalties) is never one."""
    return not mismatch["distance"] <= DRAW_TIE
