"""`--fresh` forgets a cluster's state, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.embedded.cluster import NotStateError, clear


def test_a_state_directory_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    (tmp_path / "etcd" / "db").write_text("x")
    (tmp_path / "tenant.secret").write_text("00")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


def test_a_directory_with_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(NotStateError, match=r"thesis\.txt"):
        clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["etcd", "thesis.txt"]


def test_nothing_to_clear(tmp_path: Path) -> None:
    clear(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
