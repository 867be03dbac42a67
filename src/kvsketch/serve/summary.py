"""What a cache holds of a text, in numbers for people: slots of every head, bytes beside the full cache, passages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.memory import stored_bytes
from kvsketch.decode.asking import GAP, chat_frame
from kvsketch.serve.text import Template

LEVELS = 8  # shades of a passage: in how many of the heads it is held


class FullCache:
    """The model's own cache, measured on one token: how many bytes it would hold."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
        # Of each layer: the bytes of a token, and the tokens of its window if it has one.
        self._layers = [(stored_bytes([layer]), getattr(layer, "sliding_window", None)) for layer in cache.layers]

    def bytes(self, tokens: int) -> int:
        """After `tokens` tokens; a sliding layer keeps its window."""
        return sum((min(tokens, window - 1) if window else tokens) * size for size, window in self._layers)


def full_cache_bytes(model: Any, tokens: int) -> int:
    """Bytes of the model's own cache after `tokens` tokens."""
    return FullCache(model).bytes(tokens)


def of_cache(model: Any, cache: CompressedCache) -> dict[str, Any]:
    """Counts of a cache of one row; `slots` are those of each head of each compressed layer."""
    return {
        "tokens_seen": cache.tokens_seen,
        "tokens_stored": cache.tokens_stored,
        "device_bytes": cache.device_bytes,
        "host_bytes": cache.host_bytes,
        "full_bytes": full_cache_bytes(model, cache.tokens_seen),
        "slots": [layer.table.used_slots()[0].tolist() for layer in cache.slot_layers],
        **({} if cache.promise is None else {"promise": str(cache.promise)}),
    }


def shares(cache: CompressedCache) -> Tensor:  # [tokens seen] float32
    """For each token that a cache of one row has read, the share of the heads of all layers that hold it."""
    counts, heads = torch.zeros(cache.tokens_seen), 0
    for table in (layer.table for layer in cache.slot_layers):
        heads += table.shape[1]
        if table.host is not None:
            counts += table.shape[1]  # every token, here or in host memory
            continue
        index = table.index_slots()[0]  # [H, S]
        counts += torch.bincount(index[index >= 0].cpu(), minlength=cache.tokens_seen)[: cache.tokens_seen]
    return counts / heads


def passages(tokenizer: Any, text: str, cache: CompressedCache) -> list[list[int]]:
    """Runs [start, end, level] of a text that `kvsketch.read` has read into `cache`, by characters.

    Level 0: no head holds it; LEVELS: all do. Empty where the tokenizer does not tell the places of its tokens.
    """
    before = chat_frame(tokenizer).before
    places = Template(tokenizer).places(before + text + GAP)
    levels = (shares(cache)[: len(places)] * LEVELS).ceil().int().tolist()
    runs: list[list[int]] = []
    for (start, end), level in zip(places, levels, strict=False):
        start, end = max(0, start - len(before)), min(len(text), end - len(before))
        if end <= start:
            continue
        if runs and runs[-1][2] == level and runs[-1][1] >= start:
            runs[-1][1] = max(end, runs[-1][1])
        elif not runs or end > runs[-1][1]:
            # The tokens of one character share its place.
            runs.append([max(start, runs[-1][1]) if runs else start, end, level])
    return runs
