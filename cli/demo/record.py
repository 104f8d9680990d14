"""What the demo collects: turns and checks, and how they are shown and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cli.demo.exact import Case, Verdict
from cli.demo.talk import Answer

PAGE_TOKENS = 16
_ROOMY_COLUMNS = 116
"""So wide a terminal shows every turn on one line."""

Shown = str | float | Sequence[str] | Mapping[str, float]
"""What a check can be about."""


@dataclass
class Turn:
    """One request of the demo."""

    name: str
    what: str
    answer: Answer
    history: int
    """Tokens processed before this turn."""
    verdict: Verdict | None = None
    exact: bool | None = None

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that no earlier turn processed, the pending one included."""
        return self.answer.served.prompt_tokens - self.history

    def case(self) -> Case:
        """For the reference."""
        return Case(self.name, self.answer.served.prompt_token_ids, self.answer.served.token_ids)

    def row(self) -> dict[str, JsonValue]:
        """As in the report."""
        answer, served = self.answer, self.answer.served
        return {
            "name": self.name,
            "what": self.what,
            "worker": served.worker,
            "workers": list(served.workers),
            "epoch": served.epoch,
            "tier": served.tier,
            "history": self.history,
            "prompt_tokens": served.prompt_tokens,
            "cached_tokens": served.cached_tokens,
            "restored_tokens": served.restored_tokens,
            "restored_by_tier": {tier: share.tokens for tier, share in served.restored_by_tier.items()},
            "computed_tokens": served.computed_tokens,
            "new_tokens": self.new_tokens,
            "generated_tokens": len(served.token_ids),
            "ttft_ms": round(answer.ttft_ms, 1),
            "predicted_ttft_ms": round(served.predicted_ttft_ms, 1),
            "gap_ms": round(answer.gap_ms, 1),
            "attempts": served.attempts,
            "tokens_per_s": round(answer.tokens_per_s, 1),
            "token_exact": self.exact,
        }


@dataclass(frozen=True)
class Check:
    """A claim of the demo, judged."""

    name: str
    figure: JsonValue
    limit: JsonValue
    passed: bool


@dataclass
class Record:
    """Everything one run found."""

    turns: list[Turn] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    waits_ms: dict[str, float] = field(default_factory=dict)
    """How long the demo waited for a fact, by what it waited for."""

    def check(self, name: str, figure: Shown, limit: Shown, passed: bool) -> None:
        """Note a verdict."""
        self.checks.append(Check(name, _json(figure), _json(limit), passed))

    @property
    def ok(self) -> bool:
        """Whether every check passed (and there were some)."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def document(self) -> dict[str, JsonValue]:
        """The report's own fields."""
        return {
            "turns": [turn.row() for turn in self.turns],
            "checks": [{"name": c.name, "figure": c.figure, "limit": c.limit, "pass": c.passed} for c in self.checks],
            "waits_ms": {name: round(wait, 1) for name, wait in self.waits_ms.items()},
            "ok": self.ok,
        }

    def show(self, console: Console) -> None:
        """Two tables; 80 columns are enough for every number and name."""
        turns = _table("turns", console)
        # On a narrow terminal, the widths at which these wrap between words and nowhere else.
        for column, width in (("turn", 9), ("what", 10), ("worker", 10), ("tier", 6)):
            turns.add_column(column, width=None if _is_roomy(console) else width)
        for column in ("history", "prompt", "computed", "TTFT\nms", "gap\nms", "exact"):
            turns.add_column(column, justify="right", no_wrap=True)
        for turn in self.turns:
            served = turn.answer.served
            tiers = " + ".join(served.restored_by_tier) or served.tier
            turns.add_row(
                turn.name,
                turn.what,
                " → ".join(served.workers) or served.worker,
                tiers,
                str(turn.history),
                str(served.prompt_tokens),
                str(served.computed_tokens),
                f"{turn.answer.ttft_ms:.0f}",
                f"{turn.answer.gap_ms:.0f}",
                {True: "yes", False: "NO", None: "–"}[turn.exact],
            )
        console.print(turns)
        verdicts = _table("claims", console)
        for column in ("claim", "figure", "limit"):
            verdicts.add_column(column)
        verdicts.add_column("", no_wrap=True)
        for check in self.checks:
            verdicts.add_row(check.name, _cell(check.figure), _cell(check.limit), "pass" if check.passed else "FAIL")
        console.print(verdicts)


def _table(title: str, console: Console) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0) if _is_roomy(console) else 0,
    )


def _is_roomy(console: Console) -> bool:
    return console.width >= _ROOMY_COLUMNS


def _cell(value: JsonValue) -> str:
    """A figure for people: no brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_cell(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _json(shown: Shown) -> JsonValue:
    if isinstance(shown, str | int | float):
        return shown
    return dict(shown.items()) if isinstance(shown, Mapping) else list(shown)


def write_report(path: Path, document: dict[str, JsonValue]) -> None:
    """One JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def draw(record: Record, path: Path) -> None:
    """TTFT of every turn as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{turn.name}  {turn.what}" for turn in record.turns]
    times = [turn.answer.ttft_ms for turn in record.turns]
    colours = {"none": "#b0413e", "gpu": "#2f6f4f", "ssd": "#3a6ea5", "object": "#7a5ea8"}
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(names) + 1.4), layout="constrained")
    bars = axes.barh(names, times, color=[colours.get(turn.answer.served.tier, "#777777") for turn in record.turns])
    axes.bar_label(bars, [f"{time:.0f} ms" for time in times], padding=4)
    axes.set_xlim(right=max(times) * 1.15)
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms")
    axes.set_title("red: computed · green: resident · blue: local disk · violet: object store")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
