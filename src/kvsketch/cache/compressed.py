"""Seam 1 into transformers: the cache. Everything transformers asks is answered in logical coordinates.

A cache is a list of layers (layer.py). Those with full attention are compressed. `tokens_seen` counts what the model
has read, `tokens_stored` what memory still holds.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from kvsketch.cache import (
    attention,
    continuing,
    families,
    interrupted,
    making,
    overview,
    rollback,
    saving,
    streaming,
)
from kvsketch.cache import memory as memory_sizes
from kvsketch.cache.checks import require_finite
from kvsketch.cache.chunks import require_one_chunk, require_stream
from kvsketch.cache.doubt import Doubt
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.replay import compaction, fitting, repetition
from kvsketch.cache.replay.compaction import Span
from kvsketch.cache.replay.promise import Promise
from kvsketch.cache.saving.model_identity import ModelIdentity
from kvsketch.cache.text import ReadBehind, TextRead
from kvsketch.defaults import CHUNK, SEED
from kvsketch.environment import warn_of_untested
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.methods.capabilities import Support
from kvsketch.slots import coding
from kvsketch.slots.bytes import host_tensors
from kvsketch.slots.codes import AUTO
from kvsketch.slots.heads import head_share
from kvsketch.slots.hot_set import hit_rate
from kvsketch.slots.tensors import copies, plain


class CompressedCache(Cache):
    """A compressed KV cache for `model.generate(..., past_key_values=cache)`.

        cache = CompressedCache(model, "streamingllm:budget=1024")

    `model` is a model or its config; `method` a method string or a Method. Full-attention layers are compressed;
    sliding-window and linear-attention layers stay native. The model is not changed. `seed` is for random
    methods. `check`: a nan or inf in a key or value raises an error with layer and head (synchronises at every step).

    `prefill`: "exact" reads the whole prompt and then compresses it. "stream" reads `chunk` tokens at a time; each
    chunk attends to itself and to what is stored of earlier chunks, so the whole prompt need not fit into memory.

    `memory`, such as "2GB": the method gets the largest budget with which `batch` prompts of `context` tokens
    (default: the positions of the model) fit into that device memory; `cache.method` shows it.
    """

    def __init__(
        self,
        model: nn.Module | PretrainedConfig,
        method: str | Method = "full",
        *,
        seed: int = SEED,
        check: bool = False,
        prefill: str = "exact",
        chunk: int = CHUNK,
        memory: float | str | None = None,
        context: int | None = None,
        batch: int = 1,
    ) -> None:
        warn_of_untested()
        require_stream(prefill, chunk)
        self.method = parse_method(method)
        if prefill == "stream" and (reason := self.method.capabilities.stream.reason) is not None:
            raise ValueError(f"{self.method} cannot read a prompt in parts: {reason}; use prefill='exact'")
        self.check, self.prefill, self.chunk = check, prefill, chunk
        config = making.served_config(model, self.method)
        self.identity, self.head_share = ModelIdentity(model, config), head_share(model)
        self.model_name = str(config.model_type)
        native = making.native_layers(config)
        self.method = memory_sizes.fitted_to(memory, context, batch, self.method, model)
        asked = self.method
        self.method = fitting.with_learned(asked, self.identity, self.head_share)
        self._found = fitting.found(asked, self.method)
        at_once = chunk if prefill == "stream" else None
        super().__init__(layers=making.compressed_layers(native, model, config, self.method, seed, at_once))
        attention.install()
        streaming.install()
        families.adapt(config)
        self._empty = {i: copy.deepcopy(layer) for i, layer in enumerate(self.layers) if layer is native[i]}
        self._last_updated = len(self.layers)  # updated last; an index not above it starts a new forward
        self._broken_off = ""
        self.is_document = False  # whether others continue it, so that it must not change
        self.text = TextRead()
        self.asked = self.method
        self.promise: Promise | None = None  # what was promised of the loss, and what was tried (`promise`)
        self.watched: Doubt | None = None  # the last answer, where somebody asked for its doubt

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers that the method compresses."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def continued(self) -> Self:
        """Returns a cache that continues this one (the document) and shares its slots read-only.

        It stores only what follows, in any number of rows, compressed by the same method with a budget of its own:
        a share is one of its own tokens. `tokens_seen` counts the document too. Any number of caches may continue one
        document; it takes no more tokens itself until `reset`, which leaves them as they are.
        """
        if (reason := self.can_be_continued.reason) is not None:
            raise ValueError(reason)
        rollback.end_recording(self.layers)
        self.is_document = True
        made = copy.copy(self)
        made.layers, made.is_document = [*continuing.layers_after(self.slot_layers)], False
        made.text, made.watched = ReadBehind.of(self.text), None
        return made

    @property
    def can_be_continued(self) -> Support:
        """Whether `continued` works now, and why not."""
        return continuing.support(self.layers, self.method, self.model_name, self._left_behind())

    @property
    def tokens_before(self) -> int:
        """Tokens of the document that this cache continues, or 0."""
        return self.slot_layers[0].table.before

    def _require_own(self) -> None:
        """Raises RuntimeError where others continue what this cache holds."""
        if self.is_document:
            raise RuntimeError(
                f"other caches continue the {self.tokens_seen} tokens of this cache, so it cannot change; "
                f"{continuing.INSTEAD}"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} was written to a cache that was made for a {self.model_name} of {len(self.layers)} "
                "layers; make a new one with CompressedCache(model, method)"
            )
        layer = self.layers[layer_idx]
        if layer_idx <= self._last_updated:
            self._require_own()
            interrupted.require_whole(self.layers, self._broken_off)
            slot_layers = self.slot_layers
            if key_states.shape[2] > 1:
                require_one_chunk(slot_layers[0], key_states.shape[2])
            if slot_layers[0].settles or slot_layers[0].table.context.bits.keys == AUTO:
                # What layers decide together is decided before the first of them goes on.
                for each in slot_layers:
                    each.end_draft()
        elif layer_idx > 0:
            before = self.layers[layer_idx - 1]
            if isinstance(before, SlotLayer) and (before.waiting is not None or before.refused):
                interrupted.require_read(before)
        if self.check:
            require_finite(key_states, value_states, layer_idx, self.get_seq_length(layer_idx), self.model_name)
        self._last_updated = layer_idx
        if isinstance(layer, SlotLayer):
            if self.head_share is not None:
                self.head_share.place(layer.table, key_states.shape[1])
            return layer.update(key_states, value_states, *args, **kwargs)
        self._break_off(f"layer {layer_idx} has taken some of its tokens")
        updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._broken_off = ""
        return updated

    def _break_off(self, what: str) -> None:
        """From here on every forward is refused until `reset`."""
        self._broken_off = what

    def _left_behind(self) -> str:
        """What an interrupted forward has left behind, in words; empty when all layers have read the same tokens."""
        return self._broken_off or interrupted.left_behind(self.layers)

    def reset(self) -> None:
        """Empties the cache; one that continues a document goes back to the end of the document."""
        self.method, self.promise, self.watched = self.asked, None, None
        for layer in self.slot_layers:
            layer.reset()
            layer.use(self.method)
            coding.use_bits(layer.table, self.method.stored_bits)
        for number, native in self._empty.items():
            self.layers[number] = copy.deepcopy(native)
        self._last_updated, self._broken_off = len(self.layers), ""
        self.is_document = False
        self.text = self.text.start_over()

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-k)` removes the last k tokens, as if they had never been read.

        After `activate_past_recording()` this works for the tokens of the last forward. Without it, it works while the
        method has not dropped, summarised or scored any of them. Otherwise RuntimeError, and nothing changes. Tokens of
        a document that this cache continues are never removed.
        """
        self._require_own()
        rollback.crop(self.layers, self.tokens_seen, -int(tokens_to_remove), self._broken_off, self.tokens_before)
        if self.tokens_seen < self.text.tokens:
            self.text.forget()

    def reorder_cache(self, beam_idx: Any) -> None:
        self._require_own()
        super().reorder_cache(beam_idx)
        self.text.forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_own()
        super().batch_repeat_interleave(repeats)
        self.text.forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._require_own()
        super().batch_select_indices(indices)
        self.text.forget()

    def replay(self, model: nn.Module, input_ids: Tensor, instruction: Tensor | None = None) -> None:
        """Replays with the model what was read and is not compressed yet (rehearse:replay=exact, kvzip).

        `input_ids` [B, n] end with these tokens. `instruction`, token ids, is read before every chunk, such as those of
        "Repeat the previous context exactly." in the model's chat template. Nothing of the replay is stored.
        `kvsketch.prefill` and `generate` call this; it is needed after a forward of the model alone.
        """
        repetition.repeat(self, model, input_ids, instruction)

    def compact(
        self,
        spans: Sequence[Span],
        shares: Mapping[str, str],
        model: nn.Module | None = None,
        input_ids: Tensor | None = None,
    ) -> int:
        """Compresses spans of the text in place, each to the share of its kind (`rehearse:wait=compact`).

            cache.compact([Span("system", 0, 60), Span("tool", 75, 300)], {"tool": "1/8"}, model, input_ids)

        Decides about all tokens up to the end of the last span. Kinds without a share, text between spans, and spans
        that were decided before stay unchanged. Tokens after the last span can be compacted later, or removed with
        `crop`. Positions do not change: the next turn reads its own tokens alone.

        With `replay=exact` the model reads the spans again; the number of their tokens is returned. `input_ids` [B, n]
        are those of the whole text. Spans for which the model has no positions left stay unchanged. With
        `replay=virtual` some queries are stored with each token, and `model` and `input_ids` are not needed.
        """
        self._require_own()
        interrupted.require_whole(self.layers, self._broken_off)
        return compaction.compact(self, spans, shares, model, input_ids)

    @property
    def tokens_seen(self) -> int:
        """Tokens the model has read into this cache."""
        return self.tokens_before + self.slot_layers[0].table.seen

    @property
    def tokens_stored(self) -> int:
        """Slots of the largest KV head of the compressed layers."""
        return max(layer.table.stored() for layer in self.slot_layers)

    @property
    def tokens_per_head(self) -> int:
        """Mean number of slots over the KV heads of compressed layers (synchronises with the GPU)."""
        means = [layer.table.used_slots().double().mean().item() for layer in self.slot_layers]
        return round(sum(means) / len(means))

    @property
    def device_bytes(self) -> int:
        """Bytes of every tensor on the model's device: keys, values, weights, index, state, native layers included.

        A document that it continues is not counted.
        """
        return memory_sizes.stored_bytes(self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes of the cache in host memory."""
        return sum(t.nbytes for layer in self.slot_layers for t in host_tensors(layer.table))

    @property
    def hit_rate(self) -> float | None:
        """With offload=host: the share of reads that found their token on the GPU."""
        return hit_rate(layer.table.hot for layer in self.slot_layers)

    def doubt(self) -> list[float]:
        """How unsure the model was of its last answer, by row, from 0 to 1 (synchronises with the GPU).

        For answers of `kvsketch.ask`, and of `kvsketch.generate` with `doubt=True`.
        """
        if self.watched is None:
            raise RuntimeError(
                "there is no answer to judge: use kvsketch.generate(..., doubt=True), without beams or drafts"
            )
        return self.watched.values()

    def describe(self) -> str:
        """A line for each compressed layer: slots of its smallest and largest head, bits, bytes; what was learned."""
        told = [memory_sizes.description(self.slot_layers), self._found, *([self.promise] if self.promise else [])]
        return "\n".join(str(each) for each in told if each)

    def save(self, path: str | os.PathLike[str], about: Mapping[str, str] | None = None) -> None:
        """Saves the cache to a file, in one step. `about`: your own notes, read with `saving.about`."""
        saving.require_complete(self.layers, self._left_behind())
        if self.tokens_before:
            raise ValueError(
                "a cache that continues a document cannot be saved; save the document and read the rest again"
            )
        # `check` is a debugging option and is not saved.
        options = {"seed": self.slot_layers[0].table.context.seed, "prefill": self.prefill, "chunk": self.chunk}
        model, read = self.identity.describe(self.head_share), dataclasses.asdict(self.text)
        promise = None if self.promise is None else self.promise.as_dict()
        saving.save(path, self.method, options, model, read, self.layers, about or {}, promise)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | PretrainedConfig) -> CompressedCache:
        """Loads a saved cache to the model's device. A wrong file, or another model, raises ValueError."""
        with saving.opened(path) as saved:
            cache = cls(model, saved.method, **saved.options)
            saved.fill(cache.layers, model, cache.identity, cache.head_share)
            cache.text, cache.promise = TextRead(**saved.read), Promise.of(saved.promise)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes on by itself. A served document is copied for each request, between two steps of the others:
        tensors are copied with one launch for many.
        """
        tables = [layer.table for layer in self.slot_layers]
        with plain():
            memo.update(copies(tensor for table in tables for tensor in table.tensors()))
        # What never changes is shared.
        memo |= {id(each): each for table in tables for each in (table.context.rotary, table.document, self.method)}
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        made.is_document = False
        return made

    def _repr_html_(self) -> str:
        """What a notebook shows (synchronises with the GPU)."""
        return overview.as_html(overview.overview(self))

    def __repr__(self) -> str:
        counts = f"tokens_seen={self.tokens_seen}, tokens_stored={self.tokens_stored}"
        return f"CompressedCache({self.model_name}, '{self.method}', {counts})"
