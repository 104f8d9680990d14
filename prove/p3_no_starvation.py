"""Iteration by iteration on the device loop: a prompt beside decoding lanes always advances; one lane does not mix.

The budget is the smallest a worker of eight lanes may have, one token more than lanes, so that nothing but the policy
keeps the prompt's share.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import loaded, tiny_folder
from services.worker.runtime.iteration import Budgets
from services.worker.runtime.job import Event, Failed, Finished, FixedPages, Job, Prefilled, Quiesced, Started, Token
from services.worker.runtime.kv import KVStore
from services.worker.runtime.loop import DeviceLoop

CLAIM = Claim(
    "3-no-starvation",
    "a waiting prompt of 1,000 tokens under 7 decoding lanes gets a token every iteration; one lane never interleaves",
    seed=34,
)
_LANES = 8
_PAGE = 16
_WITHIN_S = 300.0
PROMPT = "prompt"


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    import asyncio

    folder = await tiny_folder(stage)
    length = 1_000 if size is Size.FULL else 160
    beside = await asyncio.to_thread(batches_beside_decodes, folder, length)
    alone = await asyncio.to_thread(batches_of_one_lane, folder)
    checks = Checks()
    problems, iterations = starved(beside, length)
    checks.check("the prompt advances every iteration", [*problems[:5]], [], not problems)
    checks.check("iterations beside seven decoding lanes", iterations, ">= prompt / 2", iterations >= length // 2 - 1)
    mixed = interleaved(alone)
    checks.check("one lane ends what it decodes before it reads the next prompt", [*mixed], [], not mixed)
    return checks.outcome()


def starved(batches: Sequence[Sequence[Event]], length: int) -> tuple[list[str], int]:
    """Iterations in which the prompt did not advance or a lane did not decode; and how many iterations it took."""
    problems: list[str] = []
    computed = iterations = 0
    began = False
    for number, batch in enumerate(batches):
        began = began or any(isinstance(event, Started) and event.key == PROMPT for event in batch)
        if not began or computed >= length:
            continue
        iterations += 1
        reached = [event.computed for event in batch if isinstance(event, Prefilled) and event.key == PROMPT]
        decoded = sum(isinstance(event, Token) and event.key != PROMPT for event in batch)
        if not reached or reached[-1] <= computed:
            problems.append(f"iteration {number}: the prompt stays at {computed}")
        if decoded != _LANES - 1:
            problems.append(f"iteration {number}: {decoded} of {_LANES - 1} lanes decode")
        computed = max([computed, *reached])
    if computed < length:
        problems.append(f"the prompt got to {computed} of {length}")
    return problems, iterations


def interleaved(batches: Sequence[Sequence[Event]]) -> list[str]:
    """Jobs of a single lane that had an event while another one was under way."""
    problems: list[str] = []
    running: object = None
    for event in (event for batch in batches for event in batch):
        if isinstance(event, Started):
            if running is not None:
                problems.append(f"{event.key} started while {running} was under way")
            running = event.key
        elif event.key != running:
            problems.append(f"{type(event).__name__} of {event.key} while {running} was under way")
        elif isinstance(event, Finished | Failed | Quiesced):
            running = None
    return problems


def batches_beside_decodes(folder: Path, length: int) -> list[list[Event]]:
    """Seven lanes decode; then a prompt comes."""
    draw = random.Random(CLAIM.seed)
    # Enough to decode until the prompt, at two tokens an iteration at least, has been read.
    new = length + 40
    loop = _Loop(folder, Budgets(_LANES, _LANES + 1), room=max(new + 64, length + 64))
    decoding = [f"lane {number}" for number in range(_LANES - 1)]
    for name in decoding:
        loop.submit(name, [2, *(draw.randrange(6, 500) for _ in range(5))], new)
    loop.wait(lambda: all(loop.count(name, Token) > 0 for name in decoding))
    loop.submit(PROMPT, [2, *(draw.randrange(6, 500) for _ in range(length - 1))], 1)
    loop.wait(lambda: loop.count(PROMPT, Finished) + loop.count(PROMPT, Failed) > 0 or loop.idle(decoding))
    return loop.close()


def batches_of_one_lane(folder: Path) -> list[list[Event]]:
    """Three jobs at once for a single lane."""
    draw = random.Random(CLAIM.seed + 1)
    loop = _Loop(folder, Budgets(1, 64), room=512)
    for name in "abc":
        loop.submit(name, [2, *(draw.randrange(6, 500) for _ in range(150))], 12)
    loop.wait(lambda: loop.idle("abc"))
    return loop.close()


class _Loop:
    """The device loop over pages enough for everybody, with all it said, iteration by iteration."""

    def __init__(self, folder: Path, budgets: Budgets, room: int) -> None:
        model = loaded(folder)
        layout = model.identity.layout
        self._per_job = -(-room // _PAGE)
        self._groups = [group.name for group in layout.groups]
        kv = KVStore(layout, dict.fromkeys(self._groups, (budgets.lanes + 3) * self._per_job), _PAGE, model.device)
        self._changed = threading.Condition()
        self._batches: list[list[Event]] = []
        self._jobs = 0
        self._loop = DeviceLoop(model, kv, budgets, self._sink, max_context=2 * room, threads=1)
        self._loop.start()

    def submit(self, key: str, tokens: list[int], new: int) -> None:
        pages = list(range(self._jobs * self._per_job, (self._jobs + 1) * self._per_job))
        self._jobs += 1
        self._loop.submit(Job(key, tokens, 0, FixedPages(dict.fromkeys(self._groups, pages)), new, len(tokens)))

    def count(self, key: str, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) and event.key == key for batch in self._batches for event in batch)

    def idle(self, keys: Sequence[str]) -> bool:
        return all(self.count(key, Finished) + self.count(key, Failed) for key in keys)

    def wait(self, condition: object) -> None:
        assert callable(condition)
        with self._changed:
            if not self._changed.wait_for(condition, _WITHIN_S):
                raise TimeoutError(f"the device loop did not get there within {_WITHIN_S:g} s")

    def close(self) -> list[list[Event]]:
        self._loop.close()
        return self._batches

    def _sink(self, events: Sequence[Event]) -> None:
        with self._changed:
            self._batches.append(list(events))
            self._changed.notify_all()
