"""One prefill for many methods: the model reads a prompt once, then each method compresses a copy of what it computed.

    prefilled = shared_prefill(model, inputs)              # input_ids [B, n] and attention_mask, left padded
    cache = prefilled.cache("snapkv:budget=1/8", seed=0)   # as model.generate leaves it after prefill
    tokens = prefilled.generate(cache, max_new_tokens=32)  # [B, m]

Prefill is exact whatever the method, so queries, keys and values of all layers are the same for all of them; they stay
on the model's device until `prefilled` goes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.doubt import Doubt
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.overview import full_bytes
from kvsketch.decode import captured as decoding
from kvsketch.decode.sampling import Sampler
from kvsketch.defaults import SEED
from kvsketch.methods.base import Method
from kvsketch.methods.full import Full
from kvsketch.methods.replay import repeats
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

STEPS_WORTH_CAPTURING = 10


@dataclass(frozen=True)
class Recorder(Full):
    """The full cache, which also keeps the queries of each layer's last forward."""

    queries: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        self.queries[table.context.layer_idx] = queries


@torch.no_grad()
def shared_prefill(model: Any, inputs: Mapping[str, Tensor] | Tensor) -> Prefilled:
    """Lets the model read `inputs`: token ids [B, n], or what a tokenizer returns, padded on the left."""
    arguments = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    ids = arguments["input_ids"].to(model.device)
    mask = arguments.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.to(model.device)
    if not bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()):
        raise ValueError("a shared prefill takes rows padded on the left only; set tokenizer.padding_side = 'left'")
    recorder = Recorder()
    cache = CompressedCache(model, recorder)
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    logits = _forward(model, cache, ids, mask, positions)
    return Prefilled(model, ids, mask, cache, recorder.queries, logits)


def _forward(model: Any, cache: CompressedCache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:  # [B, V]
    """Logits of the token after the last one of `ids`; `mask` covers all tokens so far."""
    known = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {"position_ids": positions} if "position_ids" in known else {}
    if "logits_to_keep" in known:
        extra["logits_to_keep"] = 1
    output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
    return output.logits[:, -1]


class Prefilled:
    """What a model computed for a batch of prompts, and its continuation through any method."""

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, read: CompressedCache, queries: dict[int, Tensor], logits: Tensor
    ) -> None:
        self.model, self.input_ids, self.attention_mask = model, ids, mask
        self.read, self.queries, self.logits = read, queries, logits
        self.chosen: list[int] | None = None  # the rows of `read` that these are; None: all
        self.start = 0  # left padding that a row alone does without
        self.instruction: Tensor | None = None  # what a method that repeats the text lets the model hear first

    def rows(self, chosen: list[int], unpadded: bool = False) -> Prefilled:
        """Some rows of the batch; what was computed for them stays where it is. One row may do without its padding."""
        ids, mask = self.input_ids[chosen], self.attention_mask[chosen]
        alone = unpadded and len(chosen) == 1 and all(isinstance(layer, SlotLayer) for layer in self.read.layers)
        start = int((mask == 0).sum()) if alone else 0
        logits = self.logits[chosen]
        result = Prefilled(self.model, ids[:, start:], mask[:, start:], self.read, self.queries, logits)
        result.chosen = chosen if self.chosen is None else [self.chosen[row] for row in chosen]
        result.start, result.instruction = self.start + start, self.instruction
        return result

    @torch.no_grad()
    def cache(self, method: str | Method, seed: int = SEED) -> CompressedCache:
        """The cache as it is when `method` itself has read the prompts."""
        cache = CompressedCache(self.model, method, seed=seed)
        for index, (layer, read) in enumerate(zip(cache.layers, self.read.layers, strict=True)):
            if isinstance(read, SlotLayer):
                assert isinstance(layer, SlotLayer) and read.keys is not None and read.values is not None
                keys, values, queries = (self._own(t) for t in (read.keys, read.values, self.queries[index]))
                layer.update(keys.clone(), values.clone())
                assert layer.waiting is not None
                with plain():
                    layer.waiting.finish(self.model, queries, read.table.forward.scale, self.attention_mask)
            else:
                copied: Any = copy.deepcopy(read)
                cache.layers[index] = copied
                if self.chosen is not None:
                    copied.batch_select_indices(torch.tensor(self.chosen, device=self.input_ids.device))
        if repeats(cache.method):
            cache.replay(self.model, self.input_ids, self.instruction)
        return cache

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self.chosen is None else tensor[self.chosen, :, self.start :]

    @torch.no_grad()
    def generate(
        self, cache: CompressedCache, max_new_tokens: int, question_ids: Tensor | None = None, eager: bool = False
    ) -> Tensor:
        """The greedy continuation [B, m] up to the end token of every row; rows that end early are padded.

        `question_ids` [B, q] are fed first, at once, as a new turn: the method has compressed the prompts before it
        sees them. No processor changes the logits, whatever the model's generation config says. On a GPU many steps
        are captured as a graph unless `eager`. `cache.doubt()` then says how unsure the model was.
        """
        mask, logits = self.attention_mask, self.logits
        if question_ids is not None:
            mask, logits = self._feed(cache, question_ids.to(mask.device), mask)
        eos, pad = self._end_tokens()
        start = cache.tokens_seen
        # The sampler only writes here: without processors nothing reads the history.
        history = self.input_ids.new_zeros(self.input_ids.shape[0], start)
        cache.watched = Doubt(len(history), history.device)
        sampler = Sampler((), history, start + max_new_tokens, eos, pad, do_sample=False, doubt=cache.watched)
        sampler.before_step()
        token = sampler.choose(logits)
        eager = eager or max_new_tokens < STEPS_WORTH_CAPTURING
        if not eager and decoding.impossible(self.model, cache, {}) is None:
            step = decoding.Step(self.model, cache, sampler, token, start + max_new_tokens)
            while sampler.length < start + max_new_tokens and not sampler.finished():
                step.run()
        else:
            while sampler.length < start + max_new_tokens and not sampler.finished():
                mask, logits = self._feed(cache, token, mask)
                sampler.before_step()
                token = sampler.choose(logits)
        return sampler.tokens()[:, start:]

    @torch.no_grad()
    def next_logits(self, cache: CompressedCache, question_ids: Tensor | None = None) -> Tensor:  # [B, V]
        """The logits of the token behind the prompts, or behind `question_ids` [B, q], which are fed as a new turn."""
        if question_ids is None:
            return self.logits
        return self._feed(cache, question_ids.to(self.attention_mask.device), self.attention_mask)[1]

    def _feed(self, cache: CompressedCache, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.cat([mask, mask.new_ones(ids.shape)], 1)
        positions = (mask.long().cumsum(-1) - 1)[:, -ids.shape[1] :]
        return mask, _forward(self.model, cache, ids, mask, positions)

    def _end_tokens(self) -> tuple[Tensor | None, Tensor | None]:
        config, device = self.model.generation_config, self.input_ids.device
        if config.eos_token_id is None:
            return None, None
        eos = torch.tensor(config.eos_token_id, device=device).view(-1)
        pad = eos[0] if config.pad_token_id is None else torch.tensor(config.pad_token_id, device=device)
        return eos, pad


def memory(cache: CompressedCache) -> dict[str, int]:
    """What a cache holds, in the mean of its rows, and what a full cache would hold for the tokens it has seen."""
    rows = int(cache.slot_layers[0].table.shape[0])
    return {
        "tokens_stored": cache.tokens_stored,
        "device_bytes": cache.device_bytes // rows,
        "host_bytes": cache.host_bytes // rows,
        "full_bytes": full_bytes(cache.layers) // rows,
    }
