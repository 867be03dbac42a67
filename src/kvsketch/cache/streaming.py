"""How a prompt gets into a cache: whole, or chunk by chunk, so that neither it nor its activations must fit.

    cache = CompressedCache(model, "streamingllm:budget=2048", prefill="stream", chunk=2048)
    logits = prefill(model, input_ids, cache)

The same chunks as within one forward (chunks.py) and the same state afterwards; memory is that of one chunk. No mask is
built: a mask of a chunk by everything before it would grow with the prompt.

`model.generate` reads its prompt in one method, `_prefill`, which is wrapped at the first use of a compressed cache.
That is where input ids meet the cache: a prompt that does not continue what the cache has read is refused there, and a
cache made with prefill="stream" reads it chunk by chunk.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvsketch.cache import interrupted, masks, rollback
from kvsketch.cache.chunks import chunk_spans
from kvsketch.cache.continuing import require_visible
from kvsketch.cache.patches import Patch
from kvsketch.methods.replay import repeats
from kvsketch.slots import padding as left_padding
from kvsketch.slots.tensors import plain

if TYPE_CHECKING:
    from kvsketch.cache.compressed import CompressedCache

# What generate hands to a text model; anything else is for the model itself to prepare.
PLAIN_ARGUMENTS = {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}


def prefill(
    model: Any,
    input_ids: Tensor,
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    *,
    progress: bool = False,
    after_chunk: Callable[[int], None] | None = None,
    instruction: Tensor | None = None,
) -> Tensor:  # [B, vocabulary]
    """Reads `input_ids` [B, n], tokens that `cache` has not seen yet, into it; returns the logits after the last.

    `attention_mask` [B, n], or with the tokens seen before [B, seen + n]: 0 for left padding. To continue, append the
    token you choose and call `model.generate(all_ids, past_key_values=cache)`. A cache made with prefill="exact" reads
    the prompt in one forward. `progress` shows a bar; `after_chunk` is called with the number of tokens read so far.
    `instruction`: as in `CompressedCache.replay`, for methods that let the model repeat a text.
    """
    _require(input_ids, cache)
    bar = tqdm(total=input_ids.shape[1], unit="token", disable=not progress, desc="prefill")
    # Closed at once where an error ends the loop: the cache is then marked as broken.
    with bar, contextlib.closing(read_chunks(model, input_ids, cache, attention_mask, instruction)) as chunks:
        for end, latest in chunks:
            logits = latest
            bar.update(end - bar.n)
            if after_chunk is not None:
                after_chunk(end)
    return logits


@torch.no_grad()
def read_chunks(
    model: Any,
    input_ids: Tensor,
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    instruction: Tensor | None = None,
) -> Generator[tuple[int, Tensor], None, None]:
    """Reads a prompt as `prefill` does, a chunk whenever the next item is asked for: tokens read so far, and logits.

    Other work may go on between two chunks. A prompt that is given up in the middle leaves a broken cache.
    """
    _require(input_ids, cache)
    cache.identity.require(model.config)
    if rollback.has_drafted(cache.slot_layers[0]):
        rollback.end_recording(cache.layers)
    padding = _left_padding(input_ids, cache, attention_mask)
    seen, new = cache.tokens_seen, input_ids.shape[1]
    feed = _Feed(model, cache, padding)
    with _whole_or_nothing(cache, new):
        if cache.prefill == "exact" or new == 1:
            logits = feed.forward(input_ids, feed.mask(seen + new))
            _repeat(model, input_ids, cache, instruction)
            yield new, logits
        else:
            prompt = masks.Prompt(seen - cache.tokens_before + new, padding, causal=True)
            with cache.slot_layers[0].forward.during(prompt=prompt):
                for start, end in chunk_spans(new, cache.chunk):
                    logits = feed.forward(input_ids[:, start:end], feed.mask_of_native_layers(seen + end))
                    _repeat(model, input_ids[:, :end], cache, instruction)
                    yield end, logits
    cache.text.note(input_ids, seen, attention_mask)


def _repeat(model: Any, read: Tensor, cache: CompressedCache, instruction: Tensor | None) -> None:
    """Lets the model repeat what was `read` [B, n]; of tokens that came before, nobody here has the ids."""
    if repeats(method := cache.method):
        with plain():
            for layer in cache.slot_layers:
                method.queue(layer.table).repeat_at_most(read.shape[1])
        cache.replay(model, read, instruction)


@contextlib.contextmanager
def _whole_or_nothing(cache: CompressedCache, new: int) -> Iterator[None]:
    """Reads a prompt of `new` tokens; one that is read in part cannot be read again by the same call."""
    before = interrupted.lengths(cache.layers)
    try:
        yield
    except BaseException:
        if interrupted.lengths(cache.layers) != before:
            cache._break_off(f"a prompt of {new} tokens, of which the cache has read a part")
        raise


def _read_prompt(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **options: Any,
) -> Any:
    """What generate calls in place of its own method: the output of the model after the prompt."""
    cache: Any = model_kwargs.get("past_key_values")
    if not _is_compressed(cache) or model_kwargs.get("inputs_embeds") is not None or input_ids.dim() != 2:
        return original(model, input_ids, generation_config, model_kwargs, *args, **options)
    cache.identity.require(model.config)
    mask, seen = model_kwargs.get("attention_mask"), cache.tokens_seen
    require_visible(mask, cache.tokens_before, seen)
    length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[-1]
    # The ids are the whole text, or new ones alone under a mask for all.
    whole = length == input_ids.shape[1]
    if whole and seen:
        cache.text.require(input_ids, seen, mask)
    new = input_ids[:, seen:] if whole else input_ids
    if _can_stream(cache, generation_config, model_kwargs):
        logits: Any = prefill(model, new, cache, mask)[:, None]
        output = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
    else:
        output = original(model, input_ids, generation_config, model_kwargs, *args, **options)
        _repeat(model, new, cache, None)
    cache.text.note(input_ids, 0 if whole else seen, mask)
    if cache.tokens_seen > 1:
        cache.method.note_prompt(cache.slot_layers[0].table)
    return output


_PREFILL = Patch(GenerationMixin, "_prefill", _read_prompt)
install = _PREFILL.install


def _can_stream(cache: CompressedCache, config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the prompt can go through `prefill`: a plain text, of which nothing but the logits is wanted."""
    whole = cache.prefill == "exact" and not repeats(cache.method)
    if whole or config.prefill_chunk_size is not None or cache.slot_layers[0].record_past:
        return False
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return False
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return False
    own = None if mask is None else mask[:, cache.tokens_before :]
    if own is not None and masks.hidden_inside(own, own.shape[1]) is not None:
        return False
    return {name for name, value in model_kwargs.items() if value is not None} <= PLAIN_ARGUMENTS


