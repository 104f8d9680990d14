"""How fast the disk and the object-store tiers are: beside the bare S3 client, and beside another project's bench.

The bare client reads the same object with the same number of connections in ranges of the same size, in turns with
ours (A B A B); how far its own rounds differ is the noise. `lmcache bench l2` then stores and loads as many objects of
the same size in a folder of the same file system. Its S3 adapter addresses buckets by host name, so it is played only
where such names resolve.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from minio import Minio
from pydantic import JsonValue

from cli.embedded.children import Supervisor
from cli.embedded.seaweed import SeaweedServer
from libs.chunks.local import LocalDirectory
from libs.chunks.object_store import Bucket, ObjectStore
from libs.continuation.keys import ObjectKey
from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "4-tiers-speed",
    "S3 get of 64 MB at >= 0.7 of the same client's raw parallel get; local and S3 tiers beside `lmcache bench l2` on "
    "the same directory and server",
    seed=49,
)
SHARE = 0.7
PEER = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "lmcache"
_CONNECTIONS, _RANGE = 8, 4 << 20
_KEYS, _KIB = 16, 1_024
_WITHIN_S = 120.0


@dataclass
class Found:
    """Seconds a get; MB/s of ours and the other's."""

    ours_s: list[float] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    peer: dict[str, float] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Our rate over the bare client's."""
        return statistics.median(self.raw_s) / statistics.median(self.ours_s)

    @property
    def noise(self) -> float:
        """The bare client's even rounds over its odd ones, the larger way round."""
        even, odd = statistics.median(self.raw_s[::2]), statistics.median(self.raw_s[1::2])
        return max(even, odd) / min(even, odd)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice reads a small object and leaves the other project out."""
    full, found = size is Size.FULL, Found()
    size_of, rounds = ((64 << 20), 15) if full else ((9 << 20), 2)
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-tiers-")))
        if stage is not None:
            server = stage.cluster.s3_server
        else:
            server = SeaweedServer.in_dir(scratch / "s3")
            await (await stack.enter_async_context(Supervisor())).start(server.spec())
        await asyncio.to_thread(_gets, server, size_of, rounds, found)
        await asyncio.to_thread(_tiers, server, scratch / "ours", found)
        if full:
            (scratch / "theirs").mkdir()
            await _other(scratch / "theirs", found)
    return judged(found, timed=full)


def _key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "cd" * 16, f"{number:064x}", "full-kv1-d64-float32", f"{number:064x}")


def _gets(server: SeaweedServer, size: int, rounds: int, found: Found) -> None:
    """One object, read by both in turns."""
    body = memoryview(os.urandom(size))
    store = ObjectStore(
        Bucket(server.endpoint, server.bucket, server.access_key, server.secret_key), connections=_CONNECTIONS,
        range_bytes=_RANGE,
    )  # fmt: skip
    raw = Minio(server.endpoint, server.access_key, server.secret_key, secure=False, region="us-east-1")
    key = _key(1)
    try:
        store.put(key, [body], within=_WITHIN_S)
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            for number in range(rounds + 1):
                ours = _timed(lambda: store.get(key, size, within=_WITHIN_S).release())
                bare = _timed(lambda: _raw_get(raw, server.bucket, key.text, size, threads))
                if number:  # the first one opens the connections
                    found.ours_s.append(ours)
                    found.raw_s.append(bare)
            held = store.get(key, size, within=_WITHIN_S)
            assert held.data == body
            held.release()
    finally:
        store.close()


def _raw_get(client: Minio, bucket: str, key: str, size: int, threads: ThreadPoolExecutor) -> None:
    """As plain as it can be: ranges into one buffer, nothing checked."""
    into = memoryview(bytearray(size))

    def one(start: int) -> None:
        end = min(size, start + _RANGE)
        reply = client.get_object(bucket, key, offset=start, length=end - start)
        try:
            into[start:end] = reply.read()
        finally:
            reply.close()
            reply.release_conn()

    list(threads.map(one, range(0, size, _RANGE)))


def _tiers(server: SeaweedServer, folder: Path, found: Found) -> None:
    """As many objects of the size that the other bench uses, stored and loaded by both of our tiers."""
    bodies = [memoryview(os.urandom(_KIB << 10)) for _ in range(_KEYS)]
    mb = _KEYS * (_KIB << 10) / 1e6
    local = LocalDirectory(folder, cap=1 << 30, keep_free=0)
    store = ObjectStore(Bucket(server.endpoint, server.bucket, server.access_key, server.secret_key))
    try:
        with ThreadPoolExecutor(4) as threads:
            for name, tier in (("disk", local), ("s3", store)):
                stores, loads = [], []
                for turn in range(4):
                    keys = [_key(1_000 * (turn + 1) + number) for number in range(_KEYS)]
                    put = lambda pair, tier=tier: tier.put(pair[0], [pair[1]], within=_WITHIN_S)  # noqa: E731
                    get = lambda key, tier=tier: bytes(tier.get(key, _KIB << 10, within=_WITHIN_S).data)  # noqa: E731
                    stores.append(_timed(lambda p=put, k=keys: list(threads.map(p, zip(k, bodies, strict=True)))))
                    loads.append(_timed(lambda g=get, k=keys: list(threads.map(g, k))))
                found.rates |= {
                    f"{name} store": round(mb / statistics.median(stores), 1),
                    f"{name} load": round(mb / statistics.median(loads), 1),
                }
    finally:
        local.close()
        store.close()


async def _other(folder: Path, found: Found) -> None:
    """`lmcache bench l2` over a folder, and its S3 adapter where host names of buckets resolve."""
    if not PEER.exists():
        found.unsupported.append("lmcache is not installed: `make peers`")
        return
    adapter = json.dumps({"type": "fs", "base_path": str(folder)})
    argv = [str(PEER), "bench", "l2", "--l2-adapter", adapter, "--num-keys", f"{_KEYS}", "--data-size-kb", f"{_KIB}"]
    done = await finished(
        [*argv, "--rounds", "4", "--format", "json", "--output", str(folder.with_suffix(".json"))], _WITHIN_S,
        env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
    )  # fmt: skip
    report = folder.with_suffix(".json")
    if done.code or not report.exists():
        found.unsupported.append(f"lmcache ended with {done.code}: {done.last_line[:200]}")
        return
    found.peer = rates(json.loads(report.read_text()))
    try:
        socket.getaddrinfo("segue.localhost", 80)
    except OSError:
        found.unsupported.append("lmcache's S3 adapter: no name BUCKET.HOST resolves on this machine")


def rates(report: dict[str, dict[str, dict[str, JsonValue]]]) -> dict[str, float]:
    """MB/s by operation."""
    operations = [one for name, one in report["metrics"].items() if name.startswith("op_")]
    return {
        f"disk {str(one['operation']).lower()}": float(str(one["throughput_avg_mbps"]))
        for one in operations
        if one["operation"] in ("Store", "Load")
    }


def _timed(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def judged(found: Found, *, timed: bool) -> Outcome:
    """The share of the bare client's rate; the other's figures beside ours."""
    checks = Checks()
    checks.check("rounds", len(found.ours_s), ">= 1", len(found.ours_s) >= 1)
    if timed:
        slower, limit = 1 / found.share, max(1 / SHARE, found.noise)
        checks.check("our time over the bare client's", round(slower, 3), f"<= {round(limit, 3)}", slower <= limit)
        checks.check("figures of lmcache beside ours", [*found.peer], "store and load", len(found.peer) == 2)
    details: dict[str, JsonValue] = {
        "share_of_raw": round(found.share, 3),
        "noise": round(found.noise, 3) if len(found.raw_s) > 1 else None,
        "mb_per_s": {**found.rates},
        "lmcache_mb_per_s": {**found.peer},
        "unsupported here": [*found.unsupported],
    }
    return checks.outcome(details)
