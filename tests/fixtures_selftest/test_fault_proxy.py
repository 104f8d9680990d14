"""The fault proxy does what it says: else every test that leans on it proves nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fixtures.fault_proxy import Direction, FaultProxy

LIMIT_S = 5.0
# How long silence must last to count as silence.
SILENCE_S = 0.15


class Echo:
    """A server that returns what it gets, and says how its connections ended."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.received += data
                writer.write(data)
                await writer.drain()
            self.ends.put_nowait("eof")
            writer.write(b"bye")
            writer.close()
        except ConnectionResetError:
            self.ends.put_nowait("reset")


@asynccontextmanager
async def rig() -> AsyncIterator[tuple[Echo, FaultProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(20), FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
            yield echo, proxy
    finally:
        server.close()


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, limit_s: float = LIMIT_S
) -> bytes:
    writer.write(data)
    async with asyncio.timeout(limit_s):
        return await reader.readexactly(len(data))


async def test_passes_bytes_unchanged_both_ways() -> None:
    async with rig() as (_, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        data = bytes(range(256)) * 8192
        assert await exchange(reader, writer, data) == data
        assert proxy.accepted == 1 and proxy.connections == 1
        assert proxy.passed == {Direction.UP: len(data), Direction.DOWN: len(data)}
        writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b"bye"
        writer.close()


async def test_delay_is_a_longer_pipe_and_not_a_slower_one() -> None:
    async with rig() as (_, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        proxy.delay(0.15)
        started = time.monotonic()
        pieces = 8
        for _ in range(pieces):
            writer.write(b"x")
            await asyncio.sleep(0.01)
        async with asyncio.timeout(LIMIT_S):
            await reader.readexactly(pieces)
        # Up and down once each; not once per piece.
        assert 0.3 <= time.monotonic() - started < 1.0
        proxy.heal()
        started = time.monotonic()
        await exchange(reader, writer, b"y")
        assert time.monotonic() - started < 0.15
        writer.close()


@pytest.mark.parametrize("direction", list(Direction))
async def test_blackhole_is_silent_in_one_direction(direction: Direction) -> None:
    async with rig() as (echo, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        assert await exchange(reader, writer, b"before") == b"before"
        proxy.blackhole(directions=frozenset({direction}))
        with pytest.raises(TimeoutError):
            await exchange(reader, writer, b"lost", SILENCE_S)
        assert (b"lost" in echo.received) is (direction is Direction.DOWN)
        assert proxy.connections == 1 and echo.ends.empty()
        proxy.heal()
        assert await exchange(reader, writer, b"after") == b"after"
        writer.close()


async def test_reset_aborts_both_sides() -> None:
    async with rig() as (echo, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        await exchange(reader, writer, b"x")
        proxy.reset()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            assert await echo.ends.get() == "reset"


async def test_half_close_ends_one_direction_only() -> None:
    async with rig() as (echo, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        await exchange(reader, writer, b"x")
        proxy.half_close(Direction.UP)
        async with asyncio.timeout(LIMIT_S):
            assert await echo.ends.get() == "eof"
            # The server's direction still works.
            assert await reader.read() == b"bye"
        writer.close()


async def test_cut_after_lets_exactly_that_many_bytes_pass() -> None:
    async with rig() as (echo, proxy):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        await exchange(reader, writer, b"x")
        before = len(echo.received)
        proxy.cut_after(1000, frozenset({Direction.UP}))
        writer.write(b"y" * 5000)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ConnectionResetError):
                while await reader.read(65536):
                    pass
            assert await echo.ends.get() == "reset"
        assert len(echo.received) - before <= 1000
        assert proxy.passed[Direction.UP] == 1001


async def test_refuse_then_heal() -> None:
    async with rig() as (_, proxy):
        proxy.refuse = True
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
        writer.close()
        proxy.heal()
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        assert await exchange(reader, writer, b"ok") == b"ok"
        writer.close()


async def test_a_dead_target_resets_the_client() -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with FaultProxy("127.0.0.1", port) as proxy:
        reader, _ = await asyncio.open_connection(proxy.host, proxy.port)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