def _is_compressed(cache: Any) -> bool:
    return hasattr(cache, "slot_layers")


class _Feed:
    """Forwards of one prompt through one model."""

    def __init__(self, model: Any, cache: CompressedCache, padding: Tensor | None) -> None:
        self.model, self.cache, self.padding = model, cache, padding
        names = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in names
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self.only_slots = len(cache.slot_layers) == len(cache.layers)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = dict(self.options)
        if self.padding is not None and self.takes_positions:
            at = torch.arange(ids.shape[1], device=ids.device) + self.cache.tokens_seen
            options["position_ids"] = left_padding.positions(self.padding, at[None]).clamp_min(0)
        out = self.model(ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **options)
        return out.logits[:, -1]

    def mask(self, seen: int) -> Tensor | None:  # [B, seen]
        """The mask that left padding needs."""
        before = self.cache.tokens_before
        mask = left_padding.mask(self.padding, seen - before, before)
        return None if mask is None else mask.long()

    def mask_of_native_layers(self, seen: int) -> Tensor | None:
        """A mask only where something reads it: layers that are not compressed, or a model that counts positions."""
        return None if self.only_slots and self.takes_positions else self.mask(seen)


def _require(input_ids: Tensor, cache: CompressedCache) -> None:
    if not _is_compressed(cache):
        raise ValueError(f"cache must be a kvsketch.CompressedCache, not {type(cache).__name__}")
    require_ids(input_ids)


def require_ids(input_ids: Any) -> None:
    """Raises ValueError unless these are token ids of one token or more."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be token ids [batch, tokens] with one token or more, got {shape}")


def _left_padding(input_ids: Tensor, cache: CompressedCache, mask: Tensor | None) -> Tensor | None:  # [B]
    """Left padding of each row once `input_ids` are read; None: no row has any."""
    seen, new = cache.tokens_seen, input_ids.shape[1]
    before = cache.slot_layers[0].table.padding
    if mask is None:
        return before
    batch = input_ids.shape[0]
    if tuple(mask.shape) not in ((batch, new), (batch, seen + new)):
        raise ValueError(
            f"attention_mask must be [{batch}, {new}], or [{batch}, {seen + new}] with the {seen} tokens read before, "
            f"got {list(mask.shape)}"
        )
    require_visible(mask, cache.tokens_before, seen + new)
    fresh, own = mask[:, -new:].bool(), seen - cache.tokens_before
    padding = left_padding.learned(before, fresh, own)
    expected = left_padding.mask(padding, own + new)
    if not bool((fresh if expected is None else fresh == expected[:, own:]).all()):
        raise ValueError(
            "attention_mask hides tokens that are not at the start of their row; a stream takes left padding only: "
            "pad on the left, and a later turn not at all"
        )
    return padding
