"""How fast the disk and the object-store tiers are: beside the bare S3 client, and beside another project's bench.

The bare client reads the same object with the same number of connections in ranges of the same size, in turns with
ours (A B A B); how far its own rounds differ is the noise. `lmcache bench l2` then stores and loads as many objects of
the same size in a folder of the same file system, and in the same S3 server. Its S3 adapter addresses a bucket by host
name: where BUCKET.localhost does not resolve by itself, a wrapper of the resolver (nss_wrapper) says where it is.
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
from contextlib import AsyncExitStack, suppress
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
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers"
PEER = PEERS / "bin" / "lmcache"
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
            await _others(server, scratch / "theirs", found)
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


async def _others(server: SeaweedServer, folder: Path, found: Found) -> None:
    """`lmcache bench l2` over a folder and over the S3 server."""
    if not PEER.exists():
        found.unsupported.append("lmcache is not installed: `make peers`")
        return
    await _other("disk", {"type": "fs", "base_path": str(folder)}, folder.with_suffix(".disk.json"), {}, found)
    host = f"{server.bucket}.localhost"
    env = await asyncio.to_thread(_resolving, host, folder.with_suffix(".hosts"))
    if env is None:
        found.unsupported.append(f"lmcache's S3 adapter: {host} does not resolve, and nss_wrapper is not installed")
        return
    adapter: dict[str, JsonValue] = {
        "type": "s3", "s3_endpoint": f"{host}:{server.s3_port}", "s3_region": "us-east-1", "disable_tls": True,
        "s3_prefer_http2": False, "s3_num_io_threads": _CONNECTIONS, "aws_access_key_id": server.access_key,
        "aws_secret_access_key": server.secret_key,
    }  # fmt: skip
    await _other("s3", adapter, folder.with_suffix(".s3.json"), env, found)


async def _other(name: str, adapter: dict[str, JsonValue], report: Path, env: dict[str, str], found: Found) -> None:
    """One of its adapters; its report becomes figures, or a reason why there are none."""
    argv = [str(PEER), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", f"{_KEYS}"]
    done = await finished(
        [*argv, "--data-size-kb", f"{_KIB}", "--rounds", "4", "--format", "json", "--output", str(report)], _WITHIN_S,
        env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", **env},
    )  # fmt: skip
    text = "" if done.code else await asyncio.to_thread(report.read_text)
    if not text:
        found.unsupported.append(f"lmcache's {name} adapter ended with {done.code}: {done.last_line[:200]}")
        return
    found.peer |= rates(name, json.loads(text))


def _resolving(host: str, hosts: Path) -> dict[str, str] | None:
    """What a process needs in its environment so that the name leads to this machine; None where nothing helps."""
    with suppress(OSError):
        socket.getaddrinfo(host, 80)
        return {}
    for wrapper in PEERS.glob("nss/usr/lib/*/libnss_wrapper.so"):
        hosts.write_text(f"127.0.0.1 localhost {host}\n")
        return {"LD_PRELOAD": str(wrapper), "NSS_WRAPPER_HOSTS": str(hosts)}
    return None


def rates(name: str, report: dict[str, dict[str, dict[str, JsonValue]]]) -> dict[str, float]:
    """MB/s by operation of one adapter."""
    operations = [one for at, one in report["metrics"].items() if at.startswith("op_")]
    return {
        f"{name} {str(one['operation']).lower()}": float(str(one["throughput_avg_mbps"]))
        for one in operations
        if one["operation"] in ("Store", "Load") and one["total_success"] == one["total_keys"]
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
        checks.check("figures of lmcache beside ours", [*found.peer], "both tiers, both ways", len(found.peer) == 4)
    details: dict[str, JsonValue] = {
        "share_of_raw": round(found.share, 3),
        "noise": round(found.noise, 3) if len(found.raw_s) > 1 else None,
        "mb_per_s": {**found.rates},
        "lmcache_mb_per_s": {**found.peer},
        "unsupported here": [*found.unsupported],
    }
    return checks.outcome(details)
