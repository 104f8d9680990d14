"""Two models in one cluster, and a name that stands for both: whose weights answer is always known, and never mixed.

The second model is the first one with other weights: same layers, same tokenizer, so that nothing but identity keeps
their chunks apart. Every answer is held against transformers' own forward with the weights whose fingerprint the router
named, and must differ from what the other's would have said.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from minio import Minio
from safetensors.numpy import load_file, save_file

from cli.embedded.children import Child
from cli.embedded.cluster import ClusterSpec, running
from cli.embedded.models import default_cache, prepare
from libs.continuation.keys import parse_key
from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc, router_pb2_grpc
from prove.checks import Checks
from prove.judging import Generation, Judge
from prove.report import Claim, Outcome, Size
from prove.routed import Answer, Tenant, generate
from prove.stage import Stage

CLAIM = Claim(
    "4-names",
    "one name, two fingerprints; two models in one cluster: each request reaches its own cell, no shared chunk",
    seed=45,
)
BOTH = "both"
_CALL_S = 10.0
_WITHIN_S = 60.0


@dataclass
class Found:
    """Answers by name asked for, with their prompts; fingerprints by model name."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    answers: list[tuple[str, list[int], Answer]] = field(default_factory=list)
    hashes: dict[str, set[str]] = field(default_factory=dict)
    """Of the chunks in the bucket, by fingerprint."""
    after_loss: list[tuple[list[int], Answer]] = field(default_factory=list)
    """Of the shared name, when the first variant has no worker left."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. At either size on a cluster of its own: it needs two models."""
    prompts = 40 if size is Size.FULL else 4
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-names-")))
        first = await prepare("tiny", default_cache(), lambda _doing, _done: None)
        second = await asyncio.to_thread(other_weights, first, scratch / "other")
        spec = ClusterSpec(
            state=scratch / "state", models=("tiny", str(second)), workers=1, threads=1, restart=False,
            worker_settings={"kv_bytes": "64MiB", "heartbeat_s": "1"},
        )  # fmt: skip
        found = Found()
        async with running(spec) as cluster:
            secret = cluster.tenant_secret
            store = cluster.s3_server
            bucket = Minio(store.endpoint, store.access_key, store.secret_key, secure=False)
            async with (
                grpc.aio.insecure_channel(cluster.router_target) as at_router,
                grpc.aio.insecure_channel(cluster.catalog_target) as at_catalog,
            ):
                router = router_pb2_grpc.RouterStub(at_router)  # type: ignore[no-untyped-call]
                catalog = catalog_pb2_grpc.CatalogStub(at_catalog)  # type: ignore[no-untyped-call]
                await _play(router, catalog, tenant := Tenant("one", secret), prompts, found)
                found.hashes = await _stored(bucket, store.bucket, list(found.fingerprints.values()))
                await _lose(cluster.workers["worker-0"].child, router, tenant, found)  # serves the first model
        return await judged(found, {"tiny": first, "other": second})


