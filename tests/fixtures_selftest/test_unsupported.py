"""The summary line of what this machine cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_unsupported_tests_are_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import pytest\n"
        "def test_a(): pytest.skip('unsupported here: no mounts')\n"
        "def test_b(): pytest.skip('unsupported here: no mounts')\n"
        "def test_c(): pytest.skip('another reason')\n"
        "def test_d(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unsupported here: no mounts (2)" in done.stdout
    assert "another reason" not in done.stdout
