"""One layer of the cache that transformers sees: a slot table, the method that rewrites it, and what a forward reads.

The life of a token: `update` appends its key and value to the table and returns keys and values for the model. The key
tensor carries a `LayerView`. The attention function (attention.py) finds the view, attends and calls `finish`, and the
method compresses the table. Several tokens at once for a bounded table, and a prompt that is read as a stream, are
appended chunk by chunk while they attend (chunks.py).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvsketch import ops
from kvsketch.cache import document, masks
from kvsketch.cache.forward import Forward
from kvsketch.methods.base import Method
from kvsketch.methods.bits import note_rounding, settle_bits
from kvsketch.ops.codec import CodedSlots
from kvsketch.slots import coding, short_rows
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import AUTO
from kvsketch.slots.coding import require_finite
from kvsketch.slots.layout import Layout
from kvsketch.slots.offloaded import require_on_device
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

TAG = "_kvsketch_view"  # on a key tensor: its view
# What is known of forwards that may be rolled back (rollback.py). transformers turns recording on before assisted
# decoding, calls `crop` after each of its forwards, and never says that it is over.
OFF = "off"  # a forward is compressed at once
ON = "on"  # it waits for `crop` or the next forward; several tokens are a prompt, maybe with drafts behind it
DRAFTS = "drafts"  # a forward was cropped: several tokens are a draft if they are cropped too, else a prompt
OVER = "over"  # and one later was not: as before, but a single token is compressed at once
RECORDINGS = (OFF, ON, DRAFTS, OVER)


class SlotLayer(CacheLayerMixin):
    """One full-attention layer of a compressed cache: a slot table and the method that rewrites it."""

    # What a file holds of a layer, beside its table.
    SAVED = ("pending", "recording", "seen_before", "prompt_before", "read_before", "is_initialized")

    is_sliding, is_compileable, is_croppable = False, False, True

    def __init__(
        self, table: SlotTable, method: Method, model_name: str, forward: Forward, keys_are_shared: bool = False
    ) -> None:
        self.table, self.model_name, self.keys_are_shared = table, model_name, keys_are_shared
        self.use(method)
        self.forward = forward  # shared by the layers of a cache
        # The compressed layers before, for the last of them. Without itself: a cycle would keep the cache in memory
        # until the garbage collector runs.
        self.together: list[SlotLayer] | None = None
        self.before: SlotLayer | None = None  # the layer right before, where that is compressed too
        self.waiting: LayerView | None = None  # the view given to the model and not read yet
        self.refused = ""  # why the last forward was refused
        self.is_read = False  # whether attention has ever read a view of this layer
        self.whole = True  # False while the table changes, and after a change that was interrupted
        self.pending: Tensor | None = None  # queries of a forward that may still be rolled back
        self.recording = OFF
        self.seen_before = self.prompt_before = 0  # what the table counted before the last forward
        self.read_before = 0  # tokens of the forward before the last
        super().__init__()

    def use(self, method: Method) -> None:
        """The method from here on, and what a forward would ask it again and again."""
        kind = type(method)
        self.method, self.clip, self.settles = method, method.clip, method.settles
        self.prepares = kind.prepare is not Method.prepare
        self.attends = kind.attend is not Method.attend

    # what transformers asks, in logical coordinates

    def get_seq_length(self) -> int:
        return self.table.before + self.table.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.forward.prompt is not None or self.forward.short_mask:
            # No mask is needed: ask for one over the new tokens alone, which transformers omits when it is causal.
            return int(query_length), self.get_seq_length()
        # Every query sees all of a document.
        return self.table.seen + int(query_length), self.table.before

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    # transformers assigns None to both when it builds a layer.
    keys: Any = property(lambda self: None if self.table.empty else self.table.key_slots(), lambda self, none: None)
    values: Any = property(lambda self: None if self.table.empty else self.table.value_slots(), lambda self, none: None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    # the life of a token

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        if self.pending is not None:
            self.end_draft()
        if self.table.seen == self.table.prompt_tokens == key_states.shape[2] == 1 and self.table.context.rank == 0:
            self.method.note_prompt(self.table)  # a prompt that is fed token by token, or has but one
        self.read_before = self.table.seen - self.seen_before
        self.seen_before, self.prompt_before = self.table.seen, self.table.prompt_tokens
        self.table.forward.previous = None if self.before is None else self.before.table
        with plain():
            view = self._append(key_states, value_states)
        if key_states.requires_grad and view.exact and self.seen_before == self.table.before == 0:
            # The table holds no gradient. A prompt that the model's own kernel reads whole keeps its gradients.
            view.keys, view.values = key_states.view_as(key_states), value_states.view_as(value_states)
        self.waiting, self.whole = view, False
        # Coded slots and flat stores are read from the view; what the model carries to attention is a tensor of heads.
        equal = view.layout is None
        keys = view.keys if isinstance(view.keys, Tensor) and equal else key_states
        values = view.values if isinstance(view.values, Tensor) and equal else value_states.view_as(value_states)
        view.handed_shape = values.shape
        # A tensor of its own: one that the view holds too would keep the whole prompt until the garbage collector runs.
        keys = keys.view_as(keys)
        setattr(keys, TAG, view)
        return keys, values

    def _append(self, keys: Tensor, values: Tensor) -> LayerView:
        several = keys.shape[2] > 1
        if self.prepares and (not several or self.forward.chunk is None):
            self.method.prepare(self.table, keys, values)
        if several and (self.forward.chunk is not None or not self.table.exact or self.table.document is not None):
            seen = self.table.seen + keys.shape[2]
            return LayerView(self, keys.view_as(keys), values.view_as(values), exact=False, seen=seen, appended=False)
        self.whole = False
        self.table.append(keys, values)
        view = self.view()
        return view.copied() if self.keys_are_shared else view

    def view(self) -> LayerView:
        """What this forward reads."""
        return LayerView.of(self)

    def note_padding(self, mask: Any) -> None:
        """Learns each row's left padding from what the newest query may see."""
        table = self.table
        self.require_visible(mask, table.seen, table.new_tokens)
        if table.padding is not None or table.new_tokens == table.seen:
            left_padding.give(table, self.padding_after(mask, table.seen, table.new_tokens))

    def padding_after(self, mask: Any, seen: int, new: int) -> Tensor | None:  # [B]
        """Left padding of each row among `seen` tokens, the `new` last of them under this mask."""
        known = self.table.padding
        # What is known is a sum on the device; an empty cache asks whether there is any.
        shared = mask if known is None else None
        return self.forward.once("padding", shared, seen, lambda: masks.padding_after(mask, known, seen, new))

    def require_visible(self, mask: Any, end: int, new: int) -> None:
        """Refuses a mask that hides tokens inside a row from a method that would take them for visible."""
        # A decode step must not wait for the device: a token hidden there is found when several tokens come next.
        if new > 1 and not self.method.ignores_hidden_tokens:
            name = self.method.name
            self.refused = self.forward.once("refusal", mask, end, lambda: masks.refusal(mask, end, name))
            if self.refused:
                raise ValueError(self.refused)

    def finish(self, query: Tensor, scale: float, row_logits: ops.RowLogits | None = None) -> None:
        """Attention over this layer is done: compress, or wait for a roll back, for which `row_logits` do not last."""
        self.waiting = None
        self.table.forward.scale = scale
        self.pending = query.detach()
        if self.recording == OFF or (self.recording == OVER and self.table.forward.appended == 1):
            self._settle(row_logits)
        self.whole = True

    def compress_pending(self) -> None:
        """Compresses what the last forward appended and could be rolled back."""
        if self.pending is not None:
            with plain():
                self._settle()

    def _settle(self, row_logits: ops.RowLogits | None = None) -> None:
        assert self.pending is not None
        table, forward = self.table, self.table.forward
        queries, self.pending = self.pending[:, :, : table.new_tokens], None
        forward.row_logits = row_logits
        if table.new_tokens == 0:
            forward.row_lse = forward.row_logits = None
            return
        side = self.forward.side_stream
        side_stream = contextlib.nullcontext() if side is None else side.after(queries, row_logits)
        with self.changing(), side_stream:
            self.compress(queries)
            if self.together is not None:
                tables = [layer.table for layer in (*self.together, self)]
                if self.settles:
                    self.method.settle(tables)
                if table.context.bits.keys == AUTO:
                    settle_bits(tables)
                if table.padding is not None:
                    for each in tables:
                        short_rows.settle(each)
                # Once for all layers, so that none of them waits for the device.
                if any(each.forward.finite_checks for each in tables):
                    require_finite(tables)

    def compress(self, queries: Tensor) -> None:
        """Calls the method on what was appended last."""
        table = self.table
        try:
            if table.exact:
                note_rounding(table, queries)
            self.method.compress(table, queries)
            if table.exact and table.context.bits and not coding.waits(table):
                # Codes need the table's bounded form, whether something had to go or not.
                self.method.bound(table, table.seen + max(64, table.seen // 64))
            if self.forward.chunk is not None and table.padding is not None:
                short_rows.settle(table)
        finally:
            table.forward.row_lse = table.forward.row_logits = None

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Marks a change of the table; if an error ends the block, the layer stays marked as incomplete."""
        self.whole = False
        yield
        self.whole = True

    # roll back, rows

    @property
    def record_past(self) -> bool:
        """Whether a forward may be rolled back; transformers sets it, and after assisted decoding leaves it set."""
        return self.recording != OFF

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.recording = ON if value else OFF

    def activate_past_recording(self) -> None:
        self.record_past = True

    def end_draft(self) -> None:
        """The last forward was not rolled back: what waited for that is compressed."""
        if self.pending is not None and self.recording == DRAFTS:
            self.recording = OVER
        self.compress_pending()

    def reset(self) -> None:
        self.table = self.table.cleared()
        self.waiting = self.pending = self.forward.prompt = None
        self.refused, self.whole = "", True
        self.record_past = self.is_initialized = False
        self.seen_before = self.prompt_before = self.read_before = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self.table.empty:
            self.compress_pending()
            with plain(), self.changing():
                self.table.select_rows(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self.table.empty:
            rows = torch.arange(self.table.shape[0], device=self.table.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        raise ValueError(
            "a compressed cache is not offloaded by transformers; choose a recall method with offload instead"
        )


@dataclass
class LayerView:
    """What one forward reads of a layer."""

    layer: SlotLayer
    keys: Tensor | CodedSlots
    values: Tensor | CodedSlots
    exact: bool
    seen: int
    log_num: Tensor | None = None
    log_den: Tensor | None = None
    layout: Layout | None = None  # where the slots of heads that differ lie; None: equal heads
    copied_index: Tensor | None = None
    appended: bool = True  # False: the keys and values are new ones that the table does not hold yet (chunks.py)
    reading: Any = None  # what the last chunk of these read
    handed_shape: tuple[int, ...] = ()  # of the values that the model carries to attention
    row_logits: ops.RowLogits | None = None  # of the last attention by a single query, for methods that want them

    @classmethod
    def of(cls, layer: SlotLayer) -> LayerView:
        """The table of a layer as it is."""
        table = layer.table
        return cls(layer, exact=table.exact, seen=table.seen, **table.read()._asdict())

    @property
    def index(self) -> Tensor:  # [B, H, S] int64
        """Logical index of each slot; only looked at when a mask or bias has to be read at the slots."""
        return self.layer.table.index_slots() if self.copied_index is None else self.copied_index

    def copied(self) -> LayerView:
        """A copy for layers that read these keys later in this forward, so that compress cannot change it in place."""
        if not self.exact:
            read: list[Any] = [self.keys, self.values, self.log_num, self.log_den, self.index]
            self.keys, self.values, self.log_num, self.log_den, self.copied_index = copy.deepcopy(read)
        return self

    def attend(self, query: Tensor, scale: float, mask: Any, bias: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of [B, Hq, n, D] queries over the slots; `bias` is logical like the mask. Called where new tensors
        have no gradients (`plain`).
        """
        layer, table, single = self.layer, self.layer.table, query.shape[2] == 1
        if table.host is not None:
            require_on_device(table, layer.model_name)
        wanted = layer.method.wants_logits and not self.exact and single and options.get("softcap") is None
        shared, slot_bias = table.document is not None, None
        if mask is not None or not single:
            slot_bias = masks.mask_at_slots(mask, query, lambda: self.index, self.seen, table.shape[1])
        if bias is not None:
            slot_bias = masks.add_bias(slot_bias, masks.at_slots(bias, self.index, query.shape[1]))
        attended = ops.weighted_attention(
            query, self.keys, self.values, self.log_num, self.log_den, scale, bias=slot_bias,
            clip=layer.clip, ragged=self.layout, return_state=wanted or shared, return_logits=wanted, **options,
        )  # fmt: skip
        if shared:
            return document.joined(table, query, attended[0], attended[1][1], scale, options.get("softcap"))
        if not wanted:
            return attended
        out, (row_lse, _), logits = attended
        # The numerator's sum contains the bias, which the logits do not, and leaves out a sink logit.
        self.row_logits = ops.RowLogits(logits[:, :, 0], row_lse[:, :, 0] if slot_bias is None else None)
        return out

    def finish(self, module: nn.Module, query: Tensor, scale: float, mask: Any) -> None:
        """Called when attention is done, where new tensors have no gradients (`plain`). Layers that share this layer's
        keys only read; the owner compresses.
        """
        row_logits, self.row_logits = self.row_logits, None
        if self.is_owner(module):
            self.layer.note_padding(mask)
            self.layer.finish(query, scale, row_logits)

    def is_owner(self, module: nn.Module) -> bool:
        own = self.layer.table.context.layer_idx
        return getattr(module, "layer_idx", own) == own
