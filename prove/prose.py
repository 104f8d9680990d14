"""Prompts from prose, by seed: sentences of one text in ever other orders, from ever other places, of any length."""

from __future__ import annotations

import random
import re
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

_SENTENCE = re.compile(r"(?<=[.!?])\s+")


class Prose:
    """A seeded source of prompts, as token ids of one model."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = files("cli.demo").joinpath("text.txt").read_text(encoding="utf-8")
        self._sentences = [sentence for sentence in _SENTENCE.split(text) if len(sentence) > 20]
        self._draw = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """Exactly `length` ids, the beginning of a text that no other prompt of this source begins with."""
        ids = self.ids(self._passage(length), special=True)
        while len(ids) < length:
            ids += self.continuation(length - len(ids))
        return ids[:length]

    def continuation(self, length: int) -> list[int]:
        """Exactly `length` ids that may follow anything."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self.ids(" " + self._passage(length), special=False)
        return ids[:length]

    def ids(self, text: str, *, special: bool) -> list[int]:
        """Of a text; `special`: with what the model wants at a beginning."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return found

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _passage(self, length: int) -> str:
        """A run of the text's own order where that is long, then sentences at random."""
        first = self._draw.randrange(len(self._sentences))
        run = self._sentences[first : first + self._draw.randint(1, 8)]
        rest = self._draw.sample(self._sentences, min(len(self._sentences), max(1, length // 12)))
        # The first words differ too: without them many prompts would share a whole first chunk.
        opening = f"{self._draw.randrange(1, 400)} days later. "
        return opening + " ".join([*run, *rest])
