"""`segue decisions` as a process against a running catalog: found by whatever one remembers, shown whole, replayed."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from tests.catalog.rig import Rig
from tests.decisions.worlds import of_world

ROOT = Path(__file__).resolve().parents[2]
NOW_MS = round(time.time() * 1_000)
LATELY = dt.datetime.fromtimestamp(NOW_MS / 1_000 - 150, dt.UTC).isoformat()
"""Before the newest three."""


class Shell:
    """Runs the command against one catalog."""

    def __init__(self, target: str) -> None:
        self.env = {**os.environ, "SEGUE_CATALOG": target, "COLUMNS": "250"}

    async def __call__(self, *arguments: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli", "decisions", *arguments, cwd=ROOT, env=self.env,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode == code, (arguments, out.decode(), err.decode())
        return out.decode() or err.decode()

    async def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(await self(*arguments, "--json", code=code))


@pytest.fixture
def segue(catalog: Rig) -> Shell:
    return Shell(catalog.target)


async def kept(catalog: Rig, count: int = 12) -> list[pb.DecisionRecord]:
    """Appended in two batches, a minute apart each, the newest now."""
    records = [record for seed in range(200) if (record := of_world(seed)) is not None][:count]
    for index, record in enumerate(records):
        record.decided_ms = NOW_MS - 60_000 * (count - 1 - index)
        record.request_id = f"{record.request_id}-{index}"
        # Another id is another order of near ties: ranked anew, as its router would have.
        _ranked_anew(record)
    for batch in (records[: count // 2], records[count // 2 :]):
        await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=batch))
    return records


def _ranked_anew(record: pb.DecisionRecord) -> None:
    from cli.decisions.replay import replay

    order = replay(record).order
    ranked, terms = list(record.ranked), list(record.terms)
    del record.ranked[:], record.terms[:]
    record.ranked.extend(ranked[i] for i in order)
    record.terms.extend(terms[i] for i in order)


async def test_decisions_are_listed_by_request_time_worker_and_reason(catalog: Rig, segue: Shell) -> None:
    records = await kept(catalog)
    every = await segue.json("list")
    assert [one["request_id"] for one in every] == [record.request_id for record in reversed(records)]
    assert len(await segue.json("list", "--limit", "5")) == 5
    (one,) = await segue.json("list", "--request", records[3].request_id)
    assert one["request_id"] == records[3].request_id
    recent = await segue.json("list", "--since", LATELY)
    assert [found["request_id"] for found in recent] == [record.request_id for record in reversed(records[-3:])]
    assert len(await segue.json("list", "--until", LATELY)) == len(records) - 3
    worker = records[0].ranked[records[0].attempts[-1].choice].worker
    of_worker = {found["request_id"] for found in await segue.json("list", "--worker", worker)}
    assert of_worker == {r.request_id for r in records if worker in {r.ranked[a.choice].worker for a in r.attempts}}
    declined = {record.request_id for record in records if len(record.attempts) == 2}
    assert {found["request_id"] for found in await segue.json("list", "--reason", "queue-full")} == declined
    assert {found["request_id"] for found in await segue.json("list", "--reason", "declined")} == declined
    assert await segue.json("list", "--reason", "worker-lost") == []
    table = await segue("list")
    assert all(record.request_id in table for record in records) and "declined (queue-full), completed" in table
    assert "is no reason" in await segue("list", "--reason", "nonsense", code=1)
    assert "is no time" in await segue("list", "--since", "nonsense", code=1)


async def test_one_is_shown_with_every_term_of_every_candidate(catalog: Rig, segue: Shell) -> None:
    records = await kept(catalog)
    wanted = max(records, key=lambda record: len(record.ranked))
    (shown,) = await segue.json("show", wanted.request_id)
    assert len(shown["ranked"]) == len(wanted.ranked) > 1
    for row, terms, candidate in zip(shown["ranked"], wanted.terms, wanted.ranked, strict=True):
        for name in ("queue_ms", "load_ms", "restore_ms", "prefill_ms_per_token", "first_token_ms", "ttft_ms"):
            assert row[name] == getattr(terms, name)
        assert (row["compute_tokens"], row["worker"]) == (candidate.compute_tokens, candidate.worker)
        total = (
            max(row["queue_ms"], row["load_ms"])
            + row["restore_ms"]
            + row["compute_tokens"] * row["prefill_ms_per_token"]
            + row["first_token_ms"]
        )
        assert row["ttft_ms"] == pytest.approx(total)
    assert shown["attempts"][-1]["measured_ttft_ms"] > 0 and shown["facts_revision"] == 5
    text = await segue("show", wanted.request_id)
    assert text.count("→") == len(wanted.attempts) and "revision 5" in text
    assert all(f"{candidate.ttft_ms:.1f}" in text for candidate in wanted.ranked)
    assert "nobody" in await segue("show", "nobody", code=1)
    assert "no plan 7" in await segue("show", wanted.request_id, "--plan", "7", code=1)


async def test_replay_agrees_and_notices_what_the_policy_would_not_do(catalog: Rig, segue: Shell) -> None:
    records = await kept(catalog)
    assert "1 replayed, 0 different" in await segue("replay", records[0].request_id)
    said = await segue.json("replay", "--all")
    assert said == {"replayed": len(records), "skipped": {}, "different": []}
    assert (await segue.json("replay", "--all", "--since", LATELY))["replayed"] == 3

    # What a router with another policy would have recorded: its second choice first.
    other = pb.DecisionRecord()
    other.CopyFrom(max(records, key=lambda record: record.terms[-1].ttft_ms - record.terms[0].ttft_ms))
    other.request_id, other.decided_ms = "other-policy", NOW_MS
    _ranked_anew(other)
    other.ranked.reverse()
    other.terms.reverse()
    older = pb.DecisionRecord()
    older.CopyFrom(records[0])
    older.request_id = "older-router"
    older.ClearField("terms")
    await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[other, older]))
    text = await segue("replay", "other-policy", code=1)
    assert "would choose" in text and "1 replayed, 1 different" in text
    said = await segue.json("replay", "--all", code=1)
    assert said["replayed"] == len(records) + 1 and sum(said["skipped"].values()) == 1
    (different,) = said["different"]
    assert different["request_id"] == "other-policy" and different["would_choose"] == len(other.ranked) - 1
    assert "full precision" in await segue("replay", "older-router", code=1)


async def test_wrong_usage_is_said(segue: Shell) -> None:
    await segue("replay", code=2)
    await segue("replay", "some", "--all", code=2)
    await segue("replay", "some", "--since", "1h", code=2)
    segue.env["SEGUE_CATALOG"] = "127.0.0.1:1"
    assert (await segue("list", code=1)).startswith("segue decisions: catalog at 127.0.0.1:1")
