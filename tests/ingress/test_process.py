"""The ingress as a process of its own: start, traces, metrics, SIGTERM, and starts that must fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fixtures.otlp import ReceivedSpan, otlp_receiver
from tests.ingress.fake_router import answering, fake_catalog, fake_router
from tests.ingress.models import byte_level
from tests.ingress.rig import SECRET, events, text_of_events

TEXT = "the quick brown fox"
TOKENS = byte_level(()).encode(TEXT, add_special_tokens=False).ids
ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.http = ""
        self.metrics = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """The first log line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no {pattern!r} in:\n{''.join(self.log)}")

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            assert self.process.stderr is not None
            self.log.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEGUE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.ingress", "--listen", "127.0.0.1:0", *flags,
        cwd=ROOT, env=environ | {"SEGUE_TENANT_SECRET": SECRET}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_serves_traces_counts_and_ends_in_order(folder: Path) -> None:
    async with (
        otlp_receiver() as receiver,
        fake_catalog() as catalog,
        fake_router(answering(TOKENS, pause_s=0.03)) as router,
        started(
            "--routers", router.address, "--catalog", catalog.address, "--models", f"m={folder}",
            "--otlp-endpoint", receiver.endpoint,
        ) as ingress,
        httpx.AsyncClient(timeout=10) as http,
    ):  # fmt: skip
        base = "http://" + (await ingress.until(r"listening.* listen=(\S+)"))[1]
        metrics = "http://" + (await ingress.until(r"metrics=(\S+)"))[1]
        async with asyncio.timeout(10):
            while (await http.get(f"{base}/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await http.get(f"{metrics}/readyz")).status_code == 200
        caller = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": len(TOKENS)}
        answer = await http.post(f"{base}/v1/chat/completions", json=body, headers={"traceparent": caller})
        assert answer.json()["choices"][0]["message"]["content"] == TEXT

        def whole(spans: list[ReceivedSpan]) -> bool:
            return {"POST /v1/chat/completions", "generate"} <= {span.name for span in spans}

        spans = await receiver.wait_for(whole, "a root span with the generation")
        root = next(span for span in spans if span.name.startswith("POST"))
        inner = next(span for span in spans if span.name == "generate")
        assert (root.trace_id, root.parent_id) == ("ab" * 16, "cd" * 8)
        assert inner.parent_id == root.span_id
        assert root.attributes["segue.request_id"] == answer.headers["x-request-id"]
        # The router continues this very trace.
        assert router.exchanges[0].submit.request.trace.traceparent.split("-")[1:3] == [inner.trace_id, inner.span_id]
        shown = (await http.get(f"{metrics}/metrics")).text
        for line in (
            r'segue_ingress_requests_total\{code="200",endpoint="/v1/chat/completions"\} 1\.0',
            r"segue_ingress_ttft_seconds_count 1\.0",
            rf"segue_ingress_inter_token_seconds_count {len(TOKENS) - 1}\.0",
            rf"segue_ingress_completion_tokens_total {len(TOKENS)}\.0",
            r"segue_ingress_links_up 1\.0",
            r"segue_ingress_upstream_submissions_total 1\.0",
        ):
            assert re.search(line, shown), line

        # SIGTERM in the middle of a stream: the stream ends as if nothing had happened, then the process does.
        running = asyncio.create_task(http.post(f"{base}/v1/chat/completions", json=body | {"stream": True}))
        while len(router.exchanges) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        ingress.process.send_signal(signal.SIGTERM)
        parsed = events((await running).text)
        assert text_of_events(parsed) == TEXT
        assert parsed[-1] == "[DONE]"
        assert await ingress.ended() == 0, "".join(ingress.log)
        logged = "".join(ingress.log)
        assert SECRET not in logged
        assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("port", "cannot listen on"),
        ("catalog", "the catalog at 127.0.0.1:1 does not answer"),
        ("folder", "tokenizer.json does not exist"),
        ("template", "chat_template names 'other'"),
        ("keys", "holds no keys"),
    ],
)
async def test_what_cannot_start_says_why(folder: Path, tmp_path: Path, case: str, told: str) -> None:
    (tmp_path / "keys.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with fake_catalog() as catalog:
            flags = ["--routers", "127.0.0.1:1", "--catalog-wait-s", "0.1"]
            flags += ["--catalog", "127.0.0.1:1" if case == "catalog" else catalog.address]
            flags += ["--models", f"m={tmp_path if case == 'folder' else folder}"]
            if case == "port":
                flags += ["--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
            if case == "template":
                flags += ["--chat-template", f"other={folder}/x"]
            if case == "keys":
                flags += ["--keys-file", str(tmp_path / "keys.json")]
            async with started(*flags) as ingress:
                assert await ingress.ended() == 1
                logged = "".join(ingress.log)
                assert told in logged
                assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--models", "m"], {}),
        (["--routers", "nowhere"], {}),
        ([], {"SEGUE_TENANT_SECRET": "abc"}),
        ([], {"SEGUE_TENANT_SECRET": "zz" * 32}),
        (["--max-requests", "0"], {}),
    ],
)
def test_wrong_settings_are_told_without_the_secret(flags: list[str], environ: dict[str, str]) -> None:
    from libs.service.settings import SettingsError, load
    from services.ingress.settings import IngressSettings

    right = ["--routers", "a:1,b:2", "--catalog", "c:3", "--models", "m=folder"]
    given = {"SEGUE_TENANT_SECRET": SECRET}
    assert load(IngressSettings, right, given).routers == ("a:1", "b:2")
    with pytest.raises(SettingsError) as error:
        load(IngressSettings, [*right, *flags], given | environ)
    assert environ.get("SEGUE_TENANT_SECRET", "never") not in str(error.value)
