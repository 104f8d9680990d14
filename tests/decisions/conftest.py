from __future__ import annotations

from tests.catalog.conftest import catalog, prefix

__all__ = ["catalog", "prefix"]
