"""One layer of the cache transformers sees: a slot table, the method that rewrites it, and the way to attention.

The life of a token: `update` appends its key and value to the table and returns key and value tensors, the key tensor
carrying a view of the layer (view.py); the attention function (attention.py) finds the view, attends, and calls
`finish`, which lets the method compress the table. Several tokens at once for a bounded table, and all tokens of a
prompt that is read as a stream, are appended by their view instead, chunk by chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvsketch import ops
from kvsketch.cache import families, masks
from kvsketch.cache.view import TAG, ChunkView, LayerView, Prompt, chunk_spans
from kvsketch.methods.base import Method
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import LEAST
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

HIDES_INSIDE = (
    "attention_mask hides token {token} of batch row {row}, between or after tokens that it shows (without a mask, "
    "transformers hides every pad token); {method} would still let it decide what is kept or read. Pad on the left of "
    "the whole text only, feed rows one at a time, or use DynamicCache; call cache.reset() to use this cache again"
)

# What is known of forwards that may be rolled back. transformers turns recording on before assisted decoding, calls
# `crop` after each of its forwards, and never says that it is over.
OFF = "off"  # a forward is compressed at once
ON = "on"  # it waits for `crop` or the next forward; several tokens are a prompt, maybe with drafts behind it
DRAFTS = "drafts"  # a forward was cropped: several tokens are a draft if they are cropped too, else a prompt
OVER = "over"  # and one later was not: as before, but a single token is compressed at once


class SlotLayer(CacheLayerMixin):
    """One full-attention layer of a compressed cache: a slot table and the method that rewrites it."""

    # What a file holds of a layer, beside its table.
    SAVED = ("pending", "recording", "seen_before", "prompt_before", "read_before", "is_initialized")

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        table: SlotTable,
        method: Method,
        model_name: str,
        keys_are_shared: bool = False,
        chunk: int | None = None,
    ) -> None:
        self.table = table
        self.method = method
        self.model_name = model_name
        self.keys_are_shared = keys_are_shared
        self.chunk = chunk  # tokens of a prompt that are read at once; None: all of them
        self.together: list[SlotLayer] = []  # all compressed layers, for the last of them
        self.before: SlotLayer | None = None  # the layer right before, where that is compressed too
        self.mask_free = False  # single tokens without a mask: a bounded table holds no padding
        self.short_mask = False  # all tables are bounded, and single tokens come without a mask
        self.prompt: Prompt | None = None  # one that comes in several forwards; tells the padding in place of masks
        self.aside: Any = None  # side stream to compress on (decode.captured.Aside); None: the current one
        self.waiting: LayerView | None = None  # the view given to the model and not read yet
        self.refused = ""  # why the last forward was refused
        self.is_read = False  # whether attention has ever read a view of this layer
        self.whole = True  # False while the table changes, and after a change that was interrupted
        self.pending: Tensor | None = None  # queries of a forward that may still be rolled back
        self.recording = OFF
        self.seen_before = self.prompt_before = 0  # what the table counted before the last forward
        self.read_before = 0  # tokens of the forward before the last
        super().__init__()

    # what transformers asks, in logical coordinates

    def get_seq_length(self) -> int:
        return self.table.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.prompt is not None or self.short_mask:
            # No mask is needed: ask for one over the new tokens alone, which transformers omits when it is causal.
            return int(query_length), self.table.seen
        return self.table.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    @property
    def keys(self) -> Tensor | None:
        return None if self.table.empty else self.table.key_slots()

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """transformers assigns None when it builds a layer; the table holds the keys."""

    @property
    def values(self) -> Tensor | None:
        return None if self.table.empty else self.table.value_slots()

    @values.setter
    def values(self, value: Tensor | None) -> None:
        """transformers assigns None when it builds a layer; the table holds the values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    # the life of a token

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.require_claimed()
        self.is_initialized = True
        self.end_draft()
        self.read_before = self.table.seen - self.seen_before
        self.seen_before, self.prompt_before = self.table.seen, self.table.prompt_tokens
        self.table.note_previous(None if self.before is None else self.before.table)
        with plain():
            view = self._in_chunks(key_states, value_states) or self._at_once(key_states, value_states)
        if key_states.requires_grad and view.exact and self.seen_before == 0:
            # The table holds no gradient. A prompt that the model's own kernel reads whole keeps its gradients.
            view.keys, view.values = key_states.view_as(key_states), value_states.view_as(value_states)
        self.waiting, self.whole = view, False
        # Coded slots and flat stores are read from the view; what the model carries to attention is a tensor of heads.
        equal = view.layout is None
        keys = view.keys if isinstance(view.keys, Tensor) and equal else key_states.view_as(key_states)
        values = view.values if isinstance(view.values, Tensor) and equal else value_states.view_as(value_states)
        view.handed_shape = values.shape
        setattr(keys, TAG, view)
        return keys, values

    def end_draft(self) -> None:
        """The last forward was not rolled back: what waited for that is compressed."""
        if self.pending is not None and self.recording == DRAFTS:
            self.recording = OVER
        self.settle()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Marks a change of the table; if an error ends the block, the layer stays marked as incomplete."""
        self.whole = False
        yield
        self.whole = True

    def _at_once(self, keys: Tensor, values: Tensor) -> LayerView:
        self.whole = False
        self.table.append(keys, values)
        view = LayerView.of(self)
        return view.kept() if self.keys_are_shared else view

    def _in_chunks(self, keys: Tensor, values: Tensor) -> ChunkView | None:
        """A view that appends the tokens by itself; None where they are appended at once."""
        several = keys.shape[2] > 1
        if not (several and self.chunk is not None):
            self.method.prepare(self.table, keys, values)
            if not several or self.table.exact:
                return None
        spans = chunk_spans(keys.shape[2], self.chunk, keep_last=self.record_past)
        return ChunkView(self, keys.view_as(keys), values.view_as(values), spans)

    def finish(self, query: Tensor, scale: float, row_logits: ops.RowLogits | None = None) -> None:
        """Attention over this layer is done: compress, or wait for a roll back.

        `row_logits`, the logits of a single query, are valid for this forward only: rows may change while we wait.
        """
        self.waiting = None
        self.table.note_scale(scale)
        self.pending = query.detach()
        if self.recording == OFF or (self.recording == OVER and self.table.appended == 1):
            self.settle(row_logits)
        self.whole = True

    def settle(self, row_logits: ops.RowLogits | None = None) -> None:
        """Compresses what the last forward appended."""
        if self.pending is not None:
            queries, self.pending = self.pending, None
            if self.table.new_tokens > 0:
                self.table.note_attention(self.table.row_lse, row_logits)
                aside = contextlib.nullcontext() if self.aside is None else self.aside.after(queries, row_logits)
                with plain(), self.changing(), aside:
                    self.compress(queries[:, :, : self.table.new_tokens], self.table.scale)
                    if self.together and self.method.settles:
                        self.method.settle([layer.table for layer in self.together])
            else:
                self.table.note_attention()

    def compress(self, queries: Tensor, scale: float) -> None:
        """Calls the method on what was appended last."""
        self.table.note_scale(scale)
        try:
            self.method.compress(self.table, queries)
            if self.table.bits and self.table.exact and self.table.seen >= LEAST:
                # Codes need the table's bounded form, whether something had to go or not.
                self.method.bound(self.table, self.table.seen + max(64, self.table.seen // 64))
        finally:
            self.table.note_attention()

    def note_padding(self, mask: Any) -> None:
        """Learns each row's left padding from what the newest query may see."""
        table = self.table
        self.require_visible(mask, table.seen, table.new_tokens)
        first = table.new_tokens == table.seen
        if mask is None or not (first or table.padding is not None):
            return
        visible = masks.last_row_visible(mask, table.seen)  # [B, L]
        if visible is not None:
            new = visible[:, -table.new_tokens :]
            table.note_padding(left_padding.learned(table.padding, new, table.seen - table.new_tokens))

    def describe_prompt(self, mask: Any, new: int) -> Prompt:
        """What a mask says of `new` tokens that are not appended yet."""
        table, end = self.table, self.table.seen + new
        self.require_visible(mask, end, new)
        padding = table.padding
        visible = None if mask is None else masks.last_row_visible(mask, end)  # [B, L]
        if visible is not None:
            padding = left_padding.learned(padding, visible[:, -new:], table.seen)
        return Prompt(end, padding, masks.is_causal(mask, end, new, padding))

    def require_visible(self, mask: Any, end: int, new: int) -> None:
        """Raises ValueError when a mask hides tokens inside a row from a method that would take them for visible.

        Checks only when several tokens come, because a decode step must not wait for the device. A token that was
        hidden when it came alone is found when several tokens come next.
        """
        hidden = None if new == 1 or self.method.ignores_hidden_tokens else masks.hidden_inside(mask, end)
        if hidden is not None:
            self.refused = HIDES_INSIDE.format(row=hidden[0], token=hidden[1], method=self.method.name)
            raise ValueError(self.refused)

    def require_claimed(self) -> None:
        if self.refused:
            raise ValueError(self.refused)
        if self.waiting is not None:
            keys, values = self.waiting.keys, self.waiting.values
            raise families.unread(self.model_name, self.table.layer_idx, keys.shape, values.shape)

    # roll back, rows

    @property
    def record_past(self) -> bool:
        """Whether a forward may be rolled back; transformers sets it, and after assisted decoding leaves it set."""
        return self.recording != OFF

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.recording = ON if value else OFF

    @property
    def has_drafted(self) -> bool:
        """Whether recording is on since a forward that was cropped: assisted decoding may have left it on."""
        return self.recording in (DRAFTS, OVER)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def refuses_crop(self, count: int) -> str:
        """Why the last `count` tokens cannot be forgotten as if they had never come; empty: they can."""
        left = self.table.seen - count
        if left == 0 or self._is_draft(count) or self.method.can_forget(self.table, left):
            return ""
        return f"{self.method.name} has compressed them already"

    def _is_draft(self, count: int) -> bool:
        """Whether the last `count` tokens are not compressed yet."""
        return self.pending is not None and count <= self.table.new_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-k)` forgets the newest k tokens, where `refuses_crop` allows it."""
        count = -int(tokens_to_remove)
        if count > 0 and count == self.table.seen:
            self.table, self.pending = self.table.cleared(), None
        elif count > 0 or self.pending is not None:
            with plain(), self.changing():
                self.table.set_prompt(self._prompt_without(count))
                if self._is_draft(count):
                    self.table.drop_newest(count)
                else:
                    self.pending = None
                    self.method.forget(self.table, count)
        if self.record_past:
            self.recording = DRAFTS
        self.settle()

    def _prompt_without(self, count: int) -> int:
        """The prompt length that a share budget counts from, once the last `count` tokens are gone."""
        table, left = self.table, self.table.seen - count
        if table.appended == 1 or left < self.seen_before:
            return min(table.prompt_tokens if table.appended == 1 else self.prompt_before, left)
        several = left - self.seen_before > 1 and not self.has_drafted
        return left if several or self.prompt_before == 0 else self.prompt_before

    def reset(self) -> None:
        self.table = self.table.cleared()
        self.waiting = self.pending = self.prompt = None
        self.refused, self.whole = "", True
        self.record_past = self.is_initialized = False
        self.seen_before = self.prompt_before = self.read_before = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self.table.empty:
            rows = torch.arange(self.table.shape[0], device=self.table.device)
            self._select_rows(rows.repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        if not self.table.empty:
            self.settle()
            with plain(), self.changing():
                self.table.select_rows(rows)

    def offload(self) -> None:
        raise ValueError(
            "a compressed cache is not offloaded by transformers; choose a recall method with offload instead"
        )
