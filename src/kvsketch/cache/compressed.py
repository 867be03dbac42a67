"""Seam 1 into transformers: the cache. Everything transformers asks is answered in logical coordinates.

A cache is a list of layers (layer.py). Those with full attention are compressed. `tokens_seen` counts what the model
has read, `tokens_stored` what memory still holds.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvsketch.cache import attention, families, interrupted, repetition, rollback, rotary, saving, streaming
from kvsketch.cache import memory as memory_sizes
from kvsketch.cache.checks import require_finite
from kvsketch.cache.chunks import require_stream
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.read import TextRead
from kvsketch.cache.saving.model_identity import ModelIdentity, layer_devices
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.ops.codec import Codec
from kvsketch.slots.codes import PLAIN, FewBits
from kvsketch.slots.heads import head_share, require_one_device
from kvsketch.slots.hot_set import hit_rate
from kvsketch.slots.table import SlotTable


class CompressedCache(Cache):
    """A KV cache for `model.generate(..., past_key_values=cache)` that a method keeps small.

        cache = CompressedCache(model, "streamingllm:budget=1024")

    `model` is a model or its config; `method` a text form or a Method. Full-attention layers are compressed;
    sliding-window and linear-attention layers stay native. The model is not changed. `check`: a nan or inf in a key
    or value is an error that names its layer and head (asks the device at every step).

    `prefill`: "exact" reads the whole prompt and then compresses it. "stream" reads `chunk` tokens at a time; each
    chunk attends to itself and to what is left of the chunks before, so the whole prompt never has to fit.

    `memory`, such as "2GB": the method gets the largest budget with which `batch` prompts of `context` tokens (the
    positions of the model unless given) take no more bytes on the device; `cache.method` says which that was.
    """

    def __init__(
        self,
        model: nn.Module | PretrainedConfig,
        method: str | Method = "full",
        *,
        seed: int = 0,
        check: bool = False,
        prefill: str = "exact",
        chunk: int = 2048,
        memory: int | str | None = None,
        context: int | None = None,
        batch: int = 1,
    ) -> None:
        config = model if isinstance(model, PretrainedConfig) else getattr(model, "config", None)
        if not isinstance(config, PretrainedConfig):
            raise ValueError(f"CompressedCache takes a transformers model or its config, not {type(model).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{config.model_type} is an encoder-decoder model; kvsketch serves decoder-only models")
        if getattr(config, "use_cache", True) is False:
            warnings.warn(f"{config.model_type} turns its cache off by default: pass use_cache=True", stacklevel=2)
        require_stream(prefill, chunk)
        self.method = parse_method(method)
        self.check, self.prefill, self.chunk = check, prefill, chunk
        self.identity = ModelIdentity(model, config)
        self.head_share = head_share(model)
        self.model_name = str(getattr(config, "model_type", type(config).__name__))
        families.require_served(model, config, bounded=self.method.name != "full")
        native = DynamicCache(config=config).layers
        if not any(type(layer) is DynamicLayer for layer in native):
            raise families.no_layer(self.model_name, native)
        compressed = [i for i, layer in enumerate(native) if type(layer) is DynamicLayer]
        if memory is not None:
            self.method = self._fitted(model, config, native, compressed, memory, context, batch)
        elif context is not None or batch != 1:
            raise ValueError("context and batch say what memory is to hold; give memory, such as memory='2GB', too")
        _require_codable(self.method.stored_bits, config)
        attention.install()
        streaming.install()
        families.adapt(config)
        text_config = config.get_text_config(decoder=True)
        shared = bool(getattr(text_config, "num_kv_shared_layers", 0))
        if shared:
            require_one_device(model)
        choice = None if getattr(self.method, "placeless", "") else getattr(self.method, "positions", None)
        angles, positions = rotary.frequencies(config), rotary.positions(config, choice)
        if self.method.needs_angles and not angles:
            what, instead = self.method.needs_angles
            raise ValueError(
                f"{self.method.name} {what} by the rotary angles of the model, and {rotary.unknown(config, instead)}"
            )
        layers = list(native)
        for rank, i in enumerate(compressed):
            table = SlotTable(
                i, len(native), seed, rank, len(compressed), angles, positions, bits=self.method.stored_bits
            )
            layers[i] = SlotLayer(table, self.method, self.model_name, shared, chunk if prefill == "stream" else None)
        super().__init__(layers=layers)
        self._empty = {i: copy.deepcopy(layer) for i, layer in enumerate(layers) if not isinstance(layer, SlotLayer)}
        self._last_updated = len(layers)  # updated last; an index not above it starts a new forward
        self._broken_off = ""
        self.read = TextRead()
        if self.slot_layers:
            self.slot_layers[-1].together = self.slot_layers
        for before, after in itertools.pairwise(layers):
            # Layers that share keys read one table with different queries; there is no single query to learn from.
            if isinstance(before, SlotLayer) and isinstance(after, SlotLayer) and not shared:
                after.before = before

    def _fitted(
        self,
        model: Any,
        config: PretrainedConfig,
        native: list[Any],
        compressed: list[int],
        memory: int | str,
        context: int | None,
        batch: int,
    ) -> Method:
        """The method with the budget that fits into `memory`."""
        size = memory_sizes.parsed(memory)
        context = context or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not isinstance(context, int) or context < 1 or batch < 1:
            raise ValueError(
                f"context={context!r} and batch={batch!r} must be numbers of 1 or more; give context=32000"
            )
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.get_default_dtype()
        parts = 1 if self.head_share is None else self.head_share.parts
        others = [layer for i, layer in enumerate(native) if i not in compressed]
        sizes = memory_sizes.Sizes.of(config, dtype, others, parts, batch, context)
        places = [SlotTable(i, len(native), 0, rank, len(compressed)) for rank, i in enumerate(compressed)]
        return memory_sizes.fitted(self.method, size, context, lambda m: sizes.bytes(m, places, context))

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers that the method compresses."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if layer_idx <= self._last_updated:
            interrupted.require_whole(self.layers, self._broken_off)
            if self.method.settles:
                # What layers decide together is decided before the first of them goes on.
                for each in self.slot_layers:
                    each.end_draft()
        elif layer_idx > 0:
            interrupted.require_read(self.layers[layer_idx - 1])
        if self.check:
            require_finite(key_states, value_states, layer_idx, self.get_seq_length(layer_idx), self.model_name)
        self._last_updated = layer_idx
        if isinstance(layer, SlotLayer):
            if self.head_share is not None:
                self.head_share.place(layer.table, key_states.shape[1])
            return layer.update(key_states, value_states, *args, **kwargs)
        self.break_off(f"layer {layer_idx} has taken some of its tokens")
        updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._broken_off = ""
        return updated

    def break_off(self, what: str) -> None:
        """From here on every forward is refused until `reset`."""
        self._broken_off = what

    def broken_off(self) -> str:
        """What an interrupted forward has left behind, in words; empty when all layers have read the same tokens."""
        return self._broken_off or interrupted.left_behind(self.layers)

    def layer_lengths(self) -> list[int]:
        """Tokens that each layer of attention has read."""
        return interrupted.lengths(self.layers)

    def reset(self) -> None:
        """Forgets everything; the cache is empty again."""
        for layer in self.slot_layers:
            layer.reset()
        for number, native in self._empty.items():
            self.layers[number] = copy.deepcopy(native)
        self._last_updated, self._broken_off = len(self.layers), ""
        self.read.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-k)` forgets the newest k tokens, as if they had never been read.

        After `activate_past_recording()` this works for the tokens of the last forward. Without it, it works while the
        method has not dropped, summarised or scored any of them. Otherwise RuntimeError, and nothing changes.
        """
        rollback.crop(self.layers, self.tokens_seen, -int(tokens_to_remove), self._broken_off)
        if self.tokens_seen < self.read.tokens:
            self.read.forget()

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self.read.forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.read.forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.read.forget()

    def end_recording(self) -> None:
        """Compresses what could still be rolled back. From here on every forward is compressed at once."""
        rollback.end_recording(self.layers)

    def rehearse(self, model: nn.Module, input_ids: Tensor, instruction: Tensor | None = None) -> None:
        """Lets the model repeat what this cache has read and its method has not compressed yet (replay=exact, kvzip).

        `input_ids` [B, n] end with these tokens. `instruction`, token ids, is said before every chunk, such as those of
        "Repeat the previous context exactly." in the model's chat template. Nothing of the repetition stays.
        `kvsketch.prefill` and `generate` call this; it is needed after a forward of the model alone.
        """
        if not self.method.repeats:
            raise ValueError(f"{self.method} repeats nothing; use rehearse:replay=exact or kvzip")
        repetition.repeat(self, model, input_ids, instruction)

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
        return hit_rate(layer.table.hot for layer in self.slot_layers)

    def describe(self) -> str:
        """A line for each compressed layer: slots of its smallest and largest head, bits, bytes (asks the device)."""
        lines = ["layer  slots of a head   bits k/v         bytes"]
        for table in (layer.table for layer in self.slot_layers):
            used = table.used_slots()
            least, most = int(used.min()), int(used.max())
            bits = FewBits() if table.exact else table.bits
            held = sum(t.numel() * t.element_size() for t in table.tensors())
            slots = f"{least}" if least == most else f"{least} to {most}"
            lines.append(f"{table.layer_idx:5}  {slots:16}  {f'{bits.keys}/{bits.values}':8} {held:13,}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str], about: Mapping[str, str] | None = None) -> None:
        """Writes the cache to a file, in one step; see `saving`. `about`: words of your own, for `saving.about`."""
        self._require_savable()
        # `check` is a debugging option and is not saved.
        options = {"seed": self.slot_layers[0].table.seed, "prefill": self.prefill, "chunk": self.chunk}
        model, read = self.identity.describe(self.head_share), dataclasses.asdict(self.read)
        saving.save(path, self.method, options, model, read, self.layers, about or {})

    def _require_savable(self) -> None:
        if any(layer.prompt is not None for layer in self.slot_layers):
            raise ValueError("this cache is in the middle of a prompt; save it when the whole prompt has been read")
        what = self.broken_off()
        if what:
            raise ValueError(
                f"what was last read into this cache was broken off: {what}; start again with cache.reset(), or load "
                "the file that was saved before"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | PretrainedConfig) -> CompressedCache:
        """The cache that `save` wrote, on the model's device; ValueError when file or model are not the right ones."""
        with saving.opened(path) as saved:
            cache = cls(model, saved.method, **saved.options)
            differences = cache.identity.differences(saved.model, cache.head_share)
            saved.fill(cache.layers, layer_devices(model, len(cache.layers)), differences)
            for table in (layer.table for layer in cache.slot_layers):
                if cache.head_share is not None and not table.empty:
                    cache.head_share.place(table, table.shape[1])
            cache.read = TextRead(**saved.read)
            cache._require_savable()
        return cache

    def __repr__(self) -> str:
        counts = f"tokens_seen={self.tokens_seen}, tokens_stored={self.tokens_stored}"
        return f"CompressedCache({self.model_name}, '{self.method}', {counts})"


def _require_codable(bits: FewBits, config: PretrainedConfig) -> None:
    """Raises ValueError when heads of the model's size cannot be held in so few bits."""
    text = config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, text.num_attention_heads)
    for count in {bits.keys, bits.values} - {PLAIN}:
        Codec(count, size)


def _layer_tensors(layer: Any) -> list[Tensor]:
    if isinstance(layer, SlotLayer):
        return layer.table.tensors()
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [t for t in tensors if isinstance(t, Tensor)]
