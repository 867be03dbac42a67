"""What a cache holds, in five lines: for `/cache` in a chat, and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from kvsketch.cache import memory
from kvsketch.cache.layer import SlotLayer
from kvsketch.slots.bytes import token_bytes
from kvsketch.slots.codes import MANY, UNQUANTISED, QuantBits


def overview(cache: Any) -> dict[str, str]:
    """Five facts by name (synchronises with the GPU)."""
    used = [layer.table.used_slots() for layer in cache.slot_layers]
    least, most = min(int(each.min()) for each in used), max(int(each.max()) for each in used)
    spread = "" if least == most else f", {least:,} to {most:,}"
    bits = cache.method.stored_bits
    held, full = cache.device_bytes + cache.host_bytes, full_bytes(cache.layers)
    host = f", {memory.text_of(cache.host_bytes)} of it in host memory" if cache.host_bytes else ""
    share = f", {held / full:.1%} of the full cache's {memory.text_of(full)}" if full else ""
    return {
        "method": str(cache.method),
        "tokens read": f"{cache.tokens_seen:,}",
        "tokens stored": f"{cache.tokens_per_head:,} a head on average{spread}",
        "bits": precision(bits),
        "memory": f"{memory.text_of(held)}{host}{share}",
    }


def precision(bits: QuantBits) -> str:
    """`keys 4, values 4`; vectors that are not quantised have the dtype of the model, which need not be of 16 bits."""
    if not bits:
        return "not quantised"
    keys, values = (f"{each}" if each != UNQUANTISED else "not quantised" for each in (bits.keys or MANY, bits.values))
    return f"keys {keys}, values {values}" + ", learned directions" * bool(bits.bases)


def full_bytes(layers: Iterable[Any]) -> int:
    """Bytes of keys and values of every token that layers have seen, in the dtype of the model."""
    return sum(_full(layer) for layer in layers)


def _full(layer: Any) -> int:
    if not isinstance(layer, SlotLayer):
        return memory.stored_bytes([layer])
    return 0 if layer.table.empty else token_bytes(layer.table) * layer.table.seen


def as_html(facts: dict[str, str]) -> str:
    rows = (f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(fact)}"
            "</td></tr>" for name, fact in facts.items())  # fmt: skip
    return f"<table>{''.join(rows)}</table>"
