"""What the tunnels of one process count; services export it to Prometheus. Plain integers: read at any time."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Monotonic counts, shared by a registry and all of its tunnels. Keys of the mappings are metric labels."""

    frames_sent: int = 0
    frames_received: int = 0
    items_sent: int = 0
    items_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    # Inbound items that were dropped, by why: unknown conn_id, or a route whose owner had already closed it.
    no_route: int = 0
    channel_closed: int = 0
    # Offers refused because the command channel was full; routes refused because of max_connections.
    channel_full: int = 0
    too_many_routes: int = 0
    # Payloads that were absorbed into a waiting one.
    merged: int = 0
    # Exceptions that escaped a callback of the user.
    handler_errors: int = 0
    # Refused or duplicate closes for lack of room; each is answered again when the peer sends on.
    answers_suppressed: int = 0
    routes_opened: int = 0
    tunnels_opened: int = 0
    corrupt: Counter[str] = field(default_factory=Counter)
    routes_closed: Counter[str] = field(default_factory=Counter)
    tunnels_closed: Counter[str] = field(default_factory=Counter)
    degraded: Counter[str] = field(default_factory=Counter)
