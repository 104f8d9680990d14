"""One model's folder for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ingress.models import byte_level, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("byte-level"), byte_level())
