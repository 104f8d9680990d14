"""Small tokenizers with the traits that matter: a byte-level one and a metaspace one with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
EOS, BOS, START, END = 1, 2, 4, 5
CONTEXT = 4_096


def byte_level(merges: tuple[tuple[str, str], ...] = (("t", "h"), ("th", "e"), ("l", "l"))) -> Tokenizer:
    """Ids 0–5 are SPECIALS, then 256 bytes, then merges."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


def byte_fallback() -> Tokenizer:
    """Ids 0–5 are SPECIALS, then <0x00>…<0xFF>, then a few pieces."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))))}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz.,!\n", "th", "the", "▁the", "é", "日"):
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, *, chat_template: str | None = None, gemma: bool = True) -> Path:
    """A model's folder as it is downloaded, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "gemma3_text" if gemma else "llama",
        "eos_token_id": EOS,
        "max_position_embeddings": CONTEXT,
    }
    settings: dict[str, object] = {
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True, "normalized": False},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
