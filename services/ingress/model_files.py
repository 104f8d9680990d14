"""What ingress reads of a model's folder: the tokenizer and a few small JSON files, never weights.

Files: `tokenizer.json` (required), `tokenizer_config.json` (named special tokens, chat template, add_bos_token),
`chat_template.jinja`, `generation_config.json` and `config.json` (end-of-sequence ids, longest context, family).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

GEMMA_TEMPLATE = Path(__file__).parent / "templates" / "gemma3.jinja"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ModelFilesError(ValueError):
    """A model's folder cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, read."""

    tokenizer: Tokenizer
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """E.g. bos_token → `<bos>`: the variables a chat template may use."""
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    """Whether the configuration asks for a leading bos token, whatever the tokenizer's post-processor does."""
    chat_template: str | None = None
    """Jinja source; None: the model has none and is of no family with a shipped one."""
    max_context: int | None = None
    """Longest sequence the configuration names, tokens."""


def read_model_files(folder: Path, template_file: Path | None = None) -> ModelFiles:
    """Reads `folder`. `template_file` overrides the model's own template. Raises ModelFilesError."""
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    named = {name: token for name in _NAMED_TOKENS if (token := _token_text(settings.get(name))) is not None}
    eos = [tokenizer.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for source in (generation, config, text_config or {}):
        listed = source.get("eos_token_id")
        eos += listed if isinstance(listed, list) else [listed]
    context = config.get("max_position_embeddings") or (text_config or {}).get("max_position_embeddings")
    return ModelFiles(
        tokenizer=tokenizer,
        named_tokens=named,
        eos_ids=frozenset(token for token in eos if isinstance(token, int)),
        add_bos=settings.get("add_bos_token") is True,
        chat_template=_template(folder, settings, config, template_file),
        max_context=context if isinstance(context, int) else None,
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesError(f"{path} does not exist: give a folder that holds the model's tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFilesError(f"{path} is no tokenizer: {error}; download the model again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} holds no JSON object; download the model again")
    return content


def _token_text(value: object) -> str | None:
    """Named tokens are strings, or objects with their `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], override: Path | None
) -> str | None:
    """Override, then the model's own file, then the one in tokenizer_config.json, then the shipped one of its
    family."""
    for path in (override, folder / "chat_template.jinja"):
        if path is not None and (path == override or path.is_file()):
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFilesError(f"{path} cannot be read: {error}; give a readable chat template") from error
    own = settings.get("chat_template")
    if isinstance(own, list):  # several, by name
        own = next((entry.get("template") for entry in own if entry.get("name") == "default"), None)
    if isinstance(own, str):
        return own
    if str(config.get("model_type", "")).startswith("gemma3"):
        return GEMMA_TEMPLATE.read_text(encoding="utf-8")
    return None
