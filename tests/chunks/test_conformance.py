"""The suite of `conformance`, on every tier."""

from __future__ import annotations

from tests.chunks.conformance import *  # noqa: F403
