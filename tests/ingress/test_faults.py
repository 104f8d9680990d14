"""Clients that leave and routers that die: the stream goes on where it can, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.segue.v1.common_pb2 import FinishReason
from libs.contracts.segue.v1.router_pb2 import CompletedDelivery, TokensDelivery
from libs.tunnel import CloseReason
from tests.ingress.fake_router import VARIANT, Exchange, Script, answering
from tests.ingress.models import END, byte_level
from tests.ingress.rig import Rig, events, eventually, running, text_of_events

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = byte_level(()).encode(TEXT, add_special_tokens=False).ids
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def hold(exchange: Exchange) -> None:
    """As in a queue: nothing comes."""
    await exchange.cancelled.wait()


def stalls_after(count: int) -> Script:
    async def script(exchange: Exchange) -> None:
        at = exchange.submit.delivered
        for index in range(at, count):
            exchange.tokens([TOKENS[index]], index)
        await exchange.cancelled.wait()

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "at_least"), [(hold, 0), (stalls_after(5), 5), (stalls_after(len(TOKENS)), len(TOKENS))]
)
async def test_a_client_that_leaves_is_cancelled_and_leaves_nothing(
    folder: Path, script: Script, at_least: int, stream: bool
) -> None:
    async with running(folder, script) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.ingress.server.port)
        body = json.dumps(BODY | {"stream": stream, "max_tokens": len(TOKENS) + 1}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        exchange = await rig.router.next()
        counters = rig.ingress.api.metrics
        if stream and at_least:
            seen = b""
            while seen.count(b'"content":') < at_least + 1:  # the opening event has one too
                seen += await asyncio.wait_for(reader.read(65_536), 10)
        writer.close()
        async with asyncio.timeout(1.0):
            await exchange.ended.wait()
        assert exchange.cancelled.is_set()
        assert exchange.closed is not None
        assert exchange.closed.reason is CloseReason.CANCELLED
        await rig.at_rest()
        assert counters.counters.disconnects == 1
        assert rig.ingress.api.memo.bytes == 0


async def test_a_client_that_leaves_while_no_router_is_there(folder: Path) -> None:
    async with running(folder, router_wait_s=60) as rig:
        task = asyncio.create_task(rig.chat())
        await eventually(lambda: rig.ingress.api.upstream.counters.active == 1, "waiting")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.at_rest()


def dies_after(count: int, rig: list[Rig], which: int, orderly: bool = False) -> Script:
    async def script(exchange: Exchange) -> None:
        for index in range(exchange.submit.delivered, count):
            exchange.tokens([TOKENS[index]], index)
            await asyncio.sleep(0.001)
        if count:
            await asyncio.sleep(0.05)  # let what was sent arrive: a killed peer's last frames may be lost
        router = rig[0].routers[which]
        for other in rig[0].routers:
            if other is not router:
                other.script = answering(TOKENS)
        if orderly:
            router.shut_down()
        else:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(router.kill()))
        await asyncio.sleep(60)

    return script


@pytest.mark.parametrize("count", [0, 1, 20, len(TOKENS) - 1])
@pytest.mark.parametrize("orderly", [False, True])
async def test_a_dead_router_is_replaced_in_one_unbroken_stream(folder: Path, count: int, orderly: bool) -> None:
    box: list[Rig] = []
    scripts = [dies_after(count, box, which, orderly) for which in range(2)]
    async with running(folder, *scripts) as rig:
        box.append(rig)
        fields = {"stream_options": {"include_usage": True}, "max_tokens": len(TOKENS), "seed": 9}
        parsed = events((await rig.chat(stream=True, **fields)).text)
        assert parsed[-1] == "[DONE]"
        assert text_of_events(parsed) == TEXT
        assert parsed[-2]["usage"]["completion_tokens"] == len(TOKENS)
        assert parsed[-2]["segue"]["routers"] == 2
        first, second = sorted(
            (exchange for router in rig.routers for exchange in router.exchanges),
            key=lambda one: (len(one.submit.request.tokens), -one.submit.request.deadline_ms),
        )
        assert second.submit.delivered == count
        assert (first.submit.fingerprint, second.submit.fingerprint) == ("", VARIANT if count else "")
        sent, again = first.submit.request, second.submit.request
        assert list(again.tokens) == list(sent.tokens) + TOKENS[:count]
        assert again.output_start == sent.output_start == len(sent.tokens)
        assert again.max_new_tokens == len(TOKENS) - count
        assert again.deadline_ms <= sent.deadline_ms
        for request in (sent, again):
            request.ClearField("tokens")
            request.ClearField("deadline_ms")
            request.ClearField("max_new_tokens")
        assert sent == again
        await eventually(lambda: rig.ingress.registry.snapshot().routes == 0, "routes")


async def test_the_same_router_takes_the_request_back_after_a_restart(folder: Path) -> None:
    box: list[Rig] = []
    async with running(folder, dies_after(7, box, 0), router_wait_s=10) as rig:
        box.append(rig)
        waiting = asyncio.create_task(rig.chat(max_tokens=len(TOKENS)))
        await rig.router.next()
        await eventually(lambda: rig.ingress.links.counters.up == 0, "router lost")
        port = int(rig.router.address.rpartition(":")[2])
        rig.router.script = answering(TOKENS)
        await rig.router.start(port)
        answer = (await waiting).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert rig.router.exchanges[1].submit.delivered == 7
        assert rig.ingress.api.upstream.counters.resubmissions == 1
        await rig.at_rest()


@pytest.mark.parametrize(("tokens", "reason"), [(TOKENS, "length"), ([*TOKENS[:-1], END], "stop")])
async def test_a_router_lost_after_the_last_token_changes_nothing(folder: Path, tokens: list[int], reason: str) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.tokens(tokens, 0)
        await asyncio.sleep(0.05)
        exchange.route.close(CloseReason.SHUTDOWN)

    async with running(folder, script) as rig:
        answer = (await rig.chat(max_tokens=len(tokens))).json()
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == len(tokens)
        assert len(rig.router.exchanges) == 1
        await rig.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_losses_are_bounded(folder: Path, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        at = exchange.submit.delivered
        exchange.tokens([TOKENS[at]], at)
        exchange.route.close(CloseReason.RETIRED)

    async with running(folder, script, router_losses=3) as rig:
        answer = await rig.chat(stream=stream)
        assert len(rig.router.exchanges) == 4
        assert [exchange.submit.delivered for exchange in rig.router.exchanges] == [0, 1, 2, 3]
        if stream:
            parsed = events(answer.text)
            assert text_of_events(parsed) == TEXT[:4]
            assert "[DONE]" not in parsed
            assert parsed[-1]["error"]["code"] == "service_unavailable"
        else:
            assert answer.status_code == 503
        await rig.at_rest()


async def test_a_request_does_not_go_back_to_the_router_that_lost_it(folder: Path) -> None:
    box: list[Rig] = []

    async def script(exchange: Exchange) -> None:
        if exchange.submit.delivered == 0:
            exchange.tokens(TOKENS[:1], 0)
            await asyncio.sleep(0.02)
            box[0].ingress.links._turn += 1  # as another request does in between: round robin alone would go back
            exchange.route.close(CloseReason.RETIRED)
        else:
            await answering(TOKENS)(exchange)

    async with running(folder, script, script) as rig:
        box.append(rig)
        for _ in range(4):
            assert (await rig.chat(max_tokens=len(TOKENS))).status_code == 200
        firsts, seconds = (
            [{e.id: e for e in router.exchanges if e.submit.delivered == n} for router in rig.routers] for n in (0, 1)
        )
        assert not firsts[0].keys() & seconds[0].keys()
        assert not firsts[1].keys() & seconds[1].keys()
        assert sum(map(len, seconds)) == 4


async def test_a_router_without_room_is_an_overload(folder: Path) -> None:
    async def full(exchange: Exchange) -> None:
        exchange.route.close(CloseReason.RESOURCE_EXHAUSTED)

    async with running(folder, full) as rig:
        answer = await rig.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert len(rig.router.exchanges) == 1
        await rig.at_rest()


async def test_only_the_next_token_is_taken(folder: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.submit.delivered == 0:
            exchange.tokens(TOKENS[:4], 0)
            exchange.tokens(TOKENS[2:6], 2)  # two of them again
            exchange.tokens(TOKENS[:3], 0)  # all again
            exchange.tokens(TOKENS[9:], 9)  # a gap: this router is not believed any more
            await asyncio.sleep(60)
        await answering(TOKENS)(exchange)

    async with running(folder, script) as rig:
        answer = (await rig.chat(max_tokens=len(TOKENS))).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert [exchange.submit.delivered for exchange in rig.router.exchanges] == [0, 6]
        assert rig.ingress.api.upstream.counters.duplicate_tokens == 5
        await rig.at_rest()


async def test_usage_is_that_of_the_router_that_read_the_prompt(folder: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.submit.delivered == 0:
            exchange.tokens(TOKENS[:3], 0)
            await asyncio.sleep(0.02)
            exchange.route.close(CloseReason.SHUTDOWN)
            return
        resumed = exchange.usage(3)
        resumed.cached_tokens = 1
        exchange.send(tokens=TokensDelivery(index=3, tokens=TOKENS[3:], usage=resumed))
        exchange.send(completed=CompletedDelivery(finish_reason=FinishReason.FINISH_REASON_LENGTH, usage=resumed))

    async with running(folder, script) as rig:
        usage = (await rig.chat(max_tokens=len(TOKENS))).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 4 * 2


async def test_no_more_tokens_are_cached_than_the_prompt_has(folder: Path) -> None:
    async def script(exchange: Exchange) -> None:
        usage = exchange.usage(0)
        usage.cached_tokens = 10**6
        exchange.send(completed=CompletedDelivery(finish_reason=FinishReason.FINISH_REASON_STOP, usage=usage))

    async with running(folder, script) as rig:
        usage = (await rig.chat()).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        assert usage["completion_tokens"] == 0


def raw_request(rig: Rig, **fields: Any) -> socket.socket:
    """A client that reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", rig.ingress.server.port))
    body = json.dumps(BODY | {"stream": True} | fields).encode()
    client.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    client.setblocking(False)
    return client


