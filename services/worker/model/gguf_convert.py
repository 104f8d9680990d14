"""From a GGUF file to a Hugging Face folder: config.json, float32 safetensors, tokenizer.json. Done once per file.

The blocks are dequantised with the gguf package and written under transformers' names. llama.cpp's converter changed
three things that are undone here: Gemma's norms were stored as weight + 1, Llama's query and key rows were interleaved
for its rotary layout, and tensor names were shortened. transformers can do the same, but only with `accelerate`
installed and by building the model; the result is the same bit for bit.

config.json is transformers' own reading of the metadata, the tokenizer its own reconstruction from the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.worker.model.errors import ModelFilesError, UnsupportedArchitectureError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the whole that is done, in [0, 1]."""

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_FAMILY_PARTS = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen3": {"ffn_norm": "post_attention_layernorm"},
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Writes `folder` from `source`. Raises ModelFilesError, UnsupportedArchitectureError. Under a minute for 270M."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    progress("reading the GGUF header", 0.0)
    family = gguf_architecture(source)
    _write_config(source, folder)
    progress("reading the GGUF tensors", 0.3)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, weight, done in _tensors(source, family):
        weights[name] = weight
        progress("dequantising", 0.6 + 0.15 * done)
    progress("writing weights", 0.8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del weights
    progress("building the tokenizer", 0.85)
    _write_tokenizer(source, folder)
    progress("converted", 1.0)


def gguf_architecture(source: Path) -> str:
    """The family a file declares. Raises UnsupportedArchitectureError, ModelFilesError."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(source))
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ModelFilesError(f"{source} is no readable GGUF file ({error})", "Fetch it again") from error
    family = str(metadata["general.architecture"])
    if family not in _FAMILY_PARTS:
        raise UnsupportedArchitectureError(
            f"GGUF architecture {family!r} is not supported", f"Supported: {', '.join(sorted(_FAMILY_PARTS))}"
        )
    if "rope_freqs.weight" in names:
        raise UnsupportedArchitectureError(
            f"{source} scales its rotary frequencies with a tensor, which a config cannot express",
            "Use the model's original safetensors folder",
        )
    return family


def _write_config(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    config.dtype = "float32"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _tensors(source: Path, family: str) -> Iterator[tuple[str, npt.NDArray[np.float32], float]]:
    """(name in transformers, float32 values, fraction done)."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    heads = _count(reader, f"{family}.attention.head_count")
    kv_heads = _count(reader, f"{family}.attention.head_count_kv")
    for index, tensor in enumerate(reader.tensors):
        name = _rename(tensor.name, family, source)
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if family == "gemma3" and name.endswith("norm.weight"):
            weight = weight - np.float32(1.0)
        if family == "llama" and ".q_proj." in name:
            weight = _uninterleave(weight, heads)
        if family == "llama" and ".k_proj." in name:
            weight = _uninterleave(weight, kv_heads)
        yield name, weight, (index + 1) / len(reader.tensors)


def _count(reader: object, key: str) -> int:
    field = reader.get_field(key)  # type: ignore[attr-defined]
    if field is None:
        raise ModelFilesError(f"the GGUF metadata lacks {key}", "Convert the model to GGUF again")
    return int(field.contents())


def _rename(name: str, family: str, source: Path) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None:
        part = _PARTS.get(layer[2]) or _FAMILY_PARTS[family].get(layer[2])
        if part is not None:
            return f"model.layers.{layer[1]}.{part}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.weight", name)
    if top is not None and top[1] in _TOP:
        return f"{_TOP[top[1]]}.weight"
    raise UnsupportedArchitectureError(
        f"{source} holds the tensor {name!r}, which family {family} does not have", "Use a text-only checkpoint of it"
    )


def _uninterleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from pairs (x0, y0, x1, y1, ...) back to halves (x0, x1, ..., y0, y1, ...)."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import GemmaTokenizer, PreTrainedTokenizerFast

    kind = GemmaTokenizer if gguf_architecture(source) == "gemma3" else PreTrainedTokenizerFast
    kind.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)
