"""Loading a model folder onto a device, ready for paged steps.

transformers builds the modules and reads the weights; the attention is ours by name (`runtime.attention`), and so is
the product with the output head, which is part of the numeric recipe:

- `wxt`: logits = (W @ x.T).T. On the CPU, for the few rows of a decode step, the library's own x @ W.T reads
  the transposed weight badly: half the speed at eight rows for Gemma's 262,144 x 640 head.
- `linear`: x @ W.T, on CUDA.

The recipe is fixed per device, never chosen at start, so that workers of one fingerprint agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from libs.continuation.fingerprint import Variant
from services.worker.model.descriptor import Descriptor, describe, require_family, token_ids
from services.worker.model.errors import ModelFilesError, UnsupportedArchitectureError, UnsupportedDeviceError
from services.worker.model.identity import ModelIdentity, identify
from services.worker.runtime.attention import ATTENTION, RECIPE, StepState, register

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REVISION = 1
_HEAD_PRODUCTS = {"cpu": "wxt", "cuda": "linear"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device. `body` maps tokens to final hidden states; `head` is the output matrix `[vocab,
    hidden]`.
    """

    identity: ModelIdentity
    device: torch.device
    dtype: torch.dtype
    body: nn.Module
    head: Tensor

    @property
    def descriptor(self) -> Descriptor:
        return self.identity.descriptor

    def hidden(self, state: StepState) -> Tensor:
        """Final hidden states `[T, hidden]` of a step's rows, whose K and V are now in their pages."""
        step = state.step
        output = self.body(
            input_ids=step.tokens, position_ids=step.positions, use_cache=False, segue_step=state, return_dict=True
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[rows, vocab]` of hidden states `[rows, hidden]`."""
        rows_last = self.identity.variant.head_product == "wxt"
        logits = (self.head @ hidden.T).T if rows_last else hidden @ self.head.T
        cap = self.descriptor.final_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


def resolve_device(device: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:N" to a device that exists. Raises UnsupportedDeviceError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedDeviceError(f"device {device!r} is unknown", "Use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in _HEAD_PRODUCTS:
        raise UnsupportedDeviceError(f"device type {resolved.type!r} is not served", "Use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UnsupportedDeviceError(
            f"device {device!r} does not exist: {torch.cuda.device_count()} CUDA devices are visible",
            "Use --device cpu",
        )
    return resolved


def resolve_dtype(dtype: str, device: torch.device, stored: torch.dtype | None) -> str:
    """ "auto" to the dtype the numbers are computed in: float32 on CPU; on CUDA what the weights are stored in."""
    if dtype == "auto":
        if device.type == "cpu":
            return "float32"
        return {torch.float16: "float16", torch.float32: "float32"}.get(stored or torch.bfloat16, "bfloat16")
    if dtype not in DTYPES:
        raise UnsupportedDeviceError(f"dtype {dtype!r} is unknown", f"Use auto, {', '.join(DTYPES)}")
    if device.type == "cpu" and dtype != "float32":
        raise UnsupportedDeviceError(
            f"dtype {dtype!r} on a CPU is not served (its matrix products are a hundred times slower)",
            "Use float32 or auto",
        )
    return dtype


def inspect(folder: Path, device: str = "auto", dtype: str = "auto") -> tuple[Descriptor, Variant]:
    """Descriptor and resolved variant of a model folder, without reading its weights."""
    from transformers import AutoConfig, GenerationConfig

    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        require_family(str(content.get("model_type")))
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFilesError(
            f"{folder}/config.json cannot be read ({error})", "Point --model at a whole Hugging Face model folder"
        ) from error
    eos: tuple[int, ...] = ()
    if (folder / "generation_config.json").is_file():
        eos = token_ids(GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id)
    descriptor = describe(config, eos=eos)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitectureError(
            f"{folder} holds quantised weights",
            "Use an unquantised checkpoint, or a .gguf file (it is dequantised once)",
        )
    target = resolve_device(device)
    resolved = resolve_dtype(dtype, target, config.get_text_config().dtype)
    return descriptor, Variant(target.type, resolved, "none", RECIPE, _HEAD_PRODUCTS[target.type], _REVISION)


def load(folder: Path, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Loads a folder of config.json and safetensors.

    Raises ModelFilesError, UnsupportedArchitectureError, UnsupportedDeviceError.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # A bar redrawn in place is one endless line in a log.
    disable_progress_bar()
    descriptor, variant = inspect(folder, device, dtype)
    identity = identify(folder, descriptor, variant)
    register()
    target = resolve_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=DTYPES[variant.dtype], attn_implementation=ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelFilesError(f"{folder} cannot be loaded ({error})", "Fetch or convert it again") from error
    nn.Module.to(model, target)
    model.requires_grad_(requires_grad=False)
    model.train(mode=False)
    return LoadedModel(
        identity=identity,
        device=target,
        dtype=DTYPES[variant.dtype],
        body=_text_body(model),
        head=model.lm_head.weight,
    )


def _text_body(model: PreTrainedModel) -> nn.Module:
    """The decoder stack; of a multimodal checkpoint the language part."""
    inner: nn.Module = model.model
    return getattr(inner, "language_model", inner)
