"""Windows of unanswered offers, against a plain account of them."""

from __future__ import annotations

import random

import pytest

from libs.controller.fair_queue import Refusal, Waiter
from libs.controller.offer_windows import OfferWindows, Process

A, B = ("a", 1), ("b", 1)


def waiter(key: str, arrival: int = 0, tenant: str = "t") -> Waiter:
    return Waiter(0, arrival, key, tenant, 1.0)


@pytest.mark.parametrize("seed", range(30))
def test_no_process_has_more_than_its_bound_and_no_window_stays_open_beside_a_waiter(seed: int) -> None:
    rng = random.Random(seed)
    bound = rng.randint(1, 3)
    windows = OfferWindows(bound, 1_000, {})
    sent: dict[str, Process] = {}
    woken: list[str] = []
    done: set[str] = set()

    def place(key: str) -> None:
        """Plans a request for a worker: it is offered or held."""
        process = rng.choice((A, B))
        if windows.open(key, process):
            windows.settled(key)
            windows.sent(process)
            sent[key] = process
        else:
            windows.settled(key)
            assert windows.hold(waiter(key, int(key)), process) is None

    for number in range(60):
        place(str(number))
        for _ in range(rng.randint(0, 2)):
            what = rng.choice(("answer", "plan", "end"))
            if what == "answer" and sent:
                key = rng.choice(sorted(sent))
                windows.answered(sent.pop(key))
                done.add(key)
            elif what == "plan" and woken:
                place(woken.pop(0))
            elif what == "end" and woken:
                windows.discard(key := woken.pop())
                done.add(key)
        while (key := windows.next()) is not None:
            woken.append(key)
        for process in (A, B):
            assert sum(where == process for where in sent.values()) == windows.unanswered(process) <= bound
    while len(done) < 60:
        while woken:
            place(woken.pop(0))
        if sent:
            key, process = sent.popitem()
            windows.answered(process)
            done.add(key)
        while (key := windows.next()) is not None:
            woken.append(key)
        assert sent or woken or len(done) == 60, "somebody is held and nothing will move it"
    assert len(windows) == 0


def test_a_tenant_with_many_does_not_keep_another_out() -> None:
    windows = OfferWindows(1, 100, {})
    windows.sent(A)
    for number in range(20):
        windows.hold(waiter(f"many{number}", number, "greedy"), A)
    windows.hold(waiter("one", 20, "modest"), A)
    order = []
    windows.answered(A)
    while (key := windows.next()) is not None:
        order.append(key)
        windows.settled(key)
    assert order.index("one") <= 1 and len(order) == 21


def test_a_newcomer_does_not_overtake_and_too_many_are_refused() -> None:
    windows = OfferWindows(1, 2, {})
    windows.sent(A)
    assert windows.hold(waiter("x", 1), A) is None and windows.hold(waiter("y", 2), A) is None
    assert windows.hold(waiter("z", 3), A) is Refusal.QUEUE
    windows.answered(A)
    assert windows.next() == "x" and windows.open("x", A) and not windows.open("w", A)
    windows.discard("x")
    assert not windows.open("w", A) and windows.next() == "y"