def other_weights(folder: Path, into: Path) -> Path:
    """The same model with its embedding's rows in another order: every answer is another."""
    shutil.copytree(folder, into)
    weights = load_file(into / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


async def _play(
    router: router_pb2_grpc.RouterStub, catalog: catalog_pb2_grpc.CatalogStub, tenant: Tenant, count: int, found: Found
) -> None:
    """Every prompt to each of the three names; the shared one stands for both, in either order by turns."""
    draw = random.Random(CLAIM.seed)
    for name in ("tiny", "other"):
        reply = await catalog.ResolveName(catalog_pb2.ResolveNameRequest(name=name), timeout=_CALL_S)
        found.fingerprints[name] = reply.models[0].fingerprint
    order = [found.fingerprints["tiny"], found.fingerprints["other"]]
    await catalog.SetName(catalog_pb2.SetNameRequest(name=BOTH, fingerprints=order), timeout=_CALL_S)
    for _ in range(count):
        prompt = [draw.randrange(6, 500) for _ in range(draw.randint(260, 700))]
        for name in draw.sample(("tiny", "other", BOTH), 3):
            answer = await generate(router, name, tenant, prompt, 12)
            found.answers.append((name, prompt, answer))


async def _stored(store: Minio, bucket: str, fingerprints: Sequence[str]) -> dict[str, set[str]]:
    """Hashes in the bucket by fingerprint, once each has some."""

    def listed() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {fingerprint: set() for fingerprint in fingerprints}
        for one in store.list_objects(bucket, prefix="v1/", recursive=True):
            key = parse_key(one.object_name or "")
            found.setdefault(key.fingerprint, set()).add(key.hash)
        return found

    async with asyncio.timeout(_WITHIN_S):
        while not all((found := await asyncio.to_thread(listed)).values()):  # noqa: ASYNC110 - a bucket has no events
            await asyncio.sleep(0.1)
    return found


async def _lose(worker: Child, router: router_pb2_grpc.RouterStub, tenant: Tenant, found: Found) -> None:
    """The first variant's only worker dies; the shared name goes on with the other."""
    worker.kill()
    await worker.wait_ended(_WITHIN_S)
    for _, prompt, _ in found.answers[:3]:
        found.after_loss.append((prompt, await generate(router, BOTH, tenant, prompt, 12)))


async def judged(found: Found, folders: dict[str, Path]) -> Outcome:
    """Cells, exactness under the named weights, and that the chunks are apart."""
    checks, names = Checks(), {fingerprint: name for name, fingerprint in found.fingerprints.items()}
    checks.equal("fingerprints", len(set(found.fingerprints.values())), 2)
    answered: dict[str, set[str]] = {}
    for name, _, answer in found.answers:
        answered.setdefault(name, set()).add(names.get(answer.fingerprint, answer.fingerprint))
    for name in found.fingerprints:
        checks.equal(f"who answers {name}", [*sorted(answered[name])], [name])
    checks.check(
        f"who answers {BOTH}",
        [*sorted(answered[BOTH])],
        "known variants",
        answered[BOTH] <= names.keys() | set(names.values()),
    )
    checks.equal(
        f"who answers {BOTH} when the first is dead",
        sorted({names.get(answer.fingerprint, "?") for _, answer in found.after_loss}), ["other"],
    )  # fmt: skip
    # A prompt that one variant has computed is new to the other.
    seen: set[tuple[str, tuple[int, ...]]] = set()
    strange = 0
    for _, prompt, answer in found.answers:
        if (answer.fingerprint, tuple(prompt)) not in seen:
            strange += answer.usage.cached_tokens
        seen.add((answer.fingerprint, tuple(prompt)))
    checks.equal("cached tokens of the other variant's prompts", strange, 0)
    hits = [answer.usage.cached_tokens for name, _, answer in found.answers if name == BOTH]
    checks.check("the shared name hits what its variant has", sum(hits), "> 0", sum(hits) > 0)
    one, other = (found.hashes[found.fingerprints[name]] for name in ("tiny", "other"))
    checks.check("chunks of each", [len(one), len(other)], "> 0", bool(one and other))
    checks.equal("chunks of both", len(one & other), 0)
    for name, folder in folders.items():
        said = [
            (p, a)
            for p, a in [*((p, a) for _, p, a in found.answers), *found.after_loss]
            if names.get(a.fingerprint) == name
        ]
        tally = await Judge(folder).judge([Generation(str(n), p, a.tokens) for n, (p, a) in enumerate(said)])
        checks.check(f"exact under the weights of {name}", tally.figures(), "no wrong token", tally.exact)
    crossed = [Generation(str(n), p, a.tokens) for n, (name, p, a) in enumerate(found.answers) if name == "tiny"]
    tally = await Judge(folders["other"]).judge(crossed)
    checks.check(
        "the other weights would have answered otherwise",
        len(tally.wrong),
        f"all {len(crossed)}",
        len(tally.wrong) >= len(crossed),
    )
    return checks.outcome({"requests": len(found.answers)})
