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
    compaction,
    continuing,
    families,
    fitting,
    interrupted,
    making,
    repetition,
    rollback,
    saving,
    streaming,
)
from kvsketch.cache import memory as memory_sizes
from kvsketch.cache.checks import require_finite
from kvsketch.cache.chunks import require_one_chunk, require_stream
from kvsketch.cache.compaction import Span
from kvsketch.cache.doubt import Doubt
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.promise import Promise
from kvsketch.cache.saving.model_identity import ModelIdentity
from kvsketch.cache.text import ReadBehind, TextRead
from kvsketch.defaults import CHUNK, SEED
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.slots.heads import head_share
from kvsketch.slots.hot_set import hit_rate
from kvsketch.slots.tensors import copies, plain


class CompressedCache(Cache):
    """A KV cache for `model.generate(..., past_key_values=cache)` that a method keeps small.

        cache = CompressedCache(model, "streamingllm:budget=1024")

    `model` is a model or its config; `method` a text form or a Method. Full-attention layers are compressed;
    sliding-window and linear-attention layers stay native. The model is not changed. `seed`: of methods that draw.
    `check`: a nan or inf in a key or value is an error that names its layer and head (asks the device at every step).

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
        seed: int = SEED,
        check: bool = False,
        prefill: str = "exact",
        chunk: int = CHUNK,
        memory: float | str | None = None,
        context: int | None = None,
        batch: int = 1,
    ) -> None:
        require_stream(prefill, chunk)
        self.method = parse_method(method)
        if prefill == "stream" and repetition.repeats(self.method) and self.method.promises:
            raise ValueError(f"{self.method} tries several budgets on the whole text; use prefill='exact'")
        self.check, self.prefill, self.chunk = check, prefill, chunk
        config = making.served_config(model, self.method)
        self.identity, self.head_share = ModelIdentity(model, config), head_share(model)
        self.model_name = str(config.model_type)
        native = making.native_layers(config)
        self.method = memory_sizes.fitted_to(memory, context, batch, self.method, model)
        self.method = fitting.with_map(self.method, self.identity, self.head_share)
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
        """A cache that goes on after this one, the document, which it reads where it lies and never changes.

        It holds what comes after alone, in any number of rows, compressed by the same method under a budget of its own:
        a share is one of its own tokens. `tokens_seen` counts the document too. Any number of caches may continue one
        document; it takes no more tokens itself until `reset`, which leaves them as they are.
        """
        if reason := self.why_not_continued():
            raise ValueError(reason)
        rollback.end_recording(self.layers)
        self.is_document = True
        made = copy.copy(self)
        made.layers, made.is_document = [*continuing.layers_after(self.slot_layers)], False
        made.text, made.watched = ReadBehind.of(self.text), None
        return made

    def why_not_continued(self) -> str:
        """Why `continued` refuses; empty: it does not."""
        return continuing.refusal(self.layers, self.method, self.model_name, self._left_behind())

    @property
    def tokens_before(self) -> int:
        """Tokens of the document that this cache continues; 0: of none."""
        return self.slot_layers[0].table.before

    def _require_own(self) -> None:
        """Raises RuntimeError where others continue what this cache holds."""
        if self.is_document:
            raise RuntimeError(
                f"others continue the {self.tokens_seen} tokens of this cache, so that it cannot change; "
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
            require_one_chunk(self.slot_layers[0], key_states.shape[2])
            if self.method.settles or self.method.stored_bits.auto:
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
        """Forgets everything; the cache is empty again, or as it was right after the document that it continues."""
        self.method, self.promise, self.watched = self.asked, None, None
        for layer in self.slot_layers:
            layer.reset()
            layer.method = self.method
            layer.table.note(bits=self.method.stored_bits)
            making.follow_choice(layer.table, self.method)
        for number, native in self._empty.items():
            self.layers[number] = copy.deepcopy(native)
        self._last_updated, self._broken_off = len(self.layers), ""
        self.is_document = False
        self.text = self.text.start_over()

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-k)` forgets the newest k tokens, as if they had never been read.

        After `activate_past_recording()` this works for the tokens of the last forward. Without it, it works while the
        method has not dropped, summarised or scored any of them. Otherwise RuntimeError, and nothing changes. Tokens of
        a document that this cache continues are never forgotten.
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
        """Lets the model repeat what this cache has read and its method has not compressed yet (rehearse, kvzip).

        `input_ids` [B, n] end with these tokens. `instruction`, token ids, is said before every chunk, such as those of
        "Repeat the previous context exactly." in the model's chat template. Nothing of the repetition stays.
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
        """Rehearses spans of the text where they lie, each to the share of its kind (`rehearse:wait=compact`).

            cache.compact([Span("system", 0, 60), Span("tool", 75, 300)], {"tool": "1/8"}, model, input_ids)

        Decides about all tokens up to the end of the last span. Kinds without a share, and what lies between spans,
        stay as they are; so do spans that were decided before. Tokens behind may be compacted later, or taken back with
        `crop`. Positions do not change: the next turn reads its own tokens alone.

        With `replay=exact` the model repeats the spans, of which the number of tokens is returned, and nothing but the
        tokens themselves waits for that; `input_ids` [B, n] are those of the whole text. Spans for which it has no
        positions left stay as they are. With `replay=virtual` some queries wait with each token, and both may be left
        out.
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
        """The most slots any KV head of a compressed layer holds."""
        return max(layer.table.stored() for layer in self.slot_layers)

    @property
    def tokens_per_head(self) -> int:
        """The mean of the slots that KV heads of compressed layers hold (asks the device)."""
        means = [layer.table.used_slots().double().mean().item() for layer in self.slot_layers]
        return round(sum(means) / len(means))

    @property
    def device_bytes(self) -> int:
        """Bytes of every tensor on the model's device: keys, values, weights, index, state, native layers included.

        Those of a document that it continues are not its own.
        """
        return memory_sizes.stored_bytes(self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes the cache holds in host memory beside the device."""
        return sum(t.nbytes for layer in self.slot_layers for t in layer.table.host_tensors())

    @property
    def hit_rate(self) -> float | None:
        """With offload=host, the share of reads that found their token on the device."""
        return hit_rate(layer.table.hot for layer in self.slot_layers)

    def doubt(self) -> list[float]:
        """How unsure the model was of its last answer, by row, from 0 to 1 (`doubt`; asks the device).

        For answers of `kvsketch.ask`, and of `kvsketch.generate` with `doubt=True`.
        """
        if self.watched is None:
            raise RuntimeError("no answer was watched: use kvsketch.generate(..., doubt=True), without beams or drafts")
        return self.watched.values()

    def describe(self) -> str:
        """A line for each compressed layer: slots of its smallest and largest head, bits, bytes (asks the device)."""
        told = memory_sizes.description(self.slot_layers)
        return told if self.promise is None else f"{told}\n{self.promise}"

    def save(self, path: str | os.PathLike[str], about: Mapping[str, str] | None = None) -> None:
        """Writes the cache to a file, in one step; see `saving`. `about`: words of your own, for `saving.about`."""
        saving.require_complete(self.layers, self._left_behind())
        if self.tokens_before:
            raise ValueError("a cache that continues a document is not saved; save the document, and read what follows")
        # `check` is a debugging option and is not saved.
        options = {"seed": self.slot_layers[0].table.seed, "prefill": self.prefill, "chunk": self.chunk}
        model, read = self.identity.describe(self.head_share), dataclasses.asdict(self.text)
        promise = None if self.promise is None else self.promise.as_dict()
        saving.save(path, self.method, options, model, read, self.layers, about or {}, promise)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | PretrainedConfig) -> CompressedCache:
        """The cache that `save` wrote, on the model's device; ValueError when file or model are not the right ones."""
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
        memo |= {id(each): each for table in tables for each in (table.rotary, table.document, self.method)}
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        made.is_document = False
        return made

    def __repr__(self) -> str:
        counts = f"tokens_seen={self.tokens_seen}, tokens_stored={self.tokens_stored}"
        return f"CompressedCache({self.model_name}, '{self.method}', {counts})"
