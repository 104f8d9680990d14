"""Our own description of an architecture: the fields that shape the attention state, and nothing else.

A transformers config has dozens of fields, gains new ones with each release, and mixes numerics with training
and file-layout matters. Hashing it would lose every cached chunk at each upgrade. So the listed fields are copied out
once, by family, and everything else in the worker reads the descriptor. What is not listed here does not exist
for the fingerprint; a feature that changes numbers and is not listed must be refused (`UnsupportedArchitectureError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libs.continuation.canonical import JsonValue
from libs.continuation.layout import LayerSpec, Layout
from services.worker.model.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: Mapping[str, str] = {"gemma3_text": "gemma3", "gemma3": "gemma3", "llama": "llama", "qwen3": "qwen3"}
"""transformers `model_type` → family."""

RopeValue = str | int | float | bool | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a model computes, in the units transformers uses (dimensions in elements, windows and context in tokens).

    `windows[i]` is layer i's sliding window including the query itself, or None for full attention: a query at
    position p attends to keys in (p - window, p]. `rope[i]` indexes `rope_kinds` for layer i.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int | None, ...]
    rope: tuple[int, ...]
    rope_kinds: tuple[tuple[tuple[str, RopeValue], ...], ...]
    attention_scale: float
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    norm_eps: float
    activation: str
    final_softcap: float | None
    max_context: int
    bos: int | None
    eos: tuple[int, ...]

    def arch(self) -> dict[str, JsonValue]:
        """The fields that decide the values of K and V, as they enter the fingerprint (frozen).

        Left out are max_context, bos and eos: serving limits, and editing a generation config must not lose a cache.
        """
        return {
            "family": self.family,
            "layers": self.layers,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab": self.vocab,
            "windows": list(self.windows),
            "rope": list(self.rope),
            "rope_kinds": [dict(kind) for kind in self.rope_kinds],
            "attention_scale": self.attention_scale,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
            "tied_head": self.tied_head,
            "norm_eps": self.norm_eps,
            "activation": self.activation,
            "final_softcap": self.final_softcap,
        }

    def layout(self, dtype: str) -> Layout:
        """The layer groups of this model with K and V stored as `dtype` ("float32", "float16", "bfloat16")."""
        return Layout.from_layers(
            LayerSpec(index, window, self.kv_heads, self.head_dim, dtype) for index, window in enumerate(self.windows)
        )


def describe(config: PreTrainedConfig, *, eos: tuple[int, ...] | None = None) -> Descriptor:
    """Reads a transformers config of a supported family; a multimodal Gemma 3 config is read through its text part.

    eos: end-of-sequence ids of a generation config, which win over the config's own.
    Raises UnsupportedArchitectureError for another family, and for features whose numbers would be wrong here.
    """
    family = require_family(config.model_type)
    text = config.get_text_config()
    _refuse_unsupported(text, family)
    layers = int(text.num_hidden_layers)
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kinds, rope = _rope(text, layers)
    scale_base = text.query_pre_attn_scalar if family == "gemma3" else head_dim
    return Descriptor(
        family=family,
        layers=layers,
        hidden=int(text.hidden_size),
        intermediate=int(text.intermediate_size),
        heads=heads,
        kv_heads=int(text.num_key_value_heads),
        head_dim=head_dim,
        vocab=int(text.vocab_size),
        windows=_windows(text, layers),
        rope=rope,
        rope_kinds=kinds,
        attention_scale=float(scale_base) ** -0.5,
        attention_bias=bool(text.attention_bias),
        mlp_bias=bool(getattr(text, "mlp_bias", False)),
        qk_norm=family in ("gemma3", "qwen3"),
        tied_head=bool(text.tie_word_embeddings),
        norm_eps=float(text.rms_norm_eps),
        activation=str(text.hidden_activation if family == "gemma3" else text.hidden_act),
        final_softcap=_optional_float(getattr(text, "final_logit_softcapping", None)),
        max_context=int(text.max_position_embeddings),
        bos=_first_id(text.bos_token_id),
        eos=eos if eos else token_ids(text.eos_token_id),
    )


def require_family(model_type: str) -> str:
    """The family of a transformers `model_type`. Raises UnsupportedArchitectureError, naming what is supported."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedArchitectureError(
            f"architecture {model_type!r} is not supported",
            f"Supported families: {', '.join(sorted(set(FAMILIES.values())))}",
        )
    return family


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's `eos_token_id`, which may be absent, one id or a list."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)


def _first_id(value: int | list[int] | None) -> int | None:
    ids = token_ids(value)
    return ids[0] if ids else None


def _refuse_unsupported(text: PreTrainedConfig, family: str) -> None:
    for field in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(text, field, None):
            raise UnsupportedArchitectureError(
                f"{family} with {field}={getattr(text, field)!r} is not supported",
                "Use a checkpoint without it",
            )
    for kind in _rope_by_type(text).values():
        if kind.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedArchitectureError(
                f"rope type {kind['rope_type']!r} is not supported",
                "Its angles depend on the length of the batch, so cached keys would not be reusable; "
                "use a checkpoint with default, linear, yarn or llama3 scaling",
            )


def _windows(text: PreTrainedConfig, layers: int) -> tuple[int | None, ...]:
    types = getattr(text, "layer_types", None)
    if types is None:
        return (None,) * layers
    return tuple(int(text.sliding_window) if kind == "sliding_attention" else None for kind in types[:layers])


def _rope_by_type(text: PreTrainedConfig) -> dict[str, dict[str, RopeValue]]:
    parameters = text.rope_parameters
    nested = all(isinstance(value, dict) for value in parameters.values())
    return dict(parameters) if nested else {"*": dict(parameters)}


def _rope(text: PreTrainedConfig, layers: int) -> tuple[tuple[tuple[tuple[str, RopeValue], ...], ...], tuple[int, ...]]:
    by_type = _rope_by_type(text)
    types = ["*"] * layers if "*" in by_type else list(text.layer_types[:layers])
    names = list(dict.fromkeys(types))
    kinds = tuple(
        tuple(sorted((key, _frozen(value)) for key, value in by_type[name].items() if value is not None))
        for name in names
    )
    return kinds, tuple(names.index(kind) for kind in types)


def _frozen(value: RopeValue | list[float]) -> RopeValue:
    if isinstance(value, bool | str):
        return value
    return tuple(float(item) for item in value) if isinstance(value, list | tuple) else float(value)


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)
