"""A fault proxy on a loop of its own, for tests that are synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tests.fixtures.fault_proxy import FaultProxy


class Link:
    """Before the server at HOST:PORT; dial `proxy.address`."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxy = FaultProxy(host, int(port))
        self._call(self.proxy.__aenter__())

    def do(self, fault: Callable[[FaultProxy], object]) -> None:
        async def run() -> None:
            fault(self.proxy)

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        async def leave() -> None:
            await self.proxy.__aexit__(None, None, None)
            # What asyncio itself still has to do for the connections; the loop ends with nothing left on it.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._call(leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
