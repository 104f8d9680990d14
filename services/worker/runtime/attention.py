"""Paged attention, registered with transformers' `AttentionInterface` under ATTENTION.

A model whose config names this implementation calls it once per layer with the projected and rotated rows of a step
and the step itself as an extra keyword (`segue_step`). It stores the rows' K and V in their pages, gathers the pages
each block of rows may see and attends with scaled dot products. transformers builds no mask for an
implementation it does not know, and no cache object is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from services.worker.runtime.kv import KVStore
from services.worker.runtime.step import Step

ATTENTION = "segue_paged"
RECIPE = "paged-sdpa"
"""The name of this attention in a variant: a change of its numbers beyond a float tie needs a new revision."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What one forward pass hands to every layer."""

    step: Step
    kv: KVStore


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segue_step: StepState,
    **_: object,
) -> tuple[Tensor, None]:
    """query `[1, heads, T, head_dim]`, key, value `[1, kv_heads, T, head_dim]` → `[1, T, heads, head_dim]`."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    step, kv = segue_step.step, segue_step.kv
    group = step.groups[step.group_of_layer[layer]]
    keys, values = kv.keys[layer], kv.values[layer]
    kv_heads, dim = keys.shape[2:]
    keys.view(-1, kv_heads, dim).index_copy_(0, group.slots, key[0].transpose(0, 1))
    values.view(-1, kv_heads, dim).index_copy_(0, group.slots, value[0].transpose(0, 1))

    rows = query[0].transpose(0, 1)  # [T, heads, head_dim]
    heads = rows.shape[1]
    outputs: list[Tensor] = []
    for block in group.decodes:
        count = block.end - block.start
        # The query heads of one KV head become its query rows: no repetition of K and V.
        queries = rows[block.start : block.end].reshape(count, kv_heads, heads // kv_heads, dim)
        found = scaled_dot_product_attention(
            queries,
            keys.index_select(0, block.pages).view(count, -1, kv_heads, dim).transpose(1, 2),
            values.index_select(0, block.pages).view(count, -1, kv_heads, dim).transpose(1, 2),
            attn_mask=block.bias,
            scale=scaling,
        )
        outputs.append(found.reshape(count, heads, dim))
    for prompt in group.prompts:
        found = scaled_dot_product_attention(
            query[:, :, prompt.start : prompt.end],
            _expand(keys.index_select(0, prompt.pages), heads),
            _expand(values.index_select(0, prompt.pages), heads),
            attn_mask=prompt.bias,
            scale=scaling,
        )
        outputs.append(found[0].transpose(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.unsqueeze(0), None


def _expand(pages: Tensor, heads: int) -> Tensor:
    """`[pages, page_size, kv_heads, head_dim]` → `[1, heads, tokens, head_dim]`, each KV head seen by its query
    heads.
    """
    _, _, kv_heads, dim = pages.shape
    rows = pages.view(-1, kv_heads, 1, dim).permute(1, 2, 0, 3)
    return rows.expand(kv_heads, heads // kv_heads, rows.shape[2], dim).reshape(1, heads, rows.shape[2], dim)


def register() -> None:
    """Makes ATTENTION known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
