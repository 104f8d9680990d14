"""Every id of the frozen identity: the golden file, the library and an independent implementation say the same, in any
process, whatever seeds its dictionaries; and for inputs nobody wrote down.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

from pydantic import JsonValue

from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "4-golden",
    "golden vectors for every id, recomputed by a second, independent implementation; equal across processes and hash "
    "seeds",
    seed=46,
)
_ROOT = Path(__file__).resolve().parents[1]
_PROCESS_S = 300.0
_BOTH = """
import json, sys
from tests.continuation import reference
from tests.continuation.test_golden import library_vectors
for line in sys.argv[1:]:
    inputs = json.loads(line)
    print(json.dumps([library_vectors(inputs), reference.vectors(inputs)]))
"""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    count, seeds = (60, ("0", "1", "4242", "random")) if size is Size.FULL else (2, ("0", "4242"))
    golden = json.loads((_ROOT / "tests" / "continuation" / "golden.json").read_text())
    inputs = [golden["inputs"], *varied(golden["inputs"], count)]
    checks = Checks()
    said: dict[str, list[list[dict[str, JsonValue]]]] = {}
    for seed in seeds:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = await finished([sys.executable, "-c", _BOTH, *map(json.dumps, inputs)], _PROCESS_S, env=env, cwd=_ROOT)
        checks.equal(f"hash seed {seed}: ended", done.code, 0)
        said[seed] = [json.loads(line) for line in done.stdout.splitlines()]
    judge(checks, said, golden["ids"], len(inputs))
    return checks.outcome({"inputs": len(inputs), "ids": [*golden["ids"]]})


def varied(inputs: dict[str, JsonValue], count: int) -> list[dict[str, JsonValue]]:
    """Other tenants, secrets, models and lengths."""
    draw = random.Random(CLAIM.seed)
    found: list[dict[str, JsonValue]] = []
    for number in range(count):
        other: dict[str, JsonValue] = json.loads(json.dumps(inputs))
        other["tenant"] = "".join(chr(draw.choice([draw.randrange(33, 127), 0xE9, 0x1F600])) for _ in range(9))
        other["secret"] = draw.randbytes(32).hex()
        other["variant"] = f"cpu.float32.none.eager.linear.{number + 2}"
        tensors, arch, chunks = other["tensors"], other["arch"], inputs["token_count"]
        assert isinstance(tensors, list) and isinstance(arch, dict) and isinstance(chunks, int)
        draw.shuffle(tensors)
        arch["hidden"], arch["eps"] = draw.randrange(1, 9_000), draw.random()
        other["token_count"] = chunks + 256 * draw.randrange(4)  # whole chunks: the objects name tails
        found.append(other)
    return found


def judge(
    checks: Checks, said: dict[str, list[list[dict[str, JsonValue]]]], golden: dict[str, JsonValue], inputs: int
) -> None:
    """The golden ids by both, everything by each process alike, and other ids for other inputs."""
    first = next(iter(said.values()))
    checks.equal("inputs answered by each process", [len(one) for one in said.values()], [inputs] * len(said))
    checks.equal("golden ids by the library", bool(first) and first[0][0] == golden, True)
    checks.equal("golden ids by the reference", bool(first) and first[0][1] == golden, True)
    checks.equal("inputs on which the two differ", sum(library != reference for library, reference in first), 0)
    checks.equal("processes that say otherwise", sum(one != first for one in said.values()), 0)
    prints = {json.dumps(library["root"]) for library, _ in first}
    checks.equal("different roots", len(prints), inputs)
