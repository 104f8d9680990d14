"""The cases RAM and peer, played on the tiny model over real stores: exact, and seen when they were not taken."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from prove.judging import Judge
from prove.paths import History
from prove.prose import Prose
from prove.stores import s3_settings
from prove.worker_bench import Backing, Bench
from prove.worker_cases import Player
from tests.catalog.rig import running, settings


@pytest.fixture
async def backing(folder, etcd_server, s3_server, tmp_path) -> AsyncIterator[Backing]:
    prefix = f"claims-{secrets.token_hex(6)}/"
    async with running(settings(etcd_server.endpoint, s3_server, prefix)) as catalog:
        yield Backing(folder, catalog.target, s3_settings(s3_server), tmp_path, own=True)


async def test_ram_and_peer(backing: Backing) -> None:
    values = {"lanes": 2, "threads": 1}
    async with (
        Bench(backing.folder, {**values, "kv_bytes": 48 << 20}, backing) as bench,
        Bench(backing.folder, {**values, "kv_bytes": 3 << 20}, backing) as tight,
    ):
        player = Player(bench, tight, Prose(backing.folder, 7), 8)
        first = await player._cold(513)
        await player._peer(513, first, bench.chunk_dir)
        await player._memory(513)
        cases = {case.case: case for case in player.cases}
        assert not [why for case in player.cases for why in case.played.missed]
        assert set(cases["peer"].bytes_by_tier) == {"gpu", "peer"} and set(cases["RAM"].bytes_by_tier) == {"gpu", "ram"}
        assert cases["peer"].restored_tokens == cases["RAM"].restored_tokens == 512
        groups = {str(number): [case.played.generation(number)] for number, case in enumerate(player.cases)}
        judged = await Judge(backing.folder, 1).judge_groups(groups)
        assert all(tally.exact for tally in judged.values())


async def test_a_peer_that_has_nothing_is_a_path_not_taken(backing: Backing) -> None:
    async with Bench(backing.folder, {"lanes": 2, "threads": 1, "kv_bytes": 48 << 20}, backing) as bench:
        player = Player(bench, bench, Prose(backing.folder, 8), 8)
        first = await player._cold(512)
        origin = bench.chunk_dir
        await bench.restart(fresh_directory=True)
        for path in (origin / "v1").rglob("*.safetensors"):
            path.unlink()
        await player._peer(512, History(first.tokens, first.salt, first.nodes), origin)
        missed = player.cases[-1].played.missed
        assert any("restored tokens is 0" in why for why in missed)
        # Computed instead, so that the answer is right all the same.
        groups = {"0": [player.cases[-1].played.generation(0)]}
        assert (await Judge(backing.folder, 1).judge_groups(groups))["0"].exact
