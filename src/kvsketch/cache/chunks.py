"""Several new tokens that their table does not hold yet: it is bounded, or the prompt is read as a stream.

Chunk by chunk,

    attend      the queries of the chunk read the table and, causally, the chunk (`ops.chunk_attention`)
    take        the table takes the keys and values of the chunk
    compress    the method brings the table back to its budget

so the full matrix of queries by slots is never in memory and, in a stream, neither is the prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from kvsketch import ops
from kvsketch.cache import document, masks
from kvsketch.cache.layer import LayerView, SlotLayer
from kvsketch.slots import padding as left_padding
from kvsketch.slots.offloaded import require_on_device
from kvsketch.slots.tensors import plain

PREFILLS = ("exact", "stream")


def attend(
    view: LayerView,
    module: nn.Module,
    query: Tensor,
    scale: float,
    mask: Any,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of [B, Hq, n, D] queries, each chunk over the table as the chunks before have left it."""
    layer, new = view.layer, query.shape[2]
    mask = None if layer.forward.prompt is not None else mask
    call = _Call(layer, query, scale, mask, bias, options)
    spans = chunk_spans(new, layer.forward.chunk, keep_last=layer.record_past)
    with plain():
        if view.reading is not None:
            # The owner of these keys has attended, and this layer shares them.
            if len(spans) > 1:
                raise ValueError(
                    f"layers of {layer.model_name} share keys, so that a prompt cannot be read as a stream within one "
                    f"forward; feed it chunk by chunk with kvsketch.prefill, or use prefill='exact'"
                )
            return call.read(view.reading, 0, new)
        prompt = (layer.forward.prompt or _described(layer, mask, new)).on(query.device)
        layer.table.forward.scale = scale
        if len(spans) == 1:
            out = _attend_chunk(view, call, prompt, 0, new)
        else:
            # In the memory layout that the model reads next: heads next to each other.
            out = query.new_empty(query.shape[0], new, query.shape[1], view.values.shape[3]).transpose(1, 2)
            for start, end in spans:
                out[:, :, start:end] = _attend_chunk(view, call, prompt, start, end)
                if end < new:
                    layer.compress(query[:, :, start:end])
        if view.is_owner(module):
            layer.finish(query[:, :, spans[-1][0] :], scale)
        return out


def _attend_chunk(view: LayerView, call: _Call, prompt: masks.Prompt, start: int, end: int) -> Tensor:
    """The queries [start, end) attend, and the table takes the keys and values of their tokens."""
    layer, table = view.layer, view.layer.table
    assert isinstance(view.keys, Tensor) and isinstance(view.values, Tensor)
    keys, values = view.keys[:, :, start:end], view.values[:, :, start:end]

    def take() -> None:
        table.append(keys, values, prompt.end if layer.forward.chunk is not None else None)
        left_padding.give(table, prompt.padding_at(table.seen))

    layer.method.prepare(table, keys, values)
    require_on_device(table, layer.model_name)
    masked, exact = call.bias is not None or not prompt.causal, table.exact
    if masked or exact:
        take()
    if masked:
        view.reading = _Reading(keys, values, view=layer.view())
    elif exact:
        view.reading = _Reading(table.read_keys(), table.value_slots(), hidden=prompt.hidden_from(0))
    else:
        past = ops.Past(table.read_keys(end - start), table.value_slots(), *table.log_weights())
        view.reading = _Reading(keys, values, past, prompt.hidden_from(table.seen))
    out = call.read(view.reading, start, end)
    if not (masked or exact):
        take()
    return out


class _Reading(NamedTuple):
    """What one chunk reads: tokens and the slots before them, or a view under a mask."""

    keys: Tensor
    values: Tensor
    past: ops.Past | None = None
    hidden: Tensor | None = None
    view: LayerView | None = None


class _Call(NamedTuple):
    """The queries of all chunks, [B, Hq, n, D], and how they attend."""

    layer: SlotLayer
    query: Tensor
    scale: float
    mask: Any
    bias: Tensor | None
    options: dict[str, Any]

    def read(self, reading: _Reading, start: int, end: int) -> Tensor:
        """Attention of the queries [start, end)."""
        query, method, table = self.query[:, :, start:end], self.layer.method, self.layer.table
        if reading.view is not None:
            seen = reading.view.seen
            mask = left_padding.mask(table.padding, seen)
            if self.mask is not None:
                mask = masks.rows_of_mask(self.mask, start, end, seen)
            bias = None if self.bias is None else masks.rows_of_mask(self.bias, start, end, seen)
            return reading.view.attend(query, self.scale, mask, bias=bias, **self.options)
        out, (_, row_lse) = ops.chunk_attention(
            query, reading.keys, reading.values, self.scale,
            past=reading.past, hidden=reading.hidden, clip=method.clip, return_state=True, **self.options,
        )  # fmt: skip
        if method.wants_row_lse and reading.hidden is None and all(option is None for option in self.options.values()):
            table.forward.note_attention(row_lse)
        if table.document is None:
            return out
        return document.joined(table, query, out, row_lse, self.scale, self.options.get("softcap"))


def _described(layer: SlotLayer, mask: Any, new: int) -> masks.Prompt:
    """What a mask says of `new` tokens that are not appended yet."""
    end = layer.table.seen + new
    layer.require_visible(mask, end, new)
    padding = layer.padding_after(mask, end, new)
    causal = layer.forward.once("causal", mask, end, lambda: masks.is_causal(mask, end, new, padding))
    return masks.Prompt(end, padding, causal)


def chunk_spans(tokens: int, chunk: int | None, keep_last: bool = False) -> list[tuple[int, int]]:
    """Splits `tokens` new tokens after every `chunk`, but never leaves a single token as the last chunk.

    A single token is a decode step, in which a method may do less. `keep_last`: the last two chunks stay together, so
    that the newest `chunk` tokens can be rolled back.
    """
    if chunk is None:
        return [(0, tokens)]
    cuts = list(range(chunk, tokens, chunk))
    if cuts and (keep_last or tokens - cuts[-1] == 1):
        cuts.pop()
    return list(zip([0, *cuts], [*cuts, tokens], strict=True))


def require_one_chunk(layer: SlotLayer, new: int) -> None:
    """Raises ValueError where a stream of several chunks comes in one forward and layers decide together: the first
    layer would read the second chunk before the last has read the first.
    """
    chunk, method = layer.forward.chunk, layer.method
    chunks = len(chunk_spans(new, chunk))
    if chunks == 1 or not (method.settles or layer.table.stored_bits.auto):
        return
    what = "decides over all layers after each chunk" if method.settles else "chooses bits for all layers together"
    raise ValueError(
        f"{method} {what}, and {new} tokens in one forward are {chunks} chunks of {chunk}; read them with "
        "kvsketch.prefill, kvsketch.generate or model.generate, which feed the model chunk by chunk, or make the "
        "cache with prefill='exact'"
    )


def require_stream(prefill: str, chunk: int) -> None:
    """Raises ValueError unless the two say how a prompt is read."""
    if prefill not in PREFILLS:
        raise ValueError(f"prefill={prefill!r} is not one of {', '.join(PREFILLS)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 2:
        raise ValueError(f"chunk={chunk!r} is not a number of tokens; use a whole number of 2 or more, such as 2048")
