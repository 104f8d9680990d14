"""What an echo worker declares: its costs, its tokens, and an identity like a model's.

The token drawn for output index i is the prompt's token at i (plus the seed where sampling is not greedy), cyclically,
stop tokens left out. It depends on nothing else: not on the worker, the batch or the attempt, so a resumed generation
goes on as if nothing had happened. The state of a prefix is nothing but its bookkeeping: pages are reserved, shared and
evicted like a model's, but hold no bytes, so an echo worker neither checkpoints nor restores.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.continuation.chain import CHUNK_TOKENS
from libs.continuation.fingerprint import Variant, fingerprint
from libs.continuation.hashing import derive
from libs.continuation.layout import LayerSpec as Layer
from libs.continuation.layout import Layout
from libs.controller.catalog_facts import LayerGroup, Model
from libs.controller.protocol import GenerationRequest

WINDOW = 512
LAYOUT = Layout.from_layers([Layer(0, None, 1, 64, "float32"), Layer(1, WINDOW, 1, 64, "float32")])
"""One full-attention and one windowed layer, as if."""


@dataclass(frozen=True, slots=True)
class EchoCosts:
    """`prefill_ms`: per prompt token. `decode_ms`: per step, whatever the number of lanes. `step_tokens`: rows per
    step.
    """

    prefill_ms: float = 0.05
    decode_ms: float = 5.0
    lanes: int = 8
    step_tokens: int = 512


def echo_model(name: str, max_context: int, vocab: int) -> Model:
    """The identity of the echo model of that name: equal on every worker that declares the same."""
    weights = derive("weights", "echo", name, vocab).hex()
    variant = Variant("cpu", "float32", "none", "echo", "none", 1)
    groups = tuple(
        LayerGroup(group.name, group.layers, group.window or 0, group.kv_heads, group.head_dim, group.dtype)
        for group in LAYOUT.groups
    )
    return Model(
        fingerprint(weights, {"family": "echo"}, LAYOUT, variant),
        groups,
        CHUNK_TOKENS,
        weights,
        variant.text,
        max_context,
        vocab_size=vocab,
    )


def echo_token(request: GenerationRequest, index: int) -> int:
    """The token at output index `index`, over all attempts."""
    stops = frozenset(request.stop_token_ids)
    cycle = [token for token in request.tokens[: request.output_start] if token not in stops] or [0]
    offset = request.sampling.seed if request.sampling.temperature > 0 else 0
    return cycle[(index + offset) % len(cycle)]
