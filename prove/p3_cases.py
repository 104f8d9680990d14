"""Every case of the worker, measured and judged: a table in reports/worker-cases.json and a picture beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from prove.checks import Checks
from prove.judging import Judge
from prove.prose import Prose
from prove.report import REPORTS, Claim, Outcome, Size, common
from prove.stage import Stage
from prove.worker_bench import Bench, backed
from prove.worker_cases import Case, Player

CLAIM = Claim(
    "3-cases",
    "each of the worker's cases measured for histories of 256k, 256k + 1 and 256k + 255 tokens, every field filled, "
    "every answer exact",
    seed=41,
)
CASES = (
    "cold",
    "resident",
    "partial",
    "RAM",
    "ssd",
    "peer",
    "object store",
    "fork",
    "cancelled while restoring",
    "cancelled while prefilling",
    "cancelled while decoding",
    "restart",
    "eviction under pressure",
    "checkpoint under live decode",
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    full = size is Size.FULL
    chunks, new, extra = (4, 48, (0, 1, 255)) if full else (2, 8, (1,))
    async with backed(stage) as backing:
        threads = 2 if full else 1
        room, little = ((2 << 30), (256 << 20)) if full else ((48 << 20), (3 << 20))
        values = {"lanes": 4, "threads": threads}
        async with (
            Bench(backing.folder, {**values, "kv_bytes": room}, backing, warm=full) as bench,
            Bench(backing.folder, {**values, "kv_bytes": little}, backing) as tight,
        ):
            player = Player(bench, tight, Prose(backing.folder, CLAIM.seed), new)
            for rest in extra:
                await player.all(256 * chunks + rest)
        cases = player.cases
        await _judge(cases, Judge(backing.folder, threads))
    return _report(cases, [256 * chunks + rest for rest in extra], full=full)


async def _judge(cases: Sequence[Case], judge: Judge) -> None:
    groups = {str(number): [case.played.generation(number)] for number, case in enumerate(cases)}
    for number, tally in (await judge.judge_groups(groups)).items():
        cases[int(number)].exact = tally.exact


def _report(cases: Sequence[Case], histories: Sequence[int], *, full: bool) -> Outcome:
    rows = [case.row() for case in cases]
    checks = judged(rows, histories)
    missed = [why for case in cases for why in case.played.missed]
    checks.check("each case took its path", [*missed[:10]], [], not missed)
    outcome = checks.outcome({"cases": [*rows]})
    if full:
        REPORTS.mkdir(exist_ok=True)
        write(REPORTS, rows, outcome)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), rows, outcome)
            drawn = (Path(folder) / "worker-cases.png").stat().st_size
            checks.check("picture, bytes", drawn, "> 0", drawn > 0)
            outcome = checks.outcome({"cases": [*rows]})
    return outcome


def judged(rows: Sequence[dict[str, JsonValue]], histories: Sequence[int]) -> Checks:
    """Every case there for every history, every field filled, every answer exact."""
    checks = Checks()
    there = {(row["case"], row["history"]) for row in rows}
    absent: list[JsonValue] = [f"{case} at {at}" for case in CASES for at in histories if (case, at) not in there]
    checks.equal("cases missing", absent, [])
    empty: list[JsonValue] = [
        f"{row['case']}: {name}"
        for row in rows
        for name, value in row.items()
        if value is None or (name in ("pages", "bytes_by_tier") and not value)
    ]
    checks.equal("fields left empty", empty, [])
    timeless: list[JsonValue] = [f"{row['case']}" for row in rows if not row["ttft_ms"] or not row["itl_p50_ms"]]
    checks.equal("cases without times", timeless, [])
    wrong: list[JsonValue] = [f"{row['case']} at {row['history']}" for row in rows if row["exact"] is not True]
    checks.equal("answers not exact", wrong, [])
    return checks


def write(folder: Path, rows: Sequence[dict[str, JsonValue]], outcome: Outcome) -> None:
    """worker-cases.json and worker-cases.png."""
    document = {"name": "worker-cases"} | common(CLAIM, outcome) | {"cases": [*rows]}
    (folder / "worker-cases.json").write_text(json.dumps(document, indent=2) + "\n")
    _draw(folder / "worker-cases.png", rows)


def _draw(path: Path, rows: Sequence[dict[str, JsonValue]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    histories = sorted({int(str(row["history"])) for row in rows})
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True)
    for axis, name, title in (
        (axes[0], "ttft_ms", "time to first token, ms"),
        (axes[1], "itl_p99_ms", "time between tokens, p99, ms"),
    ):
        height = 0.8 / len(histories)
        for offset, history in enumerate(histories):
            found = {str(row["case"]): float(str(row[name])) for row in rows if row["history"] == history}
            places = [index + offset * height for index in range(len(CASES))]
            axis.barh(places, [found.get(case, 0.0) for case in CASES], height, label=f"{history} tokens")
        axis.set_title(title)
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks([index + 0.4 - height / 2 for index in range(len(CASES))], CASES)
    axes[0].invert_yaxis()
    axes[1].legend(title="history")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
