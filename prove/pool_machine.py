"""The pool's state machine over its pure core, as a process: `python -m prove.pool_machine SEED EXAMPLES STEPS`.

Prints, as one line of JSON, what was reached, and the violation if there was one. `--planted NAME` runs it on a core in
which that bug of `tests/pool/test_invariants.py` is planted.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from typing import ClassVar
from unittest import mock

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from libs.pool.floor import Reason
from tests.pool.machine import PoolMachine
from tests.pool.test_invariants import _FULL, PLANTED

_BATCH = 100
"""Examples a seed: what is drawn first in a run is drawn widest."""


class Counted(PoolMachine):
    """Notes at the end of each example what it came to."""

    reached: ClassVar[Counter[str]] = Counter()

    @invariant()
    def noted(self) -> None:
        """What is only seen on the way."""
        if hasattr(self, "world"):
            books = self.world.core.books
            self.reached["steps"] += 1
            if any(target.reason is Reason.STAND_IN for target in books.targets.values()):
                self.reached["another endpoint stood in"] += 1
            self.reached["a stale writer was kept as a fallback"] += any(record.fallback for record in books.inventory)
            self.reached["a commit left something missing"] += bool(books.generations.left_missing)

    def teardown(self) -> None:
        """See the class."""
        if hasattr(self, "world"):
            self.note()
        super().teardown()

    def note(self) -> None:
        """Everything that has a count."""
        world, reached = self.world, self.reached
        told = world.core.snapshot(world.now)
        replaced = world.core.books.replacements.counts
        reached["examples"] += 1
        reached["routes"] += len(world.sessions)
        reached["tokens"] += sum(len(session.sent) for session in world.sessions)
        reached["payloads merged"] += world.registry.counters.merged
        for session in world.sessions:
            for closed in session.closes:
                reached[f"routes ended: {closed.reason.label}"] += 1
        for trigger, count in told.commits.items():
            reached[f"commits: {trigger}"] += count
        for move, count in told.removals.items():
            reached[f"removed: {move.value}"] += count
        reached["commits refused"] += self.watch.refused
        reached["replacements committed"] += replaced.committed
        reached["replacements restored"] += replaced.restored
        reached["shut down"] += self.over
        for name in (
            "dial_failures", "dials_stale", "flaps", "quarantines", "probes", "reconnects", "floor_switches",
            "pendings_expired", "pendings_superseded",
        ):  # fmt: skip
            reached[name] += getattr(told, name)


def play(start: int, examples: int, steps: int) -> str:
    """Examples in batches; the first violation, or nothing."""
    for batch in range(start, start + -(-examples // _BATCH)):
        left = min(_BATCH, examples - (batch - start) * _BATCH)
        chosen = settings(
            max_examples=left,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate),
        )
        try:
            run_state_machine_as_test(seed(batch)(type("Seeded", (Counted,), {})), settings=chosen)
        except Exception:
            return f"seed {batch}: {traceback.format_exc()[-60_000:]}"
    return ""


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("examples", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--planted", default="", choices=["", *PLANTED])
    given = parser.parse_args(arguments)
    if given.planted:
        owner, attribute, wrong = PLANTED[given.planted]
        _FULL.clear()
        with mock.patch.object(owner, attribute, wrong):
            violation = play(given.seed, given.examples, given.steps)
    else:
        violation = play(given.seed, given.examples, given.steps)
    print(json.dumps({"violation": violation, "reached": dict(sorted(Counted.reached.items()))}))


if __name__ == "__main__":
    main(sys.argv[1:])
