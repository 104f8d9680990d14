"""A shutdown step that blocks the event loop cannot keep the process alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_stuck_process_is_ended_by_its_watchdog() -> None:
    program = "import time; from libs.service.lifecycle import _exit_after; _exit_after(0.2); time.sleep(60)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 1
    assert "shutdown is stuck after 0.2 s" in ended.stderr
