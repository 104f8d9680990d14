"""Both sides of `2-speed`, in one process: the worker's device loop, and the bare transformers forward.

    python -m prove.speed_rounds '{"folder": …, "threads": 2, "prompt": 256, "steps": 32, "prefill": 1000, "rounds": 5}'

prints JSON. Sides take turns, ours first (A B A B …), each round in ms: of a decode step over 1 and 8 lanes (the mean
of `steps` of them), and of a whole prefill. Both use the same weights, threads and prompts and choose greedily; no two
rounds share a prompt. Ours is timed at the sink, where the worker's shell takes over: sampling, page tables and
scheduling are in it.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from services.worker.model.load import LoadedModel, load
from services.worker.runtime.iteration import Budgets
from services.worker.runtime.job import Event, Failed, Finished, FixedPages, Job, Token
from services.worker.runtime.kv import KVStore
from services.worker.runtime.loop import DeviceLoop

LANES = 8
STEP_TOKENS = 512
"""As a worker's settings have them."""
_PAGE = 16
_FIRST_PLAIN_ID = 100
_WITHIN_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What to run. `prompt`: tokens each lane has read before it decodes."""

    folder: str
    threads: int
    prompt: int
    steps: int
    prefill: int
    rounds: int
    seed: int = 0


@dataclass
class Rounds:
    """ms per round of one case, of either side, and the tokens each chose."""

    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    same_tokens: int = 0
    tokens: int = 0

    def add(self, ours: tuple[float, list[int]], bare: tuple[float, list[int]]) -> None:
        self.ours.append(ours[0])
        self.bare.append(bare[0])
        pairs = list(zip(ours[1], bare[1], strict=False))
        self.same_tokens += sum(one == other for one, other in pairs)
        self.tokens += len(pairs)


class Ours:
    """The worker's loop over its own pages, with nothing around it."""

    def __init__(self, model: LoadedModel, plan: Plan) -> None:
        room = max(plan.prefill, plan.prompt + 4 * plan.steps) + _PAGE
        per_job = -(-room // _PAGE)
        layout = model.identity.layout
        self._groups = [group.name for group in layout.groups]
        self._per_job = per_job
        kv = KVStore(layout, dict.fromkeys(self._groups, LANES * per_job), _PAGE, model.device)
        budgets = Budgets(LANES, STEP_TOKENS)
        self._loop = DeviceLoop(model, kv, budgets, self._sink, max_context=room, threads=plan.threads)
        self._changed = threading.Condition()
        self._batches: list[tuple[float, list[Event]]] = []
        self._loop.start()

    def close(self) -> None:
        self._loop.close()

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[int]]:
        """Mean ms of the iterations in which every lane decodes; the first lane's tokens."""
        # Lanes begin one after the other as their prompts are read; the slack lets them overlap for `steps` at least.
        batches = self._run(prompts, steps + len(prompts) * -(-len(prompts[0]) // (STEP_TOKENS // 2)) + 2)
        whole = [at for at, events in batches if sum(isinstance(e, Token) for e in events) == len(prompts)]
        whole = whole[: steps + 1]
        if len(whole) <= steps:
            raise RuntimeError(f"{len(whole)} iterations had all {len(prompts)} lanes decode: {steps + 1} are needed")
        tokens = [e.token for _, events in batches for e in events if isinstance(e, Token) and e.key == 0]
        return (whole[-1] - whole[0]) / steps * 1e3, tokens[: steps + 1]

    def prefill(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        """ms from the submission to the first token."""
        began = time.perf_counter()
        batches = self._run([prompt], 1)
        at, token = next((at, e.token) for at, events in batches for e in events if isinstance(e, Token))
        return (at - began) * 1e3, [token]

    def _run(self, prompts: Sequence[Sequence[int]], new: int) -> list[tuple[float, list[Event]]]:
        self._batches = []
        for key, tokens in enumerate(prompts):
            pages = list(range(key * self._per_job, (key + 1) * self._per_job))
            tables = FixedPages(dict.fromkeys(self._groups, pages))
            self._loop.submit(Job(key, tokens, 0, tables, new, len(tokens)))
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended() == len(prompts), _WITHIN_S):
                raise TimeoutError(f"the loop did not end {len(prompts)} jobs within {_WITHIN_S:g} s")
        return self._batches

    def _ended(self) -> int:
        events = [event for _, batch in self._batches for event in batch]
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return sum(isinstance(event, Finished) for event in events)

    def _sink(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        with self._changed:
            self._batches.append((now, list(events)))
            self._changed.notify_all()


class Bare:
    """transformers' forward with its own cache and attention, and nothing else."""

    def __init__(self, folder: Path) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model = loaded.eval()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[int]]:
        cache = DynamicCache(config=self._model.config)
        last = self._step(torch.tensor(prompts), cache)
        tokens = [int(last[0])]
        began = time.perf_counter()
        for _ in range(steps):
            last = self._step(last[:, None], cache)
            tokens.append(int(last[0]))
        return (time.perf_counter() - began) / steps * 1e3, tokens

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        began = time.perf_counter()
        last = self._step(torch.tensor([prompt]), DynamicCache(config=self._model.config))
        return (time.perf_counter() - began) * 1e3, [int(last[0])]

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return best


def play(plan: Plan) -> dict[str, Rounds]:
    """All rounds, after one that counts for nothing."""
    torch.set_num_threads(plan.threads)
    model = load(Path(plan.folder), "cpu")
    ours, bare = Ours(model, plan), Bare(Path(plan.folder))
    draw = random.Random(plan.seed)

    def prompt(length: int) -> list[int]:
        return [2, *(draw.randrange(_FIRST_PLAIN_ID, model.descriptor.vocab) for _ in range(length - 1))]

    found: dict[str, Rounds] = {}

    def case(name: str, one: Callable[[], tuple[tuple[float, list[int]], tuple[float, list[int]]]]) -> None:
        one()
        found[name] = Rounds()
        for _ in range(plan.rounds):
            found[name].add(*one())

    def decode(lanes: int) -> tuple[tuple[float, list[int]], tuple[float, list[int]]]:
        prompts = [prompt(plan.prompt) for _ in range(lanes)]
        return ours.decode(prompts, plan.steps), bare.decode(prompts, plan.steps)

    def prefill() -> tuple[tuple[float, list[int]], tuple[float, list[int]]]:
        tokens = prompt(plan.prefill)
        return ours.prefill(tokens), bare.prefill(tokens)

    try:
        for lanes in (1, LANES):
            case(f"decode, {lanes} lanes" if lanes > 1 else "decode, 1 lane", lambda lanes=lanes: decode(lanes))
        case(f"prefill, {plan.prefill} tokens", prefill)
    finally:
        ours.close()
    return found


if __name__ == "__main__":
    result = play(Plan(**json.loads(sys.argv[1])))
    print(json.dumps({name: asdict(rounds) for name, rounds in result.items()}))