async def flood(exchange: Exchange) -> None:
    """Far more than sockets and buffers hold, for as long as it is let."""
    index = 0
    while not exchange.route.closed:
        for _ in range(200):
            exchange.tokens([TOKENS[index % len(TOKENS)]], index)
            index += 1
        await asyncio.sleep(0.005)


async def test_a_slow_reader_loses_its_route_alone_with_an_error_event(folder: Path) -> None:
    async with running(folder, flood, client_stall_s=60) as rig:
        # The budget is larger than what flows: the end comes from the slowness.
        client = raw_request(rig, max_tokens=4_000)
        exchange = await rig.router.next()
        rig.router.script = answering(TOKENS)
        async with asyncio.timeout(15):
            while not exchange.ended.is_set():
                # Others are served all the while.
                assert (await rig.chat(max_tokens=len(TOKENS))).json()["choices"][0]["message"]["content"] == TEXT
        assert exchange.closed is not None
        assert exchange.closed.reason is CloseReason.RESOURCE_EXHAUSTED
        loop, seen = asyncio.get_running_loop(), b""
        async with asyncio.timeout(10):
            while not seen.endswith(b"0\r\n\r\n"):
                more = await loop.sock_recv(client, 65_536)
                assert more, "the stream was cut without its end"
                seen += more
        client.close()
        assert b'"code":"slow_client"' in seen
        assert b"[DONE]" not in seen
        await rig.at_rest()


