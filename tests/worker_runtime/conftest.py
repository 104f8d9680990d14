"""Small models on disk, each with its plain transformers twin as the oracle."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.worker.model.load import LoadedModel, load
from services.worker.model.tiny import write_tiny
from tests.worker_runtime.harness import Harness, Subject


def _random(folder: Path, family: str) -> None:
    """A random checkpoint of another family. Weights are larger than transformers' defaults, so that logits differ."""
    torch.manual_seed(7)
    shared = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "initializer_range": 0.25,
    }
    if family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
        LlamaForCausalLM(LlamaConfig(**shared, rope_parameters=rope)).save_pretrained(folder)
    else:
        layers = ["full_attention", "sliding_attention", "full_attention"]
        window = {"use_sliding_window": True, "sliding_window": 64, "layer_types": layers}
        Qwen3ForCausalLM(Qwen3Config(**shared, **window, tie_word_embeddings=True)).save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    write_tiny(root / "tiny")
    for family in ("llama", "qwen3"):
        _random(root / family, family)
    return {name: root / name for name in ("tiny", "llama", "qwen3")}


@pytest.fixture(scope="session")
def subjects(folders: dict[str, Path]) -> dict[str, Subject]:
    torch.set_num_threads(1)
    return {
        name: Subject(load(folder, "cpu"), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
        for name, folder in folders.items()
    }


@pytest.fixture
def tiny(subjects: dict[str, Subject]) -> Subject:
    return subjects["tiny"]


@pytest.fixture
def model(tiny: Subject) -> LoadedModel:
    return tiny.model


@pytest.fixture
def harness(tiny: Subject) -> Iterator[Harness]:
    with Harness(tiny) as running:
        yield running
