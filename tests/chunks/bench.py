"""What the conformance suite needs of a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libs.chunks.tier import Source, Tier
from libs.continuation.keys import ObjectKey


@dataclass
class Bench:
    """A source, the tier it reads (itself, unless it is a peer), and a way to put bytes under a key behind its back.

    damaged: how many damaged objects the source has counted. aside: it puts damaged bytes out of the way by itself.
    """

    source: Source
    keeper: Tier
    bend: Callable[[ObjectKey, bytes], None]
    damaged: Callable[[], int]
    aside: bool
