"""Resolving `--model`: what is made is whole or absent, made once, and every mistake has a clear error."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from services.worker.model import source
from services.worker.model.errors import (
    HubUnreachableError,
    ModelError,
    ModelFilesError,
    ModelMissingError,
    UnsupportedArchitectureError,
)
from services.worker.model.gguf_convert import convert_gguf
from services.worker.model.load import inspect
from services.worker.model.source import resolve
from services.worker.model.tiny import write_tiny


def quiet(what: str, fraction: float) -> None:
    assert what
    assert 0.0 <= fraction <= 1.0


def test_tiny_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    first = resolve("tiny", tmp_path / "a", quiet)
    second = resolve("tiny", tmp_path / "b", quiet)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny", tmp_path / "a", quiet) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp, "made once"


def test_tiny_speaks_varied_text_and_any_text_round_trips(tmp_path: Path) -> None:
    folder = resolve("tiny", tmp_path, quiet)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "Any text: naïve — 日本語\n\t😀  two spaces"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    out = model.generate(torch.tensor([ids]), max_new_tokens=120, do_sample=False, eos_token_id=None)[0, len(ids) :]
    assert len(set(out.tolist())) > 30
    logits = model(out[None]).logits[0].detach().topk(2).values
    assert float((logits[:, 0] - logits[:, 1]).median()) > 0.2
    special = [tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>")]
    assert special == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nope", "missing.gguf", "gemma-9", "a/b/c"])
def test_missing_models_say_what_is_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelMissingError, match=r"Built in: gemma3-270m, tiny"):
        resolve(name, tmp_path, quiet)


def test_folders_without_parts(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        resolve(str(tmp_path), tmp_path, quiet)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="safetensors"):
        resolve(str(tmp_path), tmp_path, quiet)


def test_unsupported_architectures_name_the_supported(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for model_type in ("gpt2", "no-such-architecture"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        with pytest.raises(UnsupportedArchitectureError, match=r"gemma3, llama, qwen3"):
            inspect(tmp_path, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 50.0}))
    with pytest.raises(UnsupportedArchitectureError, match="attn_logit_softcapping"):
        inspect(tmp_path, "cpu")


def test_no_connection_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(HubUnreachableError, match="pass a local model folder"):
        resolve("nobody/nothing-here", tmp_path, quiet)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    for name, error in (("model.gguf", "no readable GGUF"), ("model.bin", "not a .gguf file")):
        file = tmp_path / name
        file.write_bytes(b"not a model" * 10)
        with pytest.raises(ModelFilesError, match=error):
            resolve(str(file), tmp_path / "cache", quiet)
    leftovers = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert leftovers == [], "nothing half made is left"


def _build_slowly(
    cache: Path, started: multiprocessing.synchronize.Event, go: multiprocessing.synchronize.Event
) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        started.set()
        go.wait(30)
        write_tiny(folder)

    source._cached(cache, "slow", build, quiet)


def test_a_killed_conversion_is_never_used_and_a_second_one_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started, go = context.Event(), context.Event()
    victim = context.Process(target=_build_slowly, args=(tmp_path, started, go))
    victim.start()
    assert started.wait(60)
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join(30)
    assert not (tmp_path / "slow").exists()

    started, go = context.Event(), context.Event()  # the killed process may hold the old ones
    builder = context.Process(target=_build_slowly, args=(tmp_path, started, go))
    builder.start()
    assert started.wait(60)
    waited: list[str] = []

    def watch(what: str, _: float) -> None:
        waited.append(what)
        go.set()

    def never(_: Path) -> None:
        raise AssertionError("converted twice")

    folder = source._cached(tmp_path, "slow", never, watch)
    builder.join(30)
    assert builder.exitcode == 0
    assert waited
    assert "another process" in waited[0]
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["slow"]


def test_llama_gguf_converts_back_to_the_model_it_came_from(tmp_path: Path) -> None:
    """Written as llama.cpp's converter writes it (names, interleaved query and key rows); read back bit for bit."""
    from gguf import GGUFWriter

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(65 + i) for i in range(63)] + ["AB"])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    for key, value in model.state_dict().items():
        array = value.numpy()
        head = {
            "model.embed_tokens.weight": "token_embd",
            "model.norm.weight": "output_norm",
            "lm_head.weight": "output",
        }
        if key in head:
            writer.add_tensor(f"{head[key]}.weight", array)
            continue
        _, _, layer, rest = key.split(".", 3)
        part = rest.removesuffix(".weight")
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
        if heads:
            array = array.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", quiet)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert again.config.model_type == "llama"
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    ids = torch.arange(40)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_every_error_carries_a_remedy() -> None:
    error = ModelMissingError("model 'x' is missing", "Pass another")
    assert isinstance(error, ModelError)
    assert str(error) == "model 'x' is missing. Pass another"
