"""Killed at every step of publishing, promoting and collecting, and started again: no fact without bytes, ever.

The steps are those the tests enumerate: every call of a worker that writes a file, an object, a fact or a replica,
before and after it, and every step of a collection; each with a real process that ends there by SIGKILL, a real etcd
and a real S3 server. The tests hold each fact against the bytes after the death, and again after the second run.
"""

from __future__ import annotations

from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.suites import judge, suite
from services.catalog.collect.run import Step
from tests.worker_storage.test_crash_points import POINTS

CLAIM = Claim(
    "4-crash",
    "a real process killed at every step of publish, promote and GC, restarted: no fact without bytes; orphans found",
    seed=41,
)
_WORKER, _COLLECT = "tests/worker_storage/test_crash_points.py", "tests/catalog/test_collect_crash.py"
_WITHIN_S = 1_200.0


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice is one death."""
    del stage
    checks = Checks()
    if size is Size.SLICE:
        ran = await suite([_WORKER], _WITHIN_S, only="test_killed_there and publish and before and 4")
        judge(checks, ran, 1)
        return checks.outcome()
    worker = await suite([_WORKER], _WITHIN_S)
    judge(checks, worker, len(POINTS) + 1)
    for what in ("publish", "promote"):
        points = sum(point[0] == what for point in POINTS)
        died = worker.count("test_killed_there", f"[{what}-")
        checks.check(f"{what}: steps killed at", died, f"{points}, >= 8", died == points >= 8)
    checks.check(
        "the check itself finds a planted fault",
        worker.count("ahead_of_its_bytes"),
        "1",
        worker.count("ahead_of_its_bytes") == 1,
    )
    collected = await suite([_COLLECT], _WITHIN_S)
    judge(checks, collected, 1)
    every = collected.count("killed_after_every_step")
    checks.check(f"collection: all {len(Step)} steps killed at, orphans found", every, "1", every == 1)
    return checks.outcome({"points": [f"{what} {when} {call} {nth}" for what, call, when, nth in POINTS]})
