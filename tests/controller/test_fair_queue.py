"""The fair queue: bounds, order within a tenant, shares between tenants, and waiters that come back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from libs.controller.fair_queue import FairQueue, Refusal, Waiter


def waiter(key: str, tenant: str = "t", arrival: int = 0, priority: int = 0, cost: float = 1.0, **kw: bool) -> Waiter:
    return Waiter(-priority, arrival, key, tenant, cost, **kw)


def drain(queue: FairQueue) -> list[str]:
    taken = []
    while (one := queue.take(set())) is not None:
        taken.append(one.key)
    return taken


def test_within_a_tenant_priority_then_arrival() -> None:
    queue = FairQueue(10, 10)
    for key, arrival, priority in (("c", 3, 0), ("a", 1, 0), ("b", 2, 5)):
        queue.add(waiter(key, arrival=arrival, priority=priority))
    assert drain(queue) == ["b", "a", "c"]


def test_shares_are_of_work_and_follow_the_weights() -> None:
    queue = FairQueue(10_000, 10_000, {"gold": 2.0})
    for number in range(600):
        queue.add(waiter(f"gold{number}", "gold", number, cost=10))
        queue.add(waiter(f"many{number}", "many", number, cost=10))
        queue.add(waiter(f"big{number}", "big", number, cost=50))
    served = Counter[str]()
    for _ in range(400):
        one = queue.take(set())
        assert one is not None
        served[one.tenant] += int(one.cost)
    assert 1.8 <= served["gold"] / served["many"] <= 2.2
    assert 0.85 <= served["big"] / served["many"] <= 1.15


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue = FairQueue(1_000, 1_000)
    for number in range(500):
        queue.add(waiter(f"f{number}", "flood", number))
    for _ in range(100):
        queue.take(set())
    queue.add(waiter("late", "quiet", 10_000))
    assert "late" in {queue.take(set()).key for _ in range(2)}  # type: ignore[union-attr]


def test_idling_saves_up_no_credit() -> None:
    queue = FairQueue(1_000, 1_000)
    queue.add(waiter("x", "idle"))
    drain(queue)
    for number in range(200):
        queue.add(waiter(f"b{number}", "busy", number))
    for _ in range(100):
        queue.take(set())
    for number in range(50):
        queue.add(waiter(f"i{number}", "idle", number))
    served = Counter(queue.take(set()).tenant for _ in range(40))  # type: ignore[union-attr]
    assert abs(served["idle"] - served["busy"]) <= 2


def test_bounds_streams_apart() -> None:
    queue = FairQueue(3, 2)
    assert queue.add(waiter("a", "x")) is None
    assert queue.add(waiter("b", "x")) is None
    assert queue.add(waiter("c", "x")) is Refusal.TENANT
    assert queue.add(waiter("d", "y")) is None
    assert queue.add(waiter("e", "z")) is Refusal.QUEUE
    assert queue.add(waiter("s", "x", streaming=True)) is None
    first = queue.take(set())
    assert first is not None and first.key == "s"


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "restore", "discard"]), st.sampled_from("xyz"), st.integers(0, 3)),
        max_size=60,
    )
)
def test_against_a_plain_list(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue(8, 4)
    held: dict[str, Waiter] = {}
    out: list[Waiter] = []
    for number, (action, tenant, priority) in enumerate(steps):
        if action == "add":
            one = waiter(str(number), tenant, number, priority, streaming=priority == 3)
            bounded = [w for w in held.values() if not w.streaming]
            refused = not one.streaming and (len(bounded) >= 8 or sum(w.tenant == tenant for w in bounded) >= 4)
            assert (queue.add(one) is not None) == refused
            if not refused:
                held[one.key] = one
        elif action == "take":
            skip = {min(held)} if held and priority == 0 else set()
            taken = queue.take(skip)
            assert (taken is None) == (not set(held) - skip)
            if taken is not None:
                assert taken.key not in skip
                mates = [w for w in held.values() if w.tenant == taken.tenant and w.key not in skip]
                if not taken.streaming:
                    assert not any(w.streaming and w.key not in skip for w in held.values())
                    assert taken == min(w for w in mates if not w.streaming)
                out.append(held.pop(taken.key))
        elif action == "restore" and out:
            back = out.pop()
            queue.restore(back)
            held[back.key] = back
        elif action == "discard" and held:
            key = max(held)
            queue.discard(key)
            del held[key]
        assert len(queue) == len(held) and all(key in queue for key in held)
