"""A model for tests that need no prose: Gemma 3's architecture at toy size, with weights everyone can recompute.

Four layers, hidden 64, both kinds of layer (window 512 and full attention), two KV heads under four query heads, a
vocabulary of 512, context 32,768; it loads in well under a second. The weights come from Philox's raw 64-bit
stream, mapped to uniforms by shifts and exact scalings, so that their bits depend on no library's choice of normal
sampler. Scales are chosen for tests: the sublayers outweigh the token's own embedding in the residual stream
(otherwise a tied head echoes its input), sharp attention makes the next token depend on distant ones (otherwise
greedy text falls into a short cycle), and the final norm spreads the logits so that near ties are rare.

The tokenizer is byte-level BPE: any text round-trips, and every id of the vocabulary decodes.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCAB = 512
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
SEED = 20_240_607
_LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")


def write_tiny(folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and tokenizer.json, loadable by plain
    transformers.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _config() -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(_LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "layer_types": list(_LAYERS),
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def _weights() -> dict[str, npt.NDArray[np.float32]]:
    """Every stored tensor. Gemma's norms multiply by (1 + weight), so a constant weight sets the scale after them."""
    hidden, inner, heads, kv_heads, dim = 64, 128, 4, 2, 16
    stream = np.random.Philox(key=SEED)

    def matrix(rows: int, columns: int, scale: float) -> npt.NDArray[np.float32]:
        bits = stream.random_raw(rows * columns)
        uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # [-1, 1), exact
        return (uniform * np.float32(scale)).reshape(rows, columns)

    def norm(size: int, gain: float) -> npt.NDArray[np.float32]:
        return np.full(size, gain - 1.0, dtype=np.float32)

    spread = 3.0**0.5  # a uniform on [-s, s) has standard deviation s / sqrt(3)
    weights = {"model.embed_tokens.weight": matrix(VOCAB, hidden, spread * hidden**-0.5)}
    for index in range(len(_LAYERS)):
        layer = f"model.layers.{index}."
        weights |= {
            layer + "self_attn.q_proj.weight": matrix(heads * dim, hidden, spread * hidden**-0.5),
            layer + "self_attn.k_proj.weight": matrix(kv_heads * dim, hidden, spread * hidden**-0.5),
            layer + "self_attn.v_proj.weight": matrix(kv_heads * dim, hidden, spread * hidden**-0.5),
            layer + "self_attn.o_proj.weight": matrix(hidden, heads * dim, spread * hidden**-0.5),
            layer + "self_attn.q_norm.weight": norm(dim, 2.0),
            layer + "self_attn.k_norm.weight": norm(dim, 2.0),
            layer + "mlp.gate_proj.weight": matrix(inner, hidden, spread * hidden**-0.5),
            layer + "mlp.up_proj.weight": matrix(inner, hidden, spread * hidden**-0.5),
            layer + "mlp.down_proj.weight": matrix(hidden, inner, spread * inner**-0.5),
            layer + "input_layernorm.weight": norm(hidden, 1.0),
            layer + "post_attention_layernorm.weight": norm(hidden, 3.0),
            layer + "pre_feedforward_layernorm.weight": norm(hidden, 1.0),
            layer + "post_feedforward_layernorm.weight": norm(hidden, 2.0),
        }
    weights["model.norm.weight"] = norm(hidden, 4.0)
    return weights


def _merges() -> list[tuple[str, str]]:
    """Two-letter merges that fill the vocabulary up to 512: a space before a letter, then syllables. `Ġ` is a space."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    pairs = [("Ġ", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    pairs += list(product(consonants, vowels)) + list(product(vowels, consonants))
    pairs += [(pair[0], pair[1]) for pair in ("th", "sh", "ch", "st", "nd", "nt", "ss", "ll", "ck", "tr", "pr", "gr")]
    pairs += [("o", "u"), ("e", "a")]
    return pairs


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()
    tokens = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    if len(tokens) != VOCAB or len(set(tokens)) != VOCAB:
        raise AssertionError(f"the tiny vocabulary has {len(tokens)} tokens, not {VOCAB}")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
