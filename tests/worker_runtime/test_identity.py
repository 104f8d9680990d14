"""Fingerprints: what changes them, what must not, and the cache beside the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import Gemma3Config, Qwen3Config

from services.worker.model.descriptor import describe
from services.worker.model.errors import ModelFilesError, UnsupportedDeviceError
from services.worker.model.identity import IDENTITY_FILE, identify, weights_identity
from services.worker.model.load import inspect, load
from services.worker.model.tiny import write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny")
    return tmp_path / "tiny"


def fingerprint(folder: Path) -> str:
    return identify(folder, *inspect(folder, "cpu")).fingerprint


def test_tiny_is_frozen(folder: Path) -> None:
    """Golden: a change here loses every cache of the tiny model, and says that the same would befall real ones."""
    descriptor, variant = inspect(folder, "cpu")
    identity = identify(folder, descriptor, variant)
    assert variant.text == "cpu.float32.none.paged-sdpa.wxt.1"
    assert [(g.name, g.layers) for g in identity.layout.groups] == [
        ("w512-kv2-d16-float32", (0, 2)),
        ("full-kv2-d16-float32", (1, 3)),
    ]
    assert identity.weights == "e31a4c5db509f7610ad854ae279bf23da1fcbef2f865f8ab2c423f441b3c0b6d"
    assert identity.fingerprint == "bc432abf1c6a867e298cc4cfbbab3f8a282f6d224fbea207da1b087cd1868bd4"
    assert descriptor.eos == (1, 5)
    assert descriptor.bos == 2
    assert descriptor.max_context == 32_768


def test_sharding_names_and_unlisted_fields_do_not_matter(folder: Path, tmp_path: Path) -> None:
    expected = fingerprint(folder)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / IDENTITY_FILE).unlink()
    tensors = load_file(moved / "model.safetensors")
    (moved / "model.safetensors").unlink()
    half = sorted(tensors)[: len(tensors) // 2]
    save_file({name: tensors[name] for name in half}, moved / "model-00001-of-00002.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in half}, moved / "model-00002-of-00002.safetensors")
    config = json.loads((moved / "config.json").read_text())
    config |= {"attention_dropout": 0.0, "use_cache": False, "initializer_range": 0.5, "max_position_embeddings": 1024}
    (moved / "config.json").write_text(json.dumps(config))
    (moved / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert fingerprint(moved) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 256},
        {"rms_norm_eps": 1e-5},
        {"hidden_activation": "gelu"},
        {"query_pre_attn_scalar": 64},
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_what_changes_the_numbers_changes_the_fingerprint(folder: Path, change: dict[str, object]) -> None:
    expected = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert fingerprint(folder) != expected


def test_rope_is_part_of_it(folder: Path) -> None:
    expected = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 500_000.0
    (folder / "config.json").write_text(json.dumps(config))
    assert fingerprint(folder) != expected


def test_the_cache_is_used_and_notices_changed_files(folder: Path) -> None:
    expected = weights_identity(folder)
    cache = folder / IDENTITY_FILE
    content = json.loads(cache.read_text())
    cache.write_text(json.dumps(content | {"weights": "f" * 64}))
    assert weights_identity(folder) == "f" * 64, "read from the cache"
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    flipped = tensors[name].copy().view(np.uint32)
    flipped.flat[0] ^= 1
    save_file(tensors | {name: flipped.view(np.float32)}, folder / "model.safetensors")
    assert weights_identity(folder) not in (expected, "f" * 64)
    cache.write_text("{ broken")
    assert len(weights_identity(folder)) == 64


def test_damaged_weights_are_reported(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-10], whole[:4], b"\xff" * 64):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ModelFilesError, match="safetensors"):
            load(folder, "cpu")


@pytest.mark.parametrize(
    ("device", "dtype"), [("tpu", "auto"), ("cuda:99", "auto"), ("cpu", "bfloat16"), ("cpu", "int3")]
)
def test_devices_and_dtypes_that_are_not_served(folder: Path, device: str, dtype: str) -> None:
    with pytest.raises(UnsupportedDeviceError):
        inspect(folder, device, dtype)


def test_families_in_our_own_fields() -> None:
    qwen = describe(Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    assert (qwen.family, qwen.windows, qwen.qk_norm, qwen.head_dim) == ("qwen3", (None, None), True, 32)
    nested = describe(Gemma3Config(text_config={"num_hidden_layers": 7, "sliding_window": 128}))
    assert nested.family == "gemma3"
    assert nested.windows == (128,) * 5 + (None, 128)
    assert [dict(nested.rope_kinds[i])["rope_theta"] for i in nested.rope] == [1e4] * 5 + [1e6, 1e4]
