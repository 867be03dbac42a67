"""What a cache takes, and a budget from bytes.

    CompressedCache(model, "snapkv", memory="2GB", context=32000)
    CompressedCache(model, "rehearse:bytes=1/8")

The largest budget is taken with which the cache, after a prompt of `context` tokens, takes no more bytes on the device;
or the share of tokens that takes a share of the bytes of a 16-bit cache.
What it takes is computed from the shapes of the model and the method's own account (`Method.stored_bytes`).
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvsketch.byte_sizes import parsed, text_of
from kvsketch.cache import latent
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.making import is_compressible, native_layers
from kvsketch.layer_bytes import ModelBytes
from kvsketch.methods import parse_method
from kvsketch.methods.base import BudgetedMethod, Method
from kvsketch.methods.budget import Size
from kvsketch.methods.parameters import RANDOM
from kvsketch.ops.codec import BITS
from kvsketch.slots.bytes import LayerShape, host_tensors
from kvsketch.slots.codes import MANY, QuantBits
from kvsketch.slots.context import LayerContext
from kvsketch.slots.heads import head_share
from kvsketch.slots.table import SlotTable

USUAL = 4096  # tokens of the text for which a share of bytes becomes one of tokens


def stored_bytes(layers: Iterable[Any]) -> int:
    """Bytes of every tensor that layers hold on their devices."""
    return sum(tensor.nbytes for layer in layers for tensor in _tensors(layer))


def _tensors(layer: Any) -> list[Tensor]:
    if isinstance(layer, SlotLayer):
        return layer.table.tensors()
    return [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if isinstance(t, Tensor)]


def description(layers: Sequence[SlotLayer]) -> str:
    """A line for each layer: slots of its smallest and largest head, bits, bytes (synchronises with the GPU)."""
    offloaded = any(layer.table.host is not None for layer in layers)
    lines = ["layer  slots of a head   bits k/v         bytes" + "      on the host" * offloaded]
    for layer in layers:
        table, used = layer.table, layer.table.used_slots()
        least, most = int(used.min()), int(used.max())
        bits = QuantBits() if table.exact else table.stored_bits
        slots = f"{least}" if least == most else f"{least} to {most}"
        lines.append(
            f"{table.context.layer_idx:5}  {slots:16}  {f'{bits.keys or MANY}/{bits.values}':8} "
            f"{stored_bytes([layer]):13,}"
        )
        if offloaded:
            lines[-1] += f" {sum(tensor.nbytes for tensor in host_tensors(table)):16,}"
    if (method := layers[0].method).basis != RANDOM:
        found = "learned directions" if method.bases is not None else "nothing was learned: random directions"
        lines.append(f"basis={method.basis}: {found}")
    if layers[0].table.document is not None:
        tensors = [t for layer in layers if layer.table.document is not None for t in layer.table.document.tensors()]
        shared = sum(tensor.nbytes for tensor in tensors)
        lines.append(f"document: {layers[0].table.before:,} tokens, {shared:,} bytes that others may share")
    return "\n".join(lines)


@dataclass(frozen=True)
class Sizes(ModelBytes):
    """The same with the layers themselves, for which any method says its bytes."""

    places: Sequence[LayerContext] = ()  # the layers that are compressed

    def in_tokens(self, method: Method) -> Method:
        """The method with a share of tokens for its share of bytes (`bytes=1/8`), if it has one.

        It is that of a text of USUAL tokens: a longer one takes less, for what lies beside its slots grows more slowly.
        """
        if not isinstance(method, BudgetedMethod) or method.bytes is None:
            return method
        share = cast(Size, method.bytes).share
        assert share is not None
        chosen: Any = replace(method, bytes=None).for_bytes(share)
        usual = replace(self, context=USUAL, batch=1, windows=())
        halves = replace(usual, itemsize=2)
        try:
            result: Any = fitted(chosen, int(share * halves.full), USUAL, functools.partial(usual.bytes, more=0))
        except ValueError as error:
            raise ValueError(f"{method} cannot be had: {error}") from None
        thousandths = 1000 * int(result.budget.tokens) // USUAL
        return replace(chosen, budget=Size(share=Fraction(thousandths, 1000)))

    def bytes(self, method: Method, more: int | None = None) -> int | None:
        """Bytes on the device after the prompts and `more` tokens (None: any number); None: nothing is promised."""
        total, method = self.native, self.in_tokens(method)
        for place in self.places:
            table = SlotTable(replace(place, bits=method.stored_bits), prompt_tokens=self.context)
            own = self.layer(method.stored_bits.pair, more)
            shape = LayerShape(**vars(own), table=table)
            held = method.stored_bytes(shape)
            if held is None:
                return None
            total += held
        return total


def sizes_of(model: Any, context: int | None, batch: int = 1) -> Sizes:
    """The shape of a model's cache after `batch` prompts of `context` tokens, its positions unless given."""
    config = model if isinstance(model, PretrainedConfig) else model.config
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None) if context is None else context
    whole = not isinstance(context, bool) and isinstance(batch, int) and not isinstance(batch, bool)
    if not isinstance(context, int) or not whole or context < 1 or batch < 1:
        raise ValueError(f"context={context!r} and batch={batch!r} must be numbers of 1 or more; give context=32000")
    native, share = native_layers(config), head_share(model)
    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.get_default_dtype()
    query_heads, parts = text.num_attention_heads, 1 if share is None else share.parts
    heads = (getattr(text, "num_key_value_heads", None) or query_heads) // parts
    size = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    latents = latent.sizes_of(config)
    if latents is not None:
        heads, size = 1, sum(latents)
    windows = [getattr(layer, "sliding_window", None) for layer in native if not is_compressible(layer)]
    compressed = [i for i, layer in enumerate(native) if is_compressible(layer)]
    places = [LayerContext(i, len(native), 0, rank, len(compressed)) for rank, i in enumerate(compressed)]
    return Sizes(
        context, batch, heads, query_heads // parts, size, dtype.itemsize, len(places),
        tuple(filter(None, windows)), latents or (), places,
    )  # fmt: skip


