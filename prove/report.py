"""What a claim is and how its outcome is written: `reports/<name>.json`."""

from __future__ import annotations

import enum
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"


class Size(enum.Enum):
    """How much of a claim to run."""

    SLICE = "slice"
    """Seconds, on the tiny model and the shared cluster: part of the test suite."""
    FULL = "full"
    """The size the claim states."""


@dataclass(frozen=True)
class Outcome:
    """What a claim's program found."""

    figure: JsonValue
    """The measured value or values."""
    limit: JsonValue
    """What they are held against."""
    passed: bool
    details: dict[str, JsonValue] = field(default_factory=dict)
    """Whatever helps to understand the figure."""


@dataclass(frozen=True)
class Claim:
    """A line of an issue's "must show"."""

    name: str
    """`<issue>-<slug>`."""
    text: str
    seed: int = 0


def machine() -> str:
    """Processor, cores, memory and Python, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """The commit under test, marked `+changes` when the work tree differs from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


def common(claim: Claim, outcome: Outcome) -> dict[str, JsonValue]:
    """The fields every report has at its top level."""
    return {
        "claim": claim.text,
        "commit": commit(),
        "machine": machine(),
        "seed": claim.seed,
        "figure": outcome.figure,
        "limit": outcome.limit,
        "pass": outcome.passed,
    }


def write(claim: Claim, outcome: Outcome, size: Size = Size.FULL) -> Path:
    """Write the claim's report; returns its path."""
    REPORTS.mkdir(exist_ok=True)
    path = REPORTS / f"{claim.name}.json"
    document = {"name": claim.name, "size": size.value} | common(claim, outcome) | outcome.details
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
