"""`segue demo`: a conversation survives a killed worker, token for token. As a slice, the model-free one."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from prove.processes import finished
from prove.report import REPORTS, Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim("2-demo", "segue demo passes: every turn exact, restored turns compute only what is new; --echo in 15 s")
ECHO_WITHIN_S = 15.0
_FULL_WITHIN_S = 2_400.0


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    if size is Size.FULL:
        REPORTS.mkdir(exist_ok=True)
        return await _demo((), REPORTS / "demo.json", _FULL_WITHIN_S)
    with tempfile.TemporaryDirectory() as folder:
        return await _demo(("--echo",), Path(folder) / "demo-echo.json", ECHO_WITHIN_S)


async def _demo(flags: tuple[str, ...], report: Path, within: float) -> Outcome:
    report.unlink(missing_ok=True)  # noqa: ASYNC240 - nothing else runs here
    argv = [sys.executable, "-m", "cli", "demo", *flags, "--report", str(report.parent)]
    ended = await finished(argv, 2 * within)
    if not report.exists():  # noqa: ASYNC240
        return Outcome({"exit_code": ended.code, "said": ended.output[-2_000:]}, "a report", passed=False)
    document = json.loads(report.read_text())  # noqa: ASYNC240
    failed = [check["name"] for check in document["checks"] if not check["pass"]]
    turns = len(document["turns"])
    figure = {"checks": len(document["checks"]), "failed": failed, "turns": turns, "seconds": round(ended.seconds, 1)}
    passed = ended.code == 0 and document["ok"] and turns > 0 and ended.seconds <= within
    limit = {"failed": [], "seconds": within}
    return Outcome(figure, limit, passed, {"turns": document["turns"], "checks": document["checks"]})
