"""Seam 1 into transformers: the cache. Everything transformers asks is answered in logical coordinates.

The life of a token: `update` appends its key and value to the table of each layer and returns key and value tensors,
the key tensor carrying a view of the layer; the attention function (attention.py) finds the view, attends, and tells
the layer, which lets its method compress the table. `tokens_seen` counts what the model has read, `tokens_stored` what
memory still holds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvsketch import attention, families
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.slots import SlotTable
from kvsketch.storage.hot_set import hit_rate


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


class CompressedCache(Cache):
    """A KV cache for `model.generate(..., past_key_values=cache)` that a method keeps small.

        cache = CompressedCache(model, "streamingllm:budget=1024")

    `model` is a model or its config; `method` a text form or a Method. Full-attention layers are compressed;
    sliding-window and linear-attention layers stay native. The model is not changed.
    """

    def __init__(self, model: nn.Module | PretrainedConfig, method: str | Method = "full", *, seed: int = 0) -> None:
        config = model if isinstance(model, PretrainedConfig) else getattr(model, "config", None)
        if not isinstance(config, PretrainedConfig):
            raise ValueError(f"CompressedCache takes a transformers model or its config, not {type(model).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{config.model_type} is an encoder-decoder model; kvsketch serves decoder-only models")
        if getattr(config, "use_cache", True) is False:
            warnings.warn(f"{config.model_type} turns its cache off by default: pass use_cache=True", stacklevel=2)
        self.method = parse_method(method)
        self.model_name = str(getattr(config, "model_type", type(config).__name__))
        attention.install()
        families.adapt(config)
        native = DynamicCache(config=config).layers
        text_config = config.get_text_config(decoder=True)
        shared = bool(getattr(text_config, "num_kv_shared_layers", 0))
        layers = [
            SlotLayer(SlotTable(i, len(native), seed), self.method, self.model_name, shared)
            if type(layer) is DynamicLayer
            else layer
            for i, layer in enumerate(native)
        ]
        super().__init__(layers=layers)
        for rank, layer in enumerate(self.slot_layers):
            layer.table.rank, layer.table.compressed_layers = rank, len(self.slot_layers)
        if not self.slot_layers:
            raise ValueError(f"{self.model_name} has no full-attention layer to compress; use DynamicCache")

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers that the method compresses."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        before = self.layers[layer_idx - 1] if layer_idx > 0 else None
        if isinstance(before, SlotLayer):
            before.require_claimed()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def tokens_seen(self) -> int:
        """Tokens the model has read into this cache."""
        return self.slot_layers[0].table.seen

    @property
    def tokens_stored(self) -> int:
        """The most slots any KV head of a compressed layer holds."""
        return max(layer.table.stored() for layer in self.slot_layers)

    @property
    def device_bytes(self) -> int:
        """Bytes of every tensor on the model's device: keys, values, weights, index, state, native layers included."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in _layer_tensors(layer))

    @property
    def host_bytes(self) -> int:
        """Bytes the cache holds in host memory beside the device."""
        tensors = (t for layer in self.slot_layers for t in layer.table.host_tensors())
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def hit_rate(self) -> float | None:
        """With offload=host, the share of reads that found their token on the device."""
        return hit_rate(layer.table for layer in self.slot_layers)

    def __repr__(self) -> str:
        counts = f"tokens_seen={self.tokens_seen}, tokens_stored={self.tokens_stored}"
        return f"CompressedCache({self.model_name}, '{self.method}', {counts})"


def _layer_tensors(layer: Any) -> list[Tensor]:
    if isinstance(layer, SlotLayer):
        return layer.table.tensors()
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [t for t in tensors if isinstance(t, Tensor)]
