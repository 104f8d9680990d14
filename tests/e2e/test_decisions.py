"""A request through the router on real workers, then found, shown and replayed with `segue decisions`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc.aio

from libs.continuation.tenancy import DEFAULT_TENANT, salt
from libs.contracts.segue.v1 import common_pb2, router_pb2, router_pb2_grpc
from prove.stage import Stage
from tests.e2e.chats import complete, prompt

ROOT = Path(__file__).resolve().parents[2]
_APPENDED_S = 30.0


async def segue(stage: Stage, *arguments: str) -> tuple[int, Any]:
    """(exit code, the document it printed) of `segue decisions`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "decisions", *arguments, "--json", cwd=ROOT,
        env={**os.environ, "SEGUE_CATALOG": stage.cluster.catalog_target},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, json.loads(out) if out else err.decode()


async def listed(stage: Stage, request_id: str) -> list[dict[str, Any]]:
    """Its decisions, once they are there: routers append them in batches."""
    async with asyncio.timeout(_APPENDED_S):
        while True:
            code, found = await segue(stage, "list", "--request", request_id, "--since", "10m")
            assert code == 0, found
            if found:
                return list(found)
            await asyncio.sleep(0.2)


async def test_a_requests_decision_is_listed_shown_and_replayed(stage: Stage) -> None:
    secret = (stage.cluster.spec.state / "tenant.secret").read_text().strip()
    ids = prompt(300, seed=4_711)
    request = common_pb2.GenerationRequest(
        request_id="decided-by-hand", tenant=DEFAULT_TENANT, tenant_salt=salt(DEFAULT_TENANT, bytes.fromhex(secret)),
        model=stage.model, tokens=ids, output_start=len(ids), max_new_tokens=8, deadline_ms=60_000,
    )  # fmt: skip
    async with grpc.aio.insecure_channel(stage.cluster.router_target) as channel:
        router: Any = router_pb2_grpc.RouterStub(channel)
        events = [event async for event in router.Generate(router_pb2.GenerateRequest(request=request), timeout=60)]
    served = events[-1].completed.served
    (row,) = await listed(stage, request.request_id)
    assert (row["worker"], row["prompt_tokens"]) == (served.worker, len(ids))
    assert row["attempts"][-1]["outcome"] == "completed" and row["attempts"][-1]["measured_ttft_ms"] > 0
    assert {one["worker"] for one in row["ranked"]} == set(stage.cluster.workers)
    assert secret not in json.dumps(row) and request.tenant_salt not in json.dumps(row) and "tenant" not in row

    code, shown = await segue(stage, "show", request.request_id)
    assert (code, shown) == (0, [row])
    assert await segue(stage, "replay", request.request_id) == (0, {"replayed": 1, "skipped": {}, "different": []})


async def test_what_the_policy_decided_lately_it_would_decide_again(stage: Stage) -> None:
    """Cold, resident and restored; greedy on two workers: whatever the cluster has seen so far, and some more."""
    answers = await asyncio.gather(*(complete(stage, prompt(40 + 90 * n, seed=900 + n % 3), 8) for n in range(8)))
    await listed(stage, answers[-1].served.request_id)
    code, said = await segue(stage, "replay", "--all")
    assert code == 0 and not said["different"] and not said["skipped"], said
    assert said["replayed"] >= len(answers)
