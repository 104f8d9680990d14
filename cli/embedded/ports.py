"""Free loopback ports for servers that must be told theirs.

A server that can listen on port 0 should: its port can then not be taken between the look and the bind. etcd and
SeaweedFS cannot (their peers must know the number beforehand), so ports for them are drawn at random from below the
kernel's ephemeral range, where no outgoing connection lands by chance, and each is bound once to see that it is free.
Two drawers can still collide; the loser's server then fails to bind, says so and is started again with fresh ports.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

LOWEST_PORT = 10_000
# Linux hands out 32768-60999 to outgoing connections; this is the first port never drawn.
EPHEMERAL_START = 32_768
_ATTEMPTS = 2_000


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
            with ExitStack() as probe:
                try:
                    for offset in offsets:
                        listener = probe.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                        listener.bind(("127.0.0.1", port + offset))
                except OSError:
                    continue
                held.enter_context(probe.pop_all())
            found.append(port)
    raise NoFreePortError(count, offsets)
