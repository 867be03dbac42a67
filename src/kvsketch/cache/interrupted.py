"""Forwards that were broken off: out of memory, an error in the model, Ctrl-C, a model that does not read the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from kvsketch.cache import families
from kvsketch.cache.layer import SlotLayer


def lengths(layers: Sequence[Any]) -> list[int]:
    """Tokens that each layer of attention has read."""
    return [layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)]


def left_behind(layers: Sequence[Any]) -> str:
    """What an interrupted forward has left behind, in words; empty when all layers have read the same tokens."""
    for layer in layers:
        if isinstance(layer, SlotLayer) and (layer.waiting is not None or not layer.whole):
            return f"layer {layer.table.context.layer_idx} stopped in the middle of its work"
    seen = lengths(layers)
    # A layer that the model never reads stays empty; the last layer is always read.
    if len({*seen} - {0}) > 1 or (any(seen) and not seen[-1]):
        return f"its layers have read {' or '.join(map(str, sorted(set(seen))))} tokens"
    return ""


def require_read(layer: Any) -> None:
    """Raises ValueError unless attention has read what the layer got last."""
    if isinstance(layer, SlotLayer) and layer.refused:
        raise ValueError(layer.refused)
    if isinstance(layer, SlotLayer) and layer.waiting is not None:
        shapes = layer.waiting.keys.shape, layer.waiting.values.shape
        raise families.unread(layer.model_name, layer.table.context.layer_idx, *shapes)


def stopped_at(layers: Sequence[Any], number: int) -> bool:
    """Whether a first forward went as far as this layer: those before are read, and none after has a token."""
    before, after = layers[:number], layers[number + 1 :]
    return any(isinstance(each, SlotLayer) and each.is_read for each in before) and not any(lengths(after))


def require_whole(layers: Sequence[Any], broken_off: str) -> None:
    """Raises unless the last forward is complete in all layers."""
    for number, layer in enumerate(layers):
        if isinstance(layer, SlotLayer) and (layer.refused or not (layer.is_read or stopped_at(layers, number))):
            require_read(layer)
    what = broken_off or left_behind(layers)
    if what:
        raise RuntimeError(
            f"the last read into this cache was interrupted: {what}. Call cache.reset() and feed the whole text "
            "again, or use a copy (copy.deepcopy, cache.save) made before"
        )
