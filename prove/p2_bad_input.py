"""Bad input: each a clear error, nothing lost, nothing hung.

Over the API while a good stream runs, which must go on undisturbed; at the command line; and at services started by
hand. An error is clear if it comes in time, with the right status or exit code, and names the value and the way out.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from cli.demo.facts import describe
from cli.embedded.ports import free_ports
from prove.checks import Checks
from prove.processes import Finished, finished
from prove.report import ROOT, Claim, Outcome, Size
from prove.stage import Stage, on

CLAIM = Claim("2-bad-input", "bad input and missing parts: each a clear error in time, nothing lost or hung")
_HTTP_WITHIN_S = 5.0
_START_WITHIN_S = 60.0
"""A service waits `startup_wait_s` (here 2 s) for what it depends on; importing torch takes its time."""
_STREAM_TOKENS = 200
_GOOD = [{"role": "user", "content": "hi"}]

_SLOW = ("worker: model folder missing", "worker: model unsupported", "worker: catalog absent")
"""Left out of the slice: each takes seconds to import torch, and `segue up` is asked the same."""

Body = dict[str, object] | bytes


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    async with on(stage) as at:
        epochs = await _epochs(at)
        prompt = (await at.talker.tokenize("The tide table for the year, as the keeper wrote it down."))[:40]
        before = await at.talker.complete(prompt, _STREAM_TOKENS)
        stream = asyncio.create_task(at.talker.complete(prompt, _STREAM_TOKENS))
        await _over_http(checks, at)
        during = await stream
        checks.check(
            "the stream that ran meanwhile is untouched",
            len(during.served.token_ids),
            len(before.served.token_ids),
            during.served.token_ids == before.served.token_ids,
        )
        await asyncio.gather(_at_the_command_line(checks), _by_hand(checks, at, size))
        checks.equal("no worker was lost", await _epochs(at), epochs)
        after = await at.talker.complete(prompt, _STREAM_TOKENS)
        checks.check(
            "and a good request is answered as before", after.text[:60], before.text[:60], after.text == before.text
        )
    return checks.outcome()


async def _epochs(at: Stage) -> list[int]:
    return [(await describe(worker.target)).endpoint.epoch for worker in at.cluster.workers.values()]


async def _over_http(checks: Checks, at: Stage) -> None:
    context = await _context(at)
    chat, completions = "/chat/completions", "/completions"
    good: dict[str, object] = {"model": at.model, "messages": _GOOD}
    cases: list[tuple[str, str, Body, int, Sequence[str]]] = [
        ("unknown model", chat, {**good, "model": "nope"}, 404, ("nope", "/v1/models")),
        ("empty messages", chat, {**good, "messages": []}, 400, ("messages",)),
        ("malformed JSON", chat, b'{"model": "x", ', 400, ("JSON",)),
        ("not an object", chat, b"[1]", 400, ("object",)),
        ("prompt and budget over the context", chat, {**good, "max_tokens": context}, 400, (str(context), "reduce")),
        ("negative max_tokens", chat, {**good, "max_tokens": -1}, 400, ("max_tokens", "greater than or equal to 1")),
        ("max_tokens of another type", chat, {**good, "max_tokens": "8"}, 400, ("max_tokens", "integer")),
        ("a field nobody knows", chat, {**good, "top_q": 1}, 400, ("top_q",)),
        ("temperature out of range", chat, {**good, "temperature": 9}, 400, ("temperature", "2")),
        ("no model", chat, {"messages": _GOOD}, 400, ("model",)),
        ("an empty prompt", completions, {"model": at.model, "prompt": []}, 400, ("prompt",)),
        ("a token id that does not exist", completions, {"model": at.model, "prompt": [2**31]}, 400, (str(2**31),)),
    ]
    for name, path, body, status, words in cases:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = at.cluster.base_url + path
        reply = await at.http.post(url, content=content, headers=headers, timeout=_HTTP_WITHIN_S)
        message = _message(reply.text)
        passed = reply.status_code == status and all(word in message for word in words)
        checks.check(
            name, {"status": reply.status_code, "message": message[:300]}, {"status": status, "says": [*words]}, passed
        )


def _message(text: str) -> str:
    """Of an error as the OpenAI API shapes it; else what was said, marked."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"not shaped as an error: {text[:200]}".replace("{", "(")


async def _context(at: Stage) -> int:
    reply = await at.http.get(at.cluster.base_url + "/models/" + at.model, timeout=_HTTP_WITHIN_S)
    return int(reply.json()["segue"]["max_context"])


async def _at_the_command_line(checks: Checks) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        missing = str(Path(folder) / "no-such-model")
        strange = _unsupported(Path(folder) / "strange")
        cases: list[tuple[str, tuple[str, ...], Sequence[str]]] = [
            ("segue up: port in use", ("--echo", "--port", port), (port, "in use", "--port")),
            ("segue up: model folder missing", ("--model", missing), (missing, "no such file or folder")),
            ("segue up: model unsupported", ("--model", str(strange)), ("strange_arch",)),
        ]
        for number, (name, flags, words) in enumerate(cases):
            state = ("--state", str(Path(folder) / f"state-{number}"))
            await _refuses(checks, name, [sys.executable, "-m", "cli", "up", *flags, *state], {}, words)


async def _by_hand(checks: Checks, at: Stage, size: Size) -> None:
    """Services as an operator starts them, with the cluster's real stores and one thing wrong."""
    s3 = at.cluster.s3_server
    closed = f"127.0.0.1:{free_ports(1)[0]}"
    store = {
        "S3_ENDPOINT": s3.url,
        "S3_BUCKET": s3.bucket,
        "S3_ACCESS_KEY": s3.access_key,
        "S3_SECRET_KEY": s3.secret_key,
        "STARTUP_WAIT_S": "2",
    }
    wrong = store | {"S3_SECRET_KEY": "not-the-secret"}
    worker = {
        "MODEL": "tiny",
        "DEVICE": "cpu",
        "CATALOG": at.cluster.catalog_target,
        "WORKER": "by-hand",
        "THREADS": "1",
    }
    listening = at.cluster.router_target
    with tempfile.TemporaryDirectory() as folder:
        strange = str(_unsupported(Path(folder) / "strange"))
        missing = str(Path(folder) / "no-such-model")
        cases: list[tuple[str, str, Mapping[str, str], Sequence[str]]] = [
            (
                "worker: S3 with a wrong secret",
                "worker",
                worker | wrong,
                (s3.url.removeprefix("http://"), "secret key"),
            ),
            ("worker: model folder missing", "worker", worker | store | {"MODEL": missing}, (missing,)),
            ("worker: model unsupported", "worker", worker | store | {"MODEL": strange}, ("strange_arch",)),
            ("worker: catalog absent", "worker", worker | store | {"CATALOG": closed}, (closed, "catalog")),
            ("catalog: etcd absent", "catalog", {**store, "ETCD_ENDPOINT": closed}, (closed, "etcd")),
            (
                "catalog: S3 with a wrong secret",
                "catalog",
                {**wrong, "ETCD_ENDPOINT": _etcd(at)},
                (s3.url.removeprefix("http://"), "secret key"),
            ),
            (
                "router: port in use",
                "router",
                {"LISTEN": listening, "CATALOG": at.cluster.catalog_target},
                (listening, "in use"),
            ),
        ]
        for name, service, settings, words in cases:
            if size is Size.SLICE and name in _SLOW:
                continue
            env = {f"SEGUE_{service.upper()}_{key}": value for key, value in settings.items()}
            await _refuses(checks, name, [sys.executable, "-m", f"services.{service}"], env, words)


def _etcd(at: Stage) -> str:
    """The cluster's etcd, as its own catalog is told."""
    return at.cluster.catalog.spec.env["SEGUE_CATALOG_ETCD_ENDPOINT"]


async def _refuses(
    checks: Checks, name: str, argv: Sequence[str], env: Mapping[str, str], words: Sequence[str]
) -> None:
    """The program ends with an error that says these words (whatever their case), without a traceback."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SEGUE_")}
    ended = await finished(argv, _START_WITHIN_S, env={**inherited, **env, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    said = " ".join(ended.output.split())
    clear = all(word.lower() in said.lower() for word in words) and "Traceback" not in said
    figure = {"exit_code": ended.code, "says": _said(ended)[-400:], "seconds": round(ended.seconds, 1)}
    checks.check(name, figure, {"exit_code": 1, "says": [*words]}, ended.code == 1 and clear)


def _said(ended: Finished) -> str:
    """The line that says why."""
    lines = [line for line in ended.output.splitlines() if "cannot start" in line or line.startswith("segue up: ")]
    return lines[-1] if lines else ended.last_line


def _unsupported(folder: Path) -> Path:
    """A model folder of an architecture that nobody serves."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "strange_arch", "architectures": ["StrangeForCausalLM"]})
    )
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder
