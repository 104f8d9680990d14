"""Named logits masks: what `sampling.grammar` may name on this worker.

A grammar engine is no part of the runtime: whoever assembles a worker hands in factories by name. A factory makes the
state of one generation; the sampler advances it over every output token, replayed ones included, and asks it before
each draw (`sampling.LogitsMask`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.worker.runtime.errors import RuntimeRefusalError
from services.worker.runtime.sampling import LogitsMask

MaskFactory = Callable[[], LogitsMask]
"""A fresh state, at the beginning of the output."""


class UnknownGrammarError(RuntimeRefusalError):
    """The request names a grammar that this worker does not have."""

    def __init__(self, name: str, known: Mapping[str, MaskFactory]) -> None:
        there = ", ".join(sorted(known)) if known else "none"
        super().__init__(
            f"grammar {name!r} is not known to this worker (it has: {there}); leave it empty for no grammar"
        )
        self.grammar = name


def mask_of(name: str, known: Mapping[str, MaskFactory]) -> LogitsMask | None:
    """The mask of a request; None where it names none. Raises UnknownGrammarError."""
    if not name:
        return None
    factory = known.get(name)
    if factory is None:
        raise UnknownGrammarError(name, known)
    return factory()
