"""Run claims by name: `python -m prove 2-demo` one, `python -m prove 2` every claim of that issue.

A claim is a module `prove/p<issue>_<slug>.py` with `CLAIM` and `async def run(size, stage) -> Outcome` (ClaimProgram).
At `Size.FULL` it makes whatever it needs itself and `stage` is None; at `Size.SLICE` it plays on the given stage, the
tiny cluster of the end-to-end tests, and takes seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, cast

from prove.report import Claim, Outcome, Size, write
from prove.stage import Stage

HERE = Path(__file__).resolve().parent


class ClaimProgram(Protocol):
    """What a claim's module holds."""

    CLAIM: Claim

    def run(self, size: Size, stage: Stage | None) -> Awaitable[Outcome]:
        """Finds out."""
        ...


def names() -> list[str]:
    """Every claim there is, by issue and then by name."""
    return sorted(path.stem[1:].replace("_", "-") for path in HERE.glob("p[0-9]*_*.py"))


def program(name: str) -> ClaimProgram:
    """`2-speed` → the module `prove.p2_speed`."""
    return cast(ClaimProgram, importlib.import_module("prove.p" + name.replace("-", "_")))


def main(arguments: list[str]) -> int:
    """Entry point: exit status 0 when every claim passed."""
    wanted = [name for name in names() if any(name == a or name.startswith(a + "-") for a in arguments)]
    if not wanted:
        print(f"no claim is called {' '.join(arguments) or '(nothing)'}; there are:", *names(), sep="\n  ")
        return 2
    failed = 0
    for name in wanted:
        claim = program(name)
        began = time.monotonic()
        print(f"— {name}: {claim.CLAIM.text}", flush=True)
        try:
            outcome = asyncio.run(_run(claim))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print(f"  {name} was interrupted")
            return 130
        except Exception as error:
            # A claim that could not be tried has failed; the others still get their turn.
            traceback.print_exc()
            outcome = Outcome(f"{type(error).__name__}: {error}", "a result", passed=False)
        path = write(claim.CLAIM, outcome)
        failed += not outcome.passed
        verdict = "pass" if outcome.passed else "FAIL"
        print(
            f"  {verdict} in {time.monotonic() - began:.0f} s: {outcome.figure} against {outcome.limit} → {path.name}"
        )
    print(f"{len(wanted) - failed} passed, {failed} failed")
    return 1 if failed else 0


async def _run(claim: ClaimProgram) -> Outcome:
    this = asyncio.current_task()
    assert this is not None
    # As Ctrl-C: a claim that is told to end takes its clusters and commands with it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await claim.run(Size.FULL, None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
