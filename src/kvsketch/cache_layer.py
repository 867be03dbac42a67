"""One layer of the cache transformers sees: a slot table, the method that rewrites it, and the way to attention.

The life of a token: `update` appends its key and value to the table and returns key and value tensors, the key tensor
carrying a view of the layer; the attention function (attention.py) finds the view, attends, and calls `finish`, which
lets the method compress the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvsketch import attention, families
from kvsketch.methods.base import Method
from kvsketch.slots import SlotTable


@dataclass
class LayerView:
    """What one forward reads of one layer: travels on the key tensor from the cache to the attention function."""

    layer: SlotLayer
    keys: Tensor
    values: Tensor
    exact: bool
    seen: int
    log_num: Tensor | None = None
    log_den: Tensor | None = None
    kept_index: Tensor | None = None

    @property
    def index(self) -> Tensor:  # [B, H, S] int64
        """Logical index of each slot; only looked at when a mask or bias has to be read at the slots."""
        return self.layer.table.index_slots() if self.kept_index is None else self.kept_index

    def recall(self, query: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None) -> Tensor | None:
        """The answer of a method that lets a single query read a part of the slots; None when it reads all."""
        if query.shape[2] != 1:
            return None
        self.layer.table.scale = scale
        return self.layer.method.attend(self.layer.table, query, softcap, sink_logits)

    def finish(self, module: nn.Module, query: Tensor, scale: float, mask: Any) -> None:
        """Called when attention is done. Layers that share this layer's keys only read; the owner compresses."""
        if getattr(module, "layer_idx", self.layer.table.layer_idx) == self.layer.table.layer_idx:
            self.layer.finish(query, scale, mask)


class SlotLayer(CacheLayerMixin):
    """One full-attention layer of a compressed cache: a slot table and the method that rewrites it."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    record_past = False

    def __init__(self, table: SlotTable, method: Method, model_name: str, keys_are_shared: bool = False) -> None:
        self.table = table
        self.method = method
        self.model_name = model_name
        self.keys_are_shared = keys_are_shared
        self.mask_free = False  # single tokens without a mask: a bounded table holds no padding
        self.waiting: LayerView | None = None  # handed out, not yet attended
        self.pending: Tensor | None = None  # queries of a forward that may still be rolled back
        super().__init__()

    # what transformers asks, in logical coordinates

    def get_seq_length(self) -> int:
        return self.table.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.table.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    @property
    def keys(self) -> Tensor | None:
        return None if self.table.keys is None else self.table.key_slots()

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """transformers assigns None when it builds a layer; the table holds the keys."""

    @property
    def values(self) -> Tensor | None:
        return None if self.table.values is None else self.table.value_slots()

    @values.setter
    def values(self, value: Tensor | None) -> None:
        """transformers assigns None when it builds a layer; the table holds the values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    # the life of a token

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.require_claimed()
        self.is_initialized = True
        self.settle()
        table = self.table
        self.method.prepare(table, key_states, value_states)
        table.append(key_states, value_states, draft=self.record_past)
        view = LayerView(self, table.key_slots(), table.value_slots(), table.exact, table.seen)
        if not table.exact:
            view.log_num, view.log_den = table.log_num, table.log_den
            if self.keys_are_shared:
                # A layer that reads these keys later in this forward must not see what compress changes in place.
                view.log_num = None if table.log_num is None else table.log_num.clone()
                view.log_den = None if table.log_den is None else table.log_den.clone()
                view.kept_index = table.index_slots().clone()
                view.keys, view.values = view.keys.clone(), view.values.clone()
        self.waiting = view
        setattr(view.keys, attention.TAG, view)
        return view.keys, view.values

    def finish(self, query: Tensor, scale: float, mask: Any) -> None:
        """Attention over this layer is done: note the padding, then compress or wait for a roll back."""
        self.waiting = None
        self.table.scale = scale
        self._note_padding(mask)
        self.pending = query
        if not self.record_past:
            self.settle()

    def settle(self) -> None:
        """Compresses what the last forward appended."""
        if self.pending is not None:
            queries, self.pending = self.pending, None
            if self.table.new_tokens > 0:
                self.method.compress(self.table, queries[:, :, : self.table.new_tokens])

    def _note_padding(self, mask: Any) -> None:
        """Learns each row's left padding from what the newest query may see."""
        table = self.table
        first = table.new_tokens == table.seen
        if mask is None or not (first or table.padding is not None):
            return
        visible = attention.last_row_visible(mask, table.seen)  # [B, L]
        if visible is None:
            return
        if first:
            hidden = (visible.cumsum(-1) == 0).sum(-1)
            table.padding = hidden if bool(hidden.any()) else None
        else:
            # Padding goes on only in rows that had nothing else so far.
            assert table.padding is not None
            new = visible[:, -table.new_tokens :]
            hidden = (new.cumsum(-1) == 0).sum(-1)
            table.padding += torch.where(table.padding == table.seen - table.new_tokens, hidden, 0)

    def require_claimed(self) -> None:
        if self.waiting is not None:
            raise families.UnsupportedModelError(
                f"the attention of {self.model_name} (layer {self.table.layer_idx}) never read the "
                f"compressed cache: it does not go "
                f"through transformers' AttentionInterface, so kvsketch cannot serve this model. "
                f"Families with an adapter: {', '.join(families.ADAPTED)}. Use "
                f"transformers.DynamicCache for this model."
            )

    # roll back, rows

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        count = int(tokens_to_remove)
        if count > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {count}")
        self.table.drop_newest(-count)
        self.settle()

    def reset(self) -> None:
        self.table = self.table.cleared()
        self.waiting = self.pending = None
        self.record_past = self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.table.keys is not None:
            rows = torch.arange(self.table.keys.shape[0], device=self.table.keys.device)
            self._select_rows(rows.repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        if self.table.keys is not None:
            self.settle()
            self.table.select_rows(rows)

    def offload(self) -> None:
        raise ValueError(
            "a compressed cache is not offloaded by transformers; choose a recall method with offload instead"
        )
