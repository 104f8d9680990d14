"""A process that forks workers' storages and lets them be killed in the middle of a step. Run by test_crash_points.

It has imported everything and started nothing when it forks, so that a child is there at once. It reads jobs, one JSON
object a line: what to play ("publish" or "promote"), the folder, the stores, and at which step to die; it answers how
the child ended, and why where it failed. A child dies by SIGKILL from its own hand, before or after the named call:
nothing is flushed, closed or told.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libs.chunks import directory_files, local, object_store
from libs.chunks.object_store import Bucket
from services.worker.checkpoint import facts
from services.worker.placement import promoter
from tests.catalog.rig import until
from tests.worker_storage.rig import Model, draw_tokens, worker

TOKENS = draw_tokens(2 * 256 + 48, seed=71)
CALLS: dict[str, tuple[Any, str]] = {
    "temporary": (directory_files.DirectoryFiles, "write_temporary"),
    "rename": (directory_files.DirectoryFiles, "publish"),
    "sync": (local, "sync_folder"),
    "put": (object_store.ObjectStore, "_put_if_absent"),
    "get": (object_store.ObjectStore, "get"),
    "publish": (facts.CatalogFacts, "publish"),
    "replicas": (facts.CatalogFacts, "set_replicas"),
    "withdraw": (promoter.Promoter, "_withdraw"),
}
STEPS = {
    "publish": ("temporary", "rename", "sync", "put", "publish"),
    "promote": ("get", "temporary", "rename", "sync", "replicas", "withdraw"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(call: str, when: str, nth: int) -> None:
    """The nth such call is the last thing that happens, or the last that does not."""
    owner, name = CALLS[call]
    real: Callable[..., Any] = getattr(owner, name)
    seen = 0

    def due() -> bool:
        nonlocal seen
        seen += 1
        return seen == nth

    if asyncio.iscoroutinefunction(real):

        async def coroutine(*args: Any, **kw: Any) -> Any:
            now = due()
            if now and when == "before":
                die()
            result = await real(*args, **kw)
            if now:
                die()
            return result

        setattr(owner, name, coroutine)
        return

    def function(*args: Any, **kw: Any) -> Any:
        now = due()
        if now and when == "before":
            die()
        result = real(*args, **kw)
        if now:
            die()
        return result

    setattr(owner, name, function)


async def play(job: dict[str, Any]) -> None:
    model = Model(fingerprint=job["fingerprint"], salt=job["salt"])
    bucket = Bucket(**job["bucket"])
    async with worker(model, Path(job["folder"]), bucket, job["catalog"], seed=1) as bench:
        if job["what"] == "publish":
            ranges = model.ranges(TOKENS)
            bench.pool.hold(ranges)
            if (left := await bench.checkpoint(ranges, 60.0)) != 0:
                raise SystemExit(f"{left} ranges are not published: {bench.storage.counts.checkpoint}")
        else:
            counts = bench.storage.counts
            await until(lambda: counts.directory.files == job["objects"])
            await until(lambda: counts.placement.met + counts.placement.complete > 0)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        said, says = os.pipe()
        child = os.fork()
        if child == 0:
            if job.get("call"):
                arm(job["call"], job["when"], job["nth"])
            try:
                asyncio.run(play(job))
            except BaseException as error:
                os.write(says, repr(error).encode())
                os._exit(3)
            os._exit(0)
        os.close(says)
        with os.fdopen(said, "rb") as words:
            why = words.read().decode()
        _, status = os.waitpid(child, 0)
        ended = "killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        print(f"{ended}: {why}" if why else ended, flush=True)


if __name__ == "__main__":
    main()
