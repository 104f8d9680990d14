"""`make k8s-check` as it is called, on what is in the repository and on a copy with a fault in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.k8s_check import ROOT, check, folders, main


def test_base_and_every_overlay_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == ["k8s/base", "k8s/overlays/cuda", "k8s/overlays/embedded"]
    assert all("no problems" in line and not line.startswith("0 ") for line in printed)


def test_called_by_its_path() -> None:
    done = subprocess.run([sys.executable, "tools/k8s_check.py"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_overlay_that_cannot_be_rendered_is_a_problem(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    broken = tmp_path / "k8s" / "overlays" / "cuda" / "kustomization.yaml"
    broken.write_text(broken.read_text().replace("../../base", "../../bas"))
    assert broken.parent in folders(tmp_path / "k8s")
    count, (problem,) = check(broken.parent)
    assert count == 0
    assert problem.startswith("cuda cannot be rendered")


def test_misspelt_setting_in_a_file_is_a_problem(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    settings = tmp_path / "k8s" / "base" / "settings.env"
    settings.write_text(settings.read_text() + "SEGUE_WORKER_LANE=4\n")
    _, found = check(tmp_path / "k8s" / "base")
    assert any("SEGUE_WORKER_LANE" in problem for problem in found)
