"""What a tunnel runs on: any ordered bidirectional stream of byte strings."""

from typing import ClassVar, Protocol


class Carrier(Protocol):
    """One live stream. ``read`` is awaited by the reader task alone, ``write`` and ``finish`` by the writer's alone."""

    # Whether ``cancel`` could overtake what was written: then the peer's end of stream is awaited first.
    cancel_overtakes: ClassVar[bool]

    @property
    def peer(self) -> str:
        """The other end's address, for people."""
        ...

    async def read(self) -> bytes | None:
        """The next message, or None once the peer has ended its direction in order. Raises CarrierLostError."""
        ...

    async def write(self, data: bytes) -> None:
        """Hand one message to the transport, waiting for its flow control. Raises CarrierLostError."""
        ...

    async def finish(self) -> None:
        """End this direction in order, where the transport can. Raises CarrierLostError."""
        ...

    def cancel(self) -> None:
        """Give the stream up at once; idempotent, never blocks."""
        ...

    def lost(self) -> bool:
        """Whether the transport reports the peer gone (a cancelled server handler asks)."""
        ...
