"""One suite for every tier, against a real S3 server and real sockets, and the catalog's own against a real etcd."""

from __future__ import annotations

from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.suites import judge, suite

CLAIM = Claim(
    "4-conformance",
    "the conformance suite green for all tiers, and the catalog's, against a real etcd and a real S3 server",
    seed=40,
)
TIERS = ("memory", "local", "peer", "object_store")
_WITHIN_S = 1_200.0


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice is one test of it on the near tiers."""
    del stage
    checks = Checks()
    if size is Size.SLICE:
        ran = await suite(["tests/chunks/test_conformance.py"], _WITHIN_S, only="what_is_put and (memory or local)")
        judge(checks, ran, 1)
        return checks.outcome()
    ran = await suite(["tests/chunks"], _WITHIN_S)
    judge(checks, ran, 60)
    by_tier = {tier: sum("test_conformance" in name and f"[{tier}" in name for name in ran.passed) for tier in TIERS}
    for tier, count in by_tier.items():
        checks.check(f"conformance of {tier}", count, ">= 8", count >= 8)
    judge(checks, await suite(["tests/catalog"], _WITHIN_S), 150)
    return checks.outcome({"by_tier": {**by_tier}})
