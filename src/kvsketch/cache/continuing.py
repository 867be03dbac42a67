"""`CompressedCache.continued`: layers that go on after a text which others go on after too.

The document stays as it is and is read where it lies (document.py). Each of its continuations has tables of its own for
what comes after, compressed by themselves, and counts the tokens of the model behind the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvsketch.cache import families
from kvsketch.cache.forward import Forward
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.making import link
from kvsketch.methods import supporting
from kvsketch.methods.base import Method
from kvsketch.methods.capabilities import SUPPORTED, Support, no
from kvsketch.plural import counted

INSTEAD = "go on with cache.continued() or a copy.deepcopy(cache), or call cache.reset()"


def support(layers: Sequence[Any], method: Method, model_name: str, broken_off: str) -> Support:
    """Whether others can continue what these layers hold."""
    slots = [layer for layer in layers if isinstance(layer, SlotLayer)]
    table = slots[0].table
    if (reason := method.capabilities.documents.reason) is not None:
        return no(
            f"{method} cannot be continued by several texts: {reason}; use one of "
            f"{', '.join(supporting('documents'))}, or a copy.deepcopy(cache)"
        )
    if len(slots) < len(layers):
        return no(f"{model_name} has sliding-window or linear layers, which are not shared; use a copy.deepcopy(cache)")
    if not table.can_be_document:
        return no(f"{model_name} has latent attention, whose slots are not shared; use a copy.deepcopy(cache)")
    if model_name in families.BIASED:
        return no(f"{model_name} adds a bias to its logits, unknown for a document; use a copy.deepcopy(cache)")
    if slots[0].forward.prompt is not None:
        return no("this cache is in the middle of a prompt; continue it when the whole prompt has been read")
    if broken_off:
        return no(f"the last read into this cache was interrupted: {broken_off}; call cache.reset()")
    if table.document is not None:
        return no("this cache continues a document itself; call continued() of the document")
    if table.empty:
        return no("the cache has read nothing yet; read a text with kvsketch.prefill first")
    if table.shape[0] != 1 or table.padding is not None:
        return no(f"a document is one text without padding, and this cache has {counted(table.shape[0], 'row')}")
    return SUPPORTED


def layers_after(layers: Sequence[SlotLayer]) -> list[SlotLayer]:
    """Empty layers that continue what `layers` hold."""
    positions, forward = replace(layers[0].table.context.positions), Forward(layers[0].forward.chunk)
    made = []
    for layer in layers:
        context = replace(layer.table.context, positions=positions)
        table = type(layer.table)(context, document=layer.table, chosen_bits=layer.table.chosen_bits)
        after = SlotLayer(table, layer.method, layer.model_name, forward, layer.keys_are_shared)
        after.is_read = True
        made.append(after)
    link(made, made[0].keys_are_shared)
    return made


def require_visible(mask: Tensor | None, before: int, seen: int) -> None:
    """Raises ValueError where a mask [B, at least `seen` tokens] hides one of the `before` tokens of a document."""
    if mask is None or not before or mask.dim() != 2 or mask.shape[1] < seen:
        return
    shown = mask[:, :before].bool()
    if not bool(shown.all()):
        row, token = (~shown).nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask hides token {token} of the document from batch row {row}; a batch of questions is padded "
            f"on the left of the questions, behind the {before} tokens of the document"
        )
