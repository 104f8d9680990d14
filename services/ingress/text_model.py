"""One served model as ingress sees it: text to token ids and back.

A long text is encoded in a thread, where `tokenizers` runs without the interpreter lock, so that a large prompt does
not delay the streams of others.

A *boundary* is a special token at which a text may be cut so that its two parts, tokenized apart, give the ids of the
whole. The library splits a text at special tokens before anything else looks at it, so this holds for each special
token that is matched in the raw text (`normalized` false), takes no whitespace of its left neighbour (`lstrip`
false), stands anywhere (`single_word` false), and that no other added token can swallow the beginning of.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from services.ingress.detokenizer import TokenBytes, UnsupportedDecoderError
from services.ingress.model_files import ModelFiles, ModelFilesError, read_model_files
from services.ingress.template import ChatTemplate, InvalidTemplateError

# Tokens that end a turn in chat formats whose models name only end-of-sequence in their configuration.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
_INLINE_CHARACTERS = 8_192  # about 2 ms of encoding


class TextModel:
    """Tokenizer, chat template and stop tokens of one served name."""

    def __init__(self, name: str, files: ModelFiles) -> None:
        """Raises ModelFilesError."""
        self.name = name
        self.max_context = files.max_context
        self._tokenizer = files.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        try:
            self.bytes_of = TokenBytes(self._tokenizer)
            self.template = (
                ChatTemplate(files.chat_template, files.named_tokens) if files.chat_template is not None else None
            )
        except (UnsupportedDecoderError, InvalidTemplateError) as error:
            raise ModelFilesError(f"model {name}: {error}") from error
        ends = {i for i, token in added.items() if token.content in _TURN_ENDS and token.special}
        self.stop_ids: tuple[int, ...] = tuple(sorted(files.eos_ids))
        self.chat_stop_ids: tuple[int, ...] = tuple(sorted(files.eos_ids | ends))
        self._prefix = self._prefix_ids(files)
        self.boundary = _boundary_pattern(list(added.values()))

    @classmethod
    def load(cls, name: str, folder: Path, template_file: Path | None = None) -> TextModel:
        """Reads a model's folder (about a second for a vocabulary of 262,144). Raises ModelFilesError."""
        return cls(name, read_model_files(folder, template_file))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    async def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text: nothing is put before or behind it."""
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode(text)
        return await asyncio.to_thread(self._encode, text)

    async def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt: what the model expects at the start (bos) is put there, but never twice."""
        ids = await self.encode(text)
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def _encode(self, text: str) -> list[int]:
        # Of the encode methods only the batched ones run without the interpreter lock.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _prefix_ids(self, files: ModelFiles) -> list[int]:
        """What the post-processor puts before a text; its bos token if the configuration alone asks for one."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a").ids
        prefix = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])
        bos = self._tokenizer.token_to_id(files.named_tokens.get("bos_token", ""))
        return [bos] if not prefix and files.add_bos and bos is not None else list(prefix)


def _boundary_pattern(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
    """Matches at the beginning of every boundary; None if there is none."""
    contents = {token.content for token in added}
    # An added token that ends with the beginning of a special one, or holds it whole, could be matched in its place.
    endings = {text[at:] for text in contents for at in range(1, len(text))}
    inner = "\0".join(text[1:] for text in contents)
    safe = [
        re.escape(token.content)
        for token in added
        if token.special
        and not (token.normalized or token.lstrip or token.single_word)
        and token.content not in inner
        and not any(token.content[:length] in endings for length in range(1, len(token.content) + 1))
    ]
    return re.compile("|".join(sorted(safe, key=len, reverse=True))) if safe else None
