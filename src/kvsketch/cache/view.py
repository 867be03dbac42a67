"""What one forward reads of one layer. The key tensor carries it from the cache to the attention function.

A `LayerView` is the table with the new tokens in it. A `ChunkView` holds several new tokens that are not in the table
yet, because the table is bounded or because the prompt is read as a stream. Chunk by chunk,

    attend      the queries of the chunk read the table and, causally, the chunk (`ops.chunk_attention`)
    take        the table takes the keys and values of the chunk
    compress    the method brings the table back to its budget

so the full matrix of queries by slots is never in memory and, in a stream, neither is the prompt.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvsketch import ops
from kvsketch.cache import masks
from kvsketch.methods.base import Method
from kvsketch.ops.codec import CodedSlots
from kvsketch.slots import padding as left_padding
from kvsketch.slots.layout import Layout
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

PREFILLS = ("exact", "stream")
TAG = "_kvsketch_view"
READS_EVERYTHING = (
    "the attention of {model} reads every token, which offload=host keeps in host memory; use offload=none"
)


class Owner(Protocol):
    """What a view needs from its layer (layer.py)."""

    table: SlotTable
    method: Method
    model_name: str
    chunk: int | None
    prompt: Prompt | None
    mask_free: bool
    is_read: bool
    read_before: int

    def note_padding(self, mask: Any) -> None: ...
    def describe_prompt(self, mask: Any, new: int) -> Prompt: ...
    def compress(self, queries: Tensor, scale: float) -> None: ...
    def finish(self, query: Tensor, scale: float, row_logits: ops.RowLogits | None = None) -> None: ...


@dataclass
class LayerView:
    """A table that holds the new tokens already."""

    layer: Owner
    keys: Tensor | CodedSlots
    values: Tensor | CodedSlots
    exact: bool
    seen: int
    log_num: Tensor | None = None
    log_den: Tensor | None = None
    kept_index: Tensor | None = None
    handed_shape: tuple[int, ...] = ()  # of the values that the model carries to attention
    row_logits: ops.RowLogits | None = None  # of the last attention by a single query, for methods that want them
    layout: Layout | None = None  # where the slots of heads that differ lie; None: equal heads

    @classmethod
    def of(cls, layer: Owner) -> LayerView:
        """The table of a layer as it is."""
        table = layer.table
        log_num, log_den = table.read_weights()
        tied = log_num is log_den
        slots, layout = table.read_slots(), table.read_layout
        return cls(layer, *slots, table.exact, table.seen, None if tied else log_num, log_den, layout=layout)

    @property
    def index(self) -> Tensor:  # [B, H, S] int64
        """Logical index of each slot; only looked at when a mask or bias has to be read at the slots."""
        return self.layer.table.index_slots() if self.kept_index is None else self.kept_index

    def kept(self) -> LayerView:
        """A copy for layers that read these keys later in this forward, so that compress cannot change it in place."""
        if not self.exact:
            self.log_num = None if self.log_num is None else self.log_num.clone()
            self.log_den = None if self.log_den is None else self.log_den.clone()
            self.kept_index = self.layer.table.index_slots().clone()
            self.keys, self.values = copy.deepcopy(self.keys), copy.deepcopy(self.values)
        return self

    def attend(
        self,
        query: Tensor,
        scale: float,
        mask: Any,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of [B, Hq, n, D] queries over the slots; `bias` is logical like the mask.

        No gradient flows through a compressed table.
        """
        with plain():
            return self._attend(query, scale, mask, softcap, sink_logits, bias)

    def _attend(
        self,
        query: Tensor,
        scale: float,
        mask: Any,
        softcap: float | None,
        sink_logits: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if self.layer.table.is_offloaded:
            raise ValueError(READS_EVERYTHING.format(model=self.layer.model_name))
        slot_bias = masks.mask_at_slots(mask, query, lambda: self.index, self.seen, self.layer.table.shape[1])
        if bias is not None:
            slot_bias = masks.add_bias(slot_bias, masks.at_slots(bias, self.index, query.shape[1]))
        method = self.layer.method
        wanted = method.wants_logits and not self.exact and query.shape[2] == 1 and softcap is None
        attended = ops.weighted_attention(
            query,
            self.keys,
            self.values,
            self.log_den if self.log_num is None else self.log_num,
            self.log_den,
            scale,
            bias=slot_bias,
            softcap=softcap,
            sink_logits=sink_logits,
            clip=method.clip,
            ragged=self.layout,
            return_state=wanted,
            return_logits=wanted,
        )
        if not wanted:
            return attended
        out, (row_lse, _), logits = attended
        # The numerator's sum contains the bias, which the logits do not, and leaves out a sink logit.
        self.row_logits = ops.RowLogits(logits[:, :, 0], row_lse[:, :, 0] if slot_bias is None else None)
        return out

    def recall(self, query: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None) -> Tensor | None:
        """The answer of a method that lets a single query read a part of the slots; None when it reads all."""
        self.layer.is_read = True
        if query.shape[2] != 1:
            return None
        self.layer.table.note_scale(scale)
        with plain():
            return self.layer.method.attend(self.layer.table, query, softcap, sink_logits)

    def finish(self, module: nn.Module, query: Tensor, scale: float, mask: Any) -> None:
        """Called when attention is done. Layers that share this layer's keys only read; the owner compresses."""
        # Key tensor and view refer to each other. Free the logits here, without waiting for the garbage collector.
        row_logits, self.row_logits = self.row_logits, None
        self.layer.is_read = True
        if self.is_owner(module):
            with plain():
                self.layer.note_padding(mask)
                self.layer.finish(query, scale, row_logits)

    def is_owner(self, module: nn.Module) -> bool:
        return getattr(module, "layer_idx", self.layer.table.layer_idx) == self.layer.table.layer_idx


@dataclass
class Prompt:
    """What is known of the new tokens before the first of their chunks is read."""

    end: int  # tokens seen once all of them are there
    padding: Tensor | None  # [B] int64, left padding of each row by then; None: no row has any
    causal: bool  # whether the mask is causal, but for left padding

    def __post_init__(self) -> None:
        self.most_padding = 0 if self.padding is None else int(self.padding.max())

    def on(self, device: torch.device) -> Prompt:
        """The same for a layer on that device."""
        if self.padding is None or self.padding.device == device:
            return self
        return Prompt(self.end, self.padding.to(device), self.causal)

    def padding_at(self, seen: int) -> Tensor | None:
        """Left padding among the first `seen` tokens."""
        return None if self.padding is None else self.padding.clamp_max(seen)

    def hidden_from(self, start: int) -> Tensor | None:  # [B]
        """How many tokens from number `start` on are left padding."""
        if self.padding is None or self.most_padding <= start:
            return None
        return (self.padding - start).clamp_min(0)


@dataclass
class Reading:
    """Attention arguments of one chunk: tokens and the slots before them, or a view to be read under a mask."""

    keys: Tensor
    values: Tensor
    past: ops.Past | None = None
    hidden: Tensor | None = None
    view: LayerView | None = None


class ChunkView(LayerView):
    """Several new tokens, [B, H, n, D], that their layer takes chunk by chunk."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: Owner, keys: Tensor, values: Tensor, spans: list[tuple[int, int]]) -> None:
        super().__init__(layer, keys, values, exact=False, seen=layer.table.seen + keys.shape[2])
        self.spans = spans
        self.taken = 0
        self.prompt: Prompt | None = None
        self.reading: Reading | None = None

    def _attend(
        self,
        query: Tensor,
        scale: float,
        mask: Any,
        softcap: float | None,
        sink_logits: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Attention of [B, Hq, n, D] queries, each chunk over the table as the chunks before have left it."""
        mask = None if self.layer.prompt is not None else mask
        options = {"softcap": softcap, "sink_logits": sink_logits}
        if self.reading is not None:
            return self._read_again(query, scale, mask, bias, options)
        prompt = self.layer.prompt or self.layer.describe_prompt(mask, self.keys.shape[2])
        self.prompt = prompt.on(self.keys.device)
        if len(self.spans) == 1:
            return self._attend_span(query, scale, mask, bias, 0, query.shape[2], options)
        # In the memory layout that the model reads next: heads next to each other.
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], self.values.shape[3])
        for start, end in self.spans:
            out[:, start:end] = self._attend_span(query, scale, mask, bias, start, end, options).transpose(1, 2)
            if end < query.shape[2]:
                self._take(start, end)
                self.layer.compress(query[:, :, start:end], scale)
        return out.transpose(1, 2)

    def finish(self, module: nn.Module, query: Tensor, scale: float, mask: Any) -> None:
        if self.is_owner(module):
            start, end = self.spans[-1]
            with plain():
                self._take(start, end)
                self.layer.finish(query[:, :, start:], scale)

    def _attend_span(
        self, query: Tensor, scale: float, mask: Any, bias: Tensor | None, start: int, end: int, options: dict[str, Any]
    ) -> Tensor:
        table, layer = self.layer.table, self.layer
        assert self.prompt is not None
        layer.method.prepare(table, self.keys[:, :, start:end], self.values[:, :, start:end])
        if table.is_offloaded:
            raise ValueError(READS_EVERYTHING.format(model=layer.model_name))
        masked = bias is not None or not self.prompt.causal
        if table.exact or masked:
            self._take(start, end)
        if masked:
            self.reading = Reading(self.keys, self.values, view=LayerView.of(layer))
        elif table.exact:
            hidden = self.prompt.hidden_from(0)
            self.reading = Reading(table.read_keys(), table.value_slots(), None, hidden)
        else:
            past = ops.Past(table.read_keys(end - start), table.value_slots(), *table.log_weights())
            hidden = self.prompt.hidden_from(table.seen)
            self.reading = Reading(self.keys[:, :, start:end], self.values[:, :, start:end], past, hidden)
        return self._read(query[:, :, start:end], scale, mask, bias, start, end, options)

    def _read(
        self, query: Tensor, scale: float, mask: Any, bias: Tensor | None, start: int, end: int, options: dict[str, Any]
    ) -> Tensor:
        reading, method = self.reading, self.layer.method
        assert reading is not None
        if reading.view is not None:
            padding, seen = self.layer.table.padding, reading.view.seen
            mask = left_padding.mask(padding, seen) if mask is None else masks.rows_of_mask(mask, start, end, seen)
            bias = None if bias is None else masks.rows_of_mask(bias, start, end, seen)
            return reading.view.attend(query, scale, mask, bias=bias, **options)
        out, (_, row_lse) = ops.chunk_attention(
            query, reading.keys, reading.values, scale,
            past=reading.past, hidden=reading.hidden, clip=method.clip, return_state=True, **options,
        )  # fmt: skip
        if method.wants_row_lse and reading.hidden is None and all(option is None for option in options.values()):
            self.layer.table.note_attention(row_lse)
        return out

    def _read_again(
        self, query: Tensor, scale: float, mask: Any, bias: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attention of a layer that shares these keys, after their owner has attended."""
        if len(self.spans) > 1:
            raise ValueError(
                f"layers of {self.layer.model_name} share keys, so that a prompt cannot be read as a stream within one "
                f"forward; feed it chunk by chunk with kvsketch.prefill, or use prefill='exact'"
            )
        return self._read(query, scale, mask, bias, 0, query.shape[2], options)

    def _take(self, start: int, end: int) -> None:
        """The table takes the tokens [start, end), if it has not yet."""
        if self.taken >= end:
            return
        assert self.prompt is not None
        table = self.layer.table
        whole = self.prompt.end if self.layer.chunk is not None else None
        table.append(self.keys[:, :, start:end], self.values[:, :, start:end], whole)
        table.note_padding(self.prompt.padding_at(table.seen))
        self.taken = end


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


def require_stream(prefill: str, chunk: int) -> None:
    """Raises ValueError unless the two say how a prompt is read."""
    if prefill not in PREFILLS:
        raise ValueError(f"prefill={prefill!r} is not one of {', '.join(PREFILLS)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 2:
        raise ValueError(f"chunk={chunk!r} is not a number of tokens; use a whole number of 2 or more, such as 2048")