def in_tokens(method: str | Method, model: Any) -> Method:
    """The method with a share of tokens for its share of bytes, if it has one."""
    method = parse_method(method)
    in_bytes = isinstance(method, BudgetedMethod) and method.bytes is not None
    return sizes_of(model, USUAL).in_tokens(method) if in_bytes else method


def fitted_to(memory: float | str | None, context: int | None, batch: int, method: Method, model: Any) -> Method:
    """The method with the largest budget with which `batch` prompts of `context` tokens take no more than `memory`.

    memory: None leaves the method as it is.
    """
    if memory is None:
        if context is not None or batch != 1:
            raise ValueError("context and batch need memory, such as memory='2GB'")
        return in_tokens(method, model)
    size, sizes = parsed(memory), sizes_of(model, context, batch)
    return fitted(method, size, sizes.context, sizes.bytes)


def fitted(method: Method, memory: int, context: int, count: Callable[[Method], int | None]) -> Method:
    """The method with the largest budget that fits; ValueError says what is needed where none does.

    `count`: bytes of a method at this context, None where it cannot say.
    """
    if any(part.startswith(("budget=", "bytes=")) for part in str(method).split(":")):
        raise ValueError(f"memory and {method} both set the size of the cache; leave out memory or the budget")
    needed = count(method)
    if needed is None:
        reason = method.capabilities.memory.reason or "what it holds here is not known"
        raise ValueError(f"{method}: its bytes cannot be computed, {reason}; or leave out memory")
    most = with_budget(method, context)
    if not hasattr(method, "budget") or (most is not None and count(most) == count(_least(method, context))):
        # Every token is kept whatever the budget.
        if needed > memory:
            raise ValueError(f"{method}: {_too_much(needed, memory, context)}; {_advice(method, memory, count)}")
        return method
    least: Any = _least(method, context)
    low, needed = int(least.budget.tokens), count(least)
    assert needed is not None
    if needed > memory:
        raise ValueError(
            f"{method}: {_too_much(needed, memory, context)} with budget={low}, which sinks and windows need at least; "
            f"{_advice(least, memory, count)}"
        )

    def is_too_large(budget: int) -> bool:
        tried = with_budget(method, budget)
        held = None if tried is None else count(tried)
        return held is None or held > memory

    result = with_budget(method, low + bisect(range(low + 1, context + 1), False, key=is_too_large))
    assert result is not None
    return result


def with_budget(method: Method, tokens: int) -> Method | None:
    """The method with a budget of `tokens`; None where it cannot have so few, or has no budget."""
    try:
        return parse_method(f"{method}:budget={tokens}")
    except ValueError:
        return None


def _least(method: Method, context: int) -> Method:
    """The method with the smallest budget that it takes."""
    refused = bisect(range(1, context), False, key=lambda tokens: with_budget(method, tokens) is not None)
    result = with_budget(method, 1 + refused)
    if result is None:
        raise ValueError(f"{method}: takes no budget of {context} tokens or fewer; give it smaller sinks and windows")
    return result


def _too_much(needed: int, memory: int, context: int) -> str:
    return f"memory={text_of(memory)} is too little for {context:,} tokens, which take {text_of(needed)}"


def _advice(method: Method, memory: int, count: Callable[[Method], int | None]) -> str:
    """Fewer bits that would fit, else what would."""
    own = max(method.stored_bits.keys, method.stored_bits.values)
    for bits in sorted((bits for bits in BITS if bits < own), reverse=True):
        fewer = _with_bits(method, bits)
        held = None if fewer is None else count(fewer)
        if held is not None and held <= memory:
            return f"use bits={bits}, which take {text_of(held)}, or more memory"
    if method.capabilities.offload and "offload=host" not in str(method):
        return "use offload=host, more memory, or a method that drops tokens such as snapkv"
    if not hasattr(method, "budget"):
        return "use a method that drops tokens such as snapkv, or more memory"
    return "use more memory, a shorter context, or smaller sinks and windows"


def _with_bits(method: Method, bits: int) -> Method | None:
    kept = [part for part in str(method).split(":") if not part.startswith(("bits=", "key_bits=", "value_bits="))]
    try:
        return parse_method(":".join([*kept, f"bits={bits}"]))
    except ValueError:
        return None
