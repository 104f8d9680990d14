"""The carrier's next read runs while the last message is looked at: begun at once, awaited once, cancelled whole."""

import asyncio
import contextlib
from typing import Any

import pytest

from libs.tunnel import CarrierLostError
from libs.tunnel.grpc_carrier import ClientCarrier, _Begun


class Operation:
    """A read of the runtime's: says when it was begun and how it ended."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.begun = self.cancelled = False

    async def __call__(self) -> bytes:
        self.begun = True
        try:
            return await self.answer + await self._more()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def _more(self) -> bytes:
        await asyncio.sleep(0)
        return b"!"


async def test_it_runs_before_anybody_waits() -> None:
    operation = Operation()
    begun = _Begun(operation())
    assert operation.begun
    operation.answer.set_result(b"x")
    assert await begun.result() == b"x!"


async def test_what_has_ended_at_once_is_kept() -> None:
    async def at_once() -> int:
        return 7

    async def fails() -> int:
        raise ZeroDivisionError

    assert await _Begun(at_once()).result() == 7
    with pytest.raises(ZeroDivisionError):
        await _Begun(fails()).result()


@pytest.mark.parametrize("steps", [0, 1])
async def test_who_is_cancelled_cancels_it(steps: int) -> None:
    operation = Operation()
    begun = _Begun(operation())

    async def wait() -> bytes:
        return await begun.result()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    if steps:
        operation.answer.set_result(b"x")
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert operation.cancelled


class Call:
    """What a carrier asks of a call."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = list(messages)
        self.reads = 0
        self.silent = asyncio.Event()

    async def read(self) -> Any:
        self.reads += 1
        if self.messages:
            return self.messages.pop(0)
        await self.silent.wait()
        raise asyncio.InvalidStateError("over")

    def cancel(self) -> None:
        self.silent.set()


async def test_the_next_message_is_asked_for_while_this_one_is_looked_at() -> None:
    call = Call(b"a", b"b", b"c")
    carrier = ClientCarrier(call, "peer")
    for number, due in enumerate((b"a", b"b", b"c"), 1):
        assert await carrier.read() == due
        assert call.reads == number + 1
    waiting = asyncio.create_task(carrier.read())
    await asyncio.sleep(0)
    call.silent.set()
    with pytest.raises(CarrierLostError):
        await waiting


async def test_a_cancelled_carrier_leaves_no_read_behind() -> None:
    call = Call(b"a")
    carrier = ClientCarrier(call, "peer")
    assert await carrier.read() == b"a"
    carrier.cancel()
    assert carrier._ahead is None
    with contextlib.suppress(CarrierLostError):
        await carrier.read()
