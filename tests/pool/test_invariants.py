"""The six invariants as a state machine; and for each of them a bug that it catches."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from libs.pool import swaps
from libs.pool.coverage import Cover
from libs.pool.generation import Generations, Obstacle
from libs.pool.inventory import Inventory
from libs.tunnel import Registry, Route
from libs.tunnel.channel import Channel, Put
from tests.pool.machine import PoolMachine

SETTINGS = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    phases=(Phase.explicit, Phase.generate),
)

# Found is enough: nobody reads the smallest example of a planted bug.
_NO_SHRINKING = (Phase.explicit, Phase.generate)


def test_the_six_invariants() -> None:
    run_state_machine_as_test(PoolMachine, settings=SETTINGS)


def _never(*_args: Any, **_kwargs: Any) -> None:
    return None


def _partial_commit(books: Any, record: Any, fresh: bool, found: Any, pending: Any) -> None:
    """Covers what is old, forgets what is fresh."""
    if not fresh:
        _PLACE(books, record, fresh, found, pending)


_PLACE = swaps._place


def _lossy_put(self: Channel, payload: bytes, now: float) -> Put:
    """The newest token is lost when the channel is congested."""
    put = _PUT_CONGESTED(self, payload, now)
    if put is Put.MERGED:
        last = self._queue[-1]
        self._queue[-1] = last[:-1]
        self.size -= 1
    return put


_PUT_CONGESTED = Channel._put_congested


def _one_close_only(self: Registry, entry: Any, closed: Any, now: float) -> None:
    """A lost tunnel takes its first route along and forgets the others."""
    self.tunnels.pop(entry.tunnel_id, None)
    for route in list(entry.routes.values())[:1]:
        self.drop(entry, route, closed, True, now)


def _shared_limit(self: Route, payload: bytes, now: float) -> Put:
    """Once any route's channel is full, everybody's is."""
    put = Put.EXPIRED if _FULL else _DELIVER(self, payload, now)
    if put in (Put.OVERFLOW, Put.EXPIRED):
        _FULL.append(self.conn_id)
    return put


_FULL: list[int] = []
_DELIVER = Route.deliver

PLANTED: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "1 permits leak": (Registry, "_return_permit", _never),
    "2 a lost writer forgets routes": (Registry, "detach", _one_close_only),
    "3 any cell spares any writer": (Cover, "short_without", lambda *_: frozenset()),
    "4 a stale commit is not noticed": (Generations, "validate", lambda *_: Obstacle.NONE),
    "4 half a commit": (swaps, "_place", _partial_commit),
    "5 one full channel stops the others": (Route, "deliver", _shared_limit),
    "6 a merge loses a token": (Channel, "_put_congested", _lossy_put),
    "a lost writer stays in the inventory": (Inventory, "remove", _never),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = PLANTED[name]
    _FULL.clear()
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(BaseException) as caught:
        run_state_machine_as_test(PoolMachine, settings=settings(SETTINGS, max_examples=200, phases=_NO_SHRINKING))
    assert not isinstance(caught.value, KeyboardInterrupt)
