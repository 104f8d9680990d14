"""Free loopback ports for servers that must be told theirs.

A server that can listen on port 0 should: its port can then not be taken between the look and the bind. Ports for those
whose peers must know the number beforehand are drawn at random from below every range that outgoing connections are
given by chance (Linux: from 32768, gVisor: from 16000), each is bound once to see that it is free, and none is drawn
twice in one process. Two processes can still draw the same one; the loser's server then fails to bind and says so.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

LOWEST_PORT = 2_000
EPHEMERAL_START = 16_000
"""The first port never drawn."""
_ATTEMPTS = 4_000
_drawn: set[int] = set()
"""By this process: whoever drew one may not have bound it yet."""


class NoFreePortError(RuntimeError):
    """No run of free loopback ports was found; `wanted` says what for."""

    def __init__(self, wanted: int, offsets: Sequence[int]) -> None:
        self.wanted = wanted
        super().__init__(
            f"no {wanted} free loopback ports (with offsets {list(offsets)}) between {LOWEST_PORT} and "
            f"{EPHEMERAL_START - 1}: stop other servers on this machine"
        )


def free_ports(count: int, *, offsets: Sequence[int] = (0,)) -> list[int]:
    """`count` distinct TCP ports p such that p + o is free on 127.0.0.1 for every o in `offsets`.

    SeaweedFS needs `offsets=(0, 10_000)`: each of its components serves gRPC at its port + 10,000.
    Raises NoFreePortError.
    """
    highest = EPHEMERAL_START - 1 - max(offsets)
    found: list[int] = []
    # Every probe socket stays bound until all are found, so no number is drawn twice.
    with ExitStack() as held:
        for _ in range(_ATTEMPTS):
            if len(found) == count:
                return found
            port = random.randint(LOWEST_PORT, highest)  # noqa: S311 - spread, not secrecy
            if not _drawn.isdisjoint(port + offset for offset in offsets):
                continue
            with ExitStack() as probe:
                try:
                    for offset in offsets:
                        listener = probe.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                        listener.bind(("127.0.0.1", port + offset))
                except OSError:
                    continue
                held.enter_context(probe.pop_all())
            found.append(port)
            _drawn.update(port + offset for offset in offsets)
    raise NoFreePortError(count, offsets)
