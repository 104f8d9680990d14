"""Token ids to text, one token at a time, never a broken character.

Every token of the two decoder families that causal language models use stands for a fixed sequence of bytes:

- byte level (GPT-2, Llama 3, Qwen, Mistral Tekken): each character of the token names one byte;
- metaspace with byte fallback (Llama 2, Mistral, Gemma): `▁` is a space, `<0xE4>` is one byte, the rest is UTF-8.

So text is the UTF-8 decoding of the bytes' concatenation, which an incremental decoder yields at constant cost a token,
holding back at most three bytes of an unfinished character. Malformed bytes become U+FFFD by the "maximal subpart"
practice (Unicode 15, section 3.9), as `tokenizers` does for byte-level vocabularies; for byte fallback `tokenizers`
replaces every byte of a run that holds one bad byte, this module only the bad ones. Special tokens have no text.

Text is read in the context of the prompt: the space that a metaspace decoder strips from the beginning of a whole
text is kept, because generated text is not the beginning.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_METASPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoderError(ValueError):
    """The tokenizer's decoder is of neither family."""


class TokenBytes:
    """The bytes of each token id of one tokenizer. Looked up once per id; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedDecoderError."""
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = "ByteLevel" in kinds
        known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if not kinds or kinds - known:
            raise UnsupportedDecoderError(
                f"the tokenizer's decoder is {sorted(kinds - known) or 'missing'}: "
                "a byte-level or a metaspace decoder is needed, as nearly every causal language model has"
            )
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for special tokens and for ids the tokenizer does not know (rows that pad an embedding)."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            named = [_BYTE_OF.get(character) for character in token]
            # An added token may hold characters that name no byte; then it stands for itself.
            return token.encode() if None in named else bytes(byte for byte in named if byte is not None)
        as_byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(as_byte[1], 16)]) if as_byte else token.replace(_METASPACE, " ").encode()


class Detokenizer:
    """One text in the making. The concatenation of all `feed` results and `finish` is the text of all ids."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; may be none."""
        return self._decoder.decode(self._table[token_id])

    @property
    def complete(self) -> bool:
        """Whether no unfinished character is held back."""
        return not self._decoder.getstate()[0]

    def finish(self) -> str:
        """U+FFFD for a character that never became complete; otherwise nothing."""
        return self._decoder.decode(b"", final=True)


def text_of(table: TokenBytes, ids: Sequence[int]) -> str:
    """The whole text of some ids."""
    return b"".join(table[token_id] for token_id in ids).decode("utf-8", "replace")


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    # Pickling state is the decoder's JSON; to_str() would serialize the vocabulary too (33 MB for Gemma).
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    for part in parts:
        if part["type"] == "Replace" and (part["pattern"] != {"String": _METASPACE} or part["content"] != " "):
            return {f"Replace({part['pattern']} → {part['content']!r})"}
    return {part["type"] for part in parts}


def _byte_names() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes name themselves, the others the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return names | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_names()
