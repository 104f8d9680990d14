"""`buf curl` by reflection on router, worker and catalog: the commands of docs/debug.md, executed as they stand there.

The ingress speaks HTTP only. `grpcurl` is run too where it is installed; its commands come from the same table.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.demo.scenario import demo_text
from libs.continuation.chain import plan, root
from prove.checks import Checks
from prove.debug_commands import CALLS, DOCUMENT, Call, commands, parts
from prove.processes import finished
from prove.report import ROOT, Claim, Outcome, Size
from prove.stage import Stage, on

CLAIM = Claim(
    "2-reflection",
    "the calls of docs/debug.md work by reflection on each service; Explain has every term and the chain, Lookup too",
)
_WITHIN_S = 20.0
_SERVICES = {
    "router services": "segue.v1.Router",
    "worker services": "segue.v1.Worker",
    "catalog services": "segue.v1.Catalog",
}
TERMS = (
    *("worker", "epoch", "fingerprint", "tier", "cachedTokens", "cachedBytes", "queueMs", "loadMs", "restoreMs"),
    *("computeTokens", "prefillMsPerToken", "firstTokenMs", "ttftMs", "correction", "pageTokens", "freePages"),
    *("evictablePages", "neededPages", "maxContext", "prefixHash"),
)
"""Every field of a ranked candidate; in JSON a field that is zero is left out."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    async with on(stage) as at:
        variables = await _variables(checks, at)
        answers: dict[str, Any] = {}
        for call in CALLS:
            answers[call.key] = await _called(checks, call, variables)
        await _others(checks, variables)
        for key, service in _SERVICES.items():
            checks.check(f"{key}: itself, health, reflection", answers[key], service, _lists(answers[key], service))
        _judge_explain(checks, at, answers, json.loads(variables["TOKENS"]), variables["SALT"])
        heard = sorted(one["endpoint"]["worker"] for one in answers["workers"]["workers"])
        checks.equal("ListWorkers: every worker", heard, sorted(at.cluster.workers))
        checks.equal("ListModels: the model", [one["name"] for one in answers["models"]["names"]], [at.model])
        checks.check("Describe: pages", len(answers["describe"]["pages"]), "> 0", bool(answers["describe"]["pages"]))
    return checks.outcome({"explain": answers["explain"], "lookup": answers["lookup"]})


async def _variables(checks: Checks, at: Stage) -> dict[str, str]:
    """What a person sets in their shell, found as the document says; a durable chain for the tokens comes first."""
    text = " ".join(demo_text().split()[:450]).replace('"', "").replace("\\", "")
    variables = {
        "ROUTER": at.cluster.router_target,
        "CATALOG": at.cluster.catalog_target,
        "WORKER": next(iter(at.cluster.workers.values())).target,
        "INGRESS": at.cluster.base_url.removeprefix("http://").removesuffix("/v1"),
        "MODEL": at.model,
        "STATE": str(at.cluster.spec.state),
        "TEXT": text,
    }
    setup, _, _ = parts(DOCUMENT.read_text(encoding="utf-8"))
    shown = 'printf \'%s\\n\' "$TOKENS" "$SALT" "$FINGERPRINT"'
    tokens, salt, fingerprint = (await _shell("\n".join(["set -e", *commands(setup), shown]), variables)).splitlines()
    answer = await at.talker.complete(json.loads(tokens), 8)
    checks.equal("the document's TOKENS: what a request sends", answer.served.prompt_token_ids, json.loads(tokens))
    await at.facts.durable(answer.processed)
    ids = answer.served.prompt_token_ids + answer.served.token_ids
    return variables | {"TOKENS": json.dumps(ids), "SALT": salt, "FINGERPRINT": fingerprint}


async def _others(checks: Checks, variables: Mapping[str, str]) -> None:
    """What else the document tells people to type. A watch never ends: it must have said something by then."""
    _, _, after = parts(DOCUMENT.read_text(encoding="utf-8"))
    for command in commands(after):
        if command.startswith("grpcurl") and not shutil.which("grpcurl"):
            continue
        endless = "Watch" in command
        said = await _shell(f"timeout 3 {command}" if endless else command, variables, (0, 124) if endless else (0,))
        checks.check(command[:100], said[:120], "an answer", bool(said))


