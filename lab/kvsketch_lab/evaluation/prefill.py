"""How experiments read prompts beside `compare.shared_prefill`: in chunks, and how many of them at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch.compare.shared_prefill import Prefilled
from kvsketch.methods import Method

ROWS_ON_A_CPU = 4
SHARE_OF_FREE_MEMORY = 0.7


@torch.no_grad()
def streamed_prefill(
    model: Any, inputs: Mapping[str, Tensor], method: str | Method, seed: int, chunk: int
) -> tuple[Prefilled, CompressedCache]:
    """One method reads `inputs` chunk by chunk, through what it kept of the chunks before; nothing can be shared."""
    ids, mask = (inputs[name].to(model.device) for name in ("input_ids", "attention_mask"))
    cache = CompressedCache(model, method, seed=seed, prefill="stream", chunk=chunk)
    logits = prefill(model, ids, cache, mask)
    return Prefilled(model, ids, mask, cache, {}, logits), cache


def rows_that_fit(model: Any, tokens: int) -> int:
    """How many prompts of `tokens` can be read together: by free memory on a GPU, few on a CPU.

    Counted are the queries, keys and values of all layers, a copy for one method and the room in which it is made,
    and a mask of tokens by tokens with the bias that attention kernels make of it.
    """
    if model.device.type != "cuda":
        return ROWS_ON_A_CPU
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = (heads + 3 * 2 * kv_heads) * size * config.num_hidden_layers
    working = 4 * (config.hidden_size + getattr(config, "intermediate_size", 4 * config.hidden_size))
    row = tokens * ((layer + working) * model.dtype.itemsize + 4 * tokens)
    free = torch.cuda.mem_get_info(model.device)[0]
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return max(1, int(SHARE_OF_FREE_MEMORY * free) // row)
