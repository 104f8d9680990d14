from __future__ import annotations

from tests.catalog.conftest import prefix

__all__ = ["prefix"]
