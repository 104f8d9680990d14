"""The text of one generated choice: tokens in, showable text out, and why it ended.

Tokens are taken one by one, however they were batched on the way, so that a stop string ends the choice at the very
token that completes it and usage counts the tokens up to there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from services.ingress.detokenizer import Detokenizer, TokenBytes
from services.ingress.stop_strings import StopMatcher

FinishReason = Literal["stop", "length"]


class ChoiceText:
    """One choice. `ids` are the tokens taken, `text` is what was shown."""

    def __init__(self, table: TokenBytes, stop_strings: Sequence[str], stop_ids: Collection[int]) -> None:
        self._detokenizer = Detokenizer(table)
        self._matcher = StopMatcher(stop_strings)
        self._stop_ids = frozenset(stop_ids)
        self._shown: list[str] = []
        self.ids: list[int] = []
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """New text to show. Once `stopped`, further tokens are neither shown nor counted."""
        shown = []
        for token in tokens:
            if self.stopped:
                break
            self.ids.append(token)
            if token in self._stop_ids:
                self.stopped = True  # its own text, if it has any, is not part of the answer
            else:
                shown.append(self._match(self._detokenizer.feed(token)))
        return self._show("".join(shown))

    def finish(self) -> str:
        """The rest of the text: nothing after a stop string."""
        tail = self._matcher.feed(self._detokenizer.finish())
        self.stopped = self.stopped or self._matcher.matched is not None
        return self._show(tail + self._matcher.finish())

    @property
    def text(self) -> str:
        return "".join(self._shown)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return self._matcher.matched

    @property
    def finish_reason(self) -> FinishReason:
        """Of an ended choice."""
        return "stop" if self.stopped else "length"

    def _match(self, text: str) -> str:
        shown = self._matcher.feed(text) if text else ""
        self.stopped = self._matcher.matched is not None
        return shown

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
