"""Taking tokens back: `cache.crop`, and forwards that wait for it after `cache.activate_past_recording`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsketch.cache.interrupted import require_whole
from kvsketch.cache.layer import DRAFTS, OVER, SlotLayer
from kvsketch.slots import rollback
from kvsketch.slots.tensors import plain


def crop(layers: Sequence[Any], seen: int, count: int, broken_off: str, before: int = 0) -> None:
    """Forgets the newest `count` of `seen` tokens in all layers, or in none: RuntimeError.

    before: the first tokens, of a document that others read too.
    """
    if count < 0:
        raise ValueError(f"crop takes a negative number of tokens to remove, such as -{-count}, not {-count}")
    if count:
        require_whole(layers, broken_off)
    if count > seen:
        raise ValueError(f"crop({-count}) removes more than the {seen} tokens that the cache has seen")
    if count > seen - before:
        raise ValueError(
            f"crop({-count}) removes tokens of the document that this cache continues; it has {seen - before} of "
            "its own"
        )
    for number, layer in enumerate(layers if count else ()):
        reason = _refuses(layer, count) if isinstance(layer, SlotLayer) else _native_refuses(layer, count)
        if reason:
            raise RuntimeError(
                f"the cache cannot remove its last {count} tokens: layer {number}, {reason}. Call "
                "cache.activate_past_recording() before the forward that may be removed and crop right after "
                "it, or use a copy.deepcopy(cache) made before"
            )
    for layer in layers:
        if isinstance(layer, SlotLayer):
            _crop(layer, count)
        elif count or getattr(layer, "record_past", False):
            layer.crop(-count)


def end_recording(layers: Sequence[Any]) -> None:
    """Compresses what could still be rolled back. From here on every forward is compressed at once."""
    for layer in layers:
        if getattr(layer, "record_past", False):
            layer.compress_pending() if isinstance(layer, SlotLayer) else layer.crop(0)
            layer.record_past = False


def has_drafted(layer: SlotLayer) -> bool:
    """Whether recording is on since a forward that was cropped: assisted decoding may have left it on."""
    return layer.recording in (DRAFTS, OVER)


def _crop(layer: SlotLayer, count: int) -> None:
    if count > 0 and count == layer.table.seen:
        layer.table, layer.pending = layer.table.cleared(), None
    elif count > 0 or layer.pending is not None:
        with plain(), layer.changing():
            layer.table.count(prompt_tokens=_prompt_without(layer, count))
            if _is_draft(layer, count):
                rollback.drop_newest(layer.table, count)
            else:
                # What waits to be compressed goes first: a method knows only what it has compressed.
                drafted = layer.table.new_tokens if layer.pending is not None else 0
                rollback.drop_newest(layer.table, drafted)
                layer.pending = None
                layer.method.forget(layer.table, count - drafted)
    if layer.record_past:
        layer.recording = DRAFTS
    layer.compress_pending()


def _is_draft(layer: SlotLayer, count: int) -> bool:
    """Whether the last `count` tokens are not compressed yet."""
    return layer.pending is not None and count <= layer.table.new_tokens


def _prompt_without(layer: SlotLayer, count: int) -> int:
    """The prompt length that a share budget counts from, once the last `count` tokens are gone."""
    table, left = layer.table, layer.table.seen - count
    if table.forward.appended == 1 or left < layer.seen_before:
        return min(table.prompt_tokens if table.forward.appended == 1 else layer.prompt_before, left)
    several = left - layer.seen_before > 1 and not has_drafted(layer)
    return left if several or layer.prompt_before == 0 else layer.prompt_before


def _refuses(layer: SlotLayer, count: int) -> str:
    """Why the last `count` tokens cannot be forgotten as if they had never come; empty: they can."""
    left = layer.table.seen - count
    if left == 0 or _is_draft(layer, count) or layer.method.can_forget(layer.table, left):
        return ""
    return f"{layer.method.name} has compressed them already"


def _native_refuses(layer: Any, count: int) -> str:
    """The same of a layer of transformers' own."""
    if not getattr(layer, "is_croppable", True) or (hasattr(layer, "conv_states") and not layer.record_past):
        return f"{type(layer).__name__} keeps no past states"
    window = getattr(layer, "sliding_window", None)
    if (
        window is None
        or layer.keys is None
        or layer.keys.shape[-2] - count >= min(layer.get_seq_length() - count, window - 1)
    ):
        return ""
    return f"a sliding window of {window} has dropped what lies before them"