async def test_a_client_that_takes_nothing_is_given_up(folder: Path) -> None:
    async def much(exchange: Exchange) -> None:
        index = 0
        while not exchange.route.closed:
            exchange.tokens(TOKENS * 200, index)
            index += len(TOKENS) * 200
            await asyncio.sleep(0.01)

    async with running(folder, much, client_stall_s=0.3) as rig:
        client = raw_request(rig, max_tokens=4_000)
        exchange = await rig.router.next()
        async with asyncio.timeout(15):
            await exchange.ended.wait()
        await rig.at_rest()
        client.close()


async def test_running_streams_finish_at_shutdown(folder: Path) -> None:
    async with running(folder, answering(TOKENS, pause_s=0.02)) as rig:
        waiting = asyncio.create_task(rig.chat(stream=True, max_tokens=len(TOKENS)))
        await rig.router.next()
        await rig.drain(10.0)
        parsed = events((await waiting).text)
        assert text_of_events(parsed) == TEXT
        assert parsed[-1] == "[DONE]"
        assert rig.ingress.api.why_not_ready == "stopping"
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", rig.ingress.server.port)


async def test_what_outlives_the_grace_ends_with_an_error_event(folder: Path) -> None:
    async with running(folder, stalls_after(3)) as rig:
        streamed = asyncio.create_task(rig.chat(stream=True))
        whole = asyncio.create_task(rig.chat())
        for _ in range(2):
            await rig.router.next()
        await asyncio.sleep(0.05)
        await rig.drain(1.5)
        parsed = events((await streamed).text)
        assert text_of_events(parsed) == TEXT[:3]
        assert parsed[-1]["error"]["code"] == "service_unavailable"
        assert (await whole).status_code == 503
        await rig.at_rest()


async def test_many_clients_come_and_go(folder: Path) -> None:
    async with running(folder, answering(TOKENS, pause_s=0.002), answering(TOKENS, pause_s=0.002)) as rig:

        async def one(index: int) -> None:
            task = asyncio.create_task(rig.chat(stream=bool(index % 2), max_tokens=len(TOKENS)))
            if index % 3 == 0:
                await asyncio.sleep(0.001 * (index % 40))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert (await task).status_code == 200

        await asyncio.gather(*(one(index) for index in range(60)))
        await rig.at_rest()
        assert all(router.exchanges for router in rig.routers), "requests are spread over the routers"
