"""Run claims by name: `python -m prove 2-demo` one, `python -m prove 2` every claim of that issue.

A claim is a module `prove/p<issue>_<slug>.py` with `CLAIM` and `async def run(size: Size) -> Outcome`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path

from prove.report import Size, write

HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    """Every claim there is, by issue and then by name."""
    return sorted(path.stem[1:].replace("_", "-") for path in HERE.glob("p[0-9]*_*.py"))


def module_of(name: str) -> str:
    """`2-decode-speed` → `prove.p2_decode_speed`."""
    return "prove.p" + name.replace("-", "_")


def main(arguments: list[str]) -> int:
    """Entry point: exit status 0 when every claim passed."""
    wanted = [name for name in names() if any(name == a or name.startswith(a + "-") for a in arguments)]
    if not wanted:
        print(f"no claim is called {' '.join(arguments) or '(nothing)'}; there are:", *names(), sep="\n  ")
        return 2
    failed = 0
    for name in wanted:
        module = importlib.import_module(module_of(name))
        began = time.monotonic()
        print(f"— {name}: {module.CLAIM.text}", flush=True)
        outcome = asyncio.run(module.run(Size.FULL))
        path = write(module.CLAIM, outcome)
        failed += not outcome.passed
        verdict = "pass" if outcome.passed else "FAIL"
        print(
            f"  {verdict} in {time.monotonic() - began:.0f} s: {outcome.figure} against {outcome.limit} → {path.name}"
        )
    print(f"{len(wanted) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