async def _called(checks: Checks, call: Call, variables: Mapping[str, str]) -> Any:
    """The answer of the buf form; with grpcurl at hand its answer must be the same kind of thing."""
    if shutil.which("grpcurl"):
        checks.check(f"{call.key} by grpcurl", "an answer", "an answer", bool(await _shell(call.grpcurl, variables)))
    said = await _shell(call.buf, variables)
    checks.check(f"{call.key} by buf curl", said[:80], "an answer", bool(said))
    return json.loads(said) if call.method else said.split()


async def _shell(command: str, variables: Mapping[str, str], codes: tuple[int, ...] = (0,)) -> str:
    """stdout of a line of the document. Raises RuntimeError with what it said if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ended = await finished(["bash", "-c", command], _WITHIN_S, env={**os.environ, "PATH": path, **variables}, cwd=ROOT)
    if ended.code not in codes:
        raise RuntimeError(f"{command[:200]} ended with {ended.code}: {ended.stderr[-500:]}")
    return ended.stdout


def _lists(found: list[str], service: str) -> bool:
    return {service, "grpc.health.v1.Health"} <= set(found) and any("reflection" in name for name in found)


def _judge_explain(checks: Checks, at: Stage, answers: Mapping[str, Any], tokens: list[int], salt: str) -> None:
    explained, found = answers["explain"], answers["lookup"]
    ranked = explained["ranked"]
    checks.equal("Explain: every worker ranked", sorted({c["worker"] for c in ranked}), sorted(at.cluster.workers))
    checks.equal("Explain: best first", [c["ttftMs"] for c in ranked], sorted(c["ttftMs"] for c in ranked))
    best = max(ranked, key=lambda candidate: int(candidate.get("cachedTokens", 0)))
    # Zero terms are left out of JSON, so each term must appear in some candidate or be one that may be zero everywhere.
    seen = {term for candidate in ranked for term in candidate}
    may_be_zero = {"queueMs", "loadMs", "restoreMs", "evictablePages", "cachedBytes"}
    missing = [term for term in TERMS if term not in seen and term not in may_be_zero]
    checks.equal("Explain: every term of the score", missing, [])
    off = [round(abs(_total(c) / c["ttftMs"] - 1), 4) for c in ranked]
    checks.check("Explain: the terms add up to the prediction", off, "<= 0.02", all(one <= 0.02 for one in off))
    chain = explained["chains"][0]
    own = _hashes(chain["fingerprint"], salt, tokens)
    nodes = [node["hash"] for node in chain["nodes"]]
    checks.equal("Explain: the chain's hashes are the tokens'", nodes[: len(own)], own)
    durable = [node["hash"] for node in chain["nodes"] if node.get("durable")]
    looked = [
        node["chunk"]["hash"] for node in [*found.get("nodes", []), *([found["tail"]] if "tail" in found else [])]
    ]
    checks.check("Lookup: finds that chain", looked, durable, bool(looked) and set(durable) == set(looked))
    cached = int(best.get("cachedTokens", 0))
    checks.check(
        "Explain: the best candidate starts from it", cached, "> 0", cached > 0 and best["prefixHash"] in nodes
    )


def _total(c: Mapping[str, Any]) -> float:
    """The prediction from its terms, which carry the worker's correction already."""
    wait = max(c.get("queueMs", 0.0), c.get("loadMs", 0.0)) + c.get("restoreMs", 0.0)
    compute = c.get("computeTokens", 0) * c.get("prefillMsPerToken", 0.0) + c.get("firstTokenMs", 0.0)
    return float(wait + compute)


def _hashes(fingerprint: str, salt: str, tokens: list[int]) -> list[str]:
    """Of the full chunks before the pending token, by the library the worker uses."""
    return [node.hash for node in plan(root(fingerprint, salt), tokens[:-1]).chunks]
