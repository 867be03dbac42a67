"""Adapters for the model families that bypass transformers' AttentionInterface, or that drop a user's cache.

Each adapter wraps one method of one class when a compressed cache is made for that family; with any other cache the
original runs untouched, and `kvsketch.uninstall` takes the wrapper out. A model that cannot be served is refused with
the reason: at once where its class or layers tell, else when its keys go unread. docs/models.md lists the families.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvsketch.cache import latent
from kvsketch.cache.attention import attend
from kvsketch.cache.layer import TAG
from kvsketch.cache.patches import Patch

_patches: dict[str, Patch] = {}  # family or attention class -> its adapter, once it was needed


class UnsupportedModelError(ValueError):
    """The model's attention cannot read a compressed cache."""


def adapt(config: PretrainedConfig) -> None:
    """Installs the adapter that the family of `config` needs, if any."""
    for expanding in latent.attention_classes(config):
        _patches.setdefault(expanding.__qualname__, Patch(expanding, latent.EXPAND, latent.expand_kv)).install()
    family = str(getattr(config, "model_type", ""))
    if family not in ADAPTED:
        return
    if family not in _patches:
        owner, name, around = ADAPTED[family]
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        _patches.setdefault(family, Patch(getattr(module, owner), name, around))
    _patches[family].install()


def require_served(model: Any, config: PretrainedConfig, bounded: bool) -> None:
    """Raises for models that are known not to read a compressed cache."""
    name = getattr(config, "model_type", type(config).__name__)
    # The class, because hooks and wrappers hide the parameters of an instance; other libraries' wrappers take anything.
    taken = inspect.signature(type(model).forward).parameters if isinstance(model, PreTrainedModel) else None
    if taken is not None and "past_key_values" not in taken:
        raise UnsupportedModelError(f"{name} takes no KV cache: its forward has no past_key_values. Use it without one")
    if bounded and name == "doge":
        raise UnsupportedModelError(
            "doge weighs its attention by the values of all tokens, which a method that drops or selects tokens does "
            "not have: use method full or transformers.DynamicCache"
        )


def no_layer(name: str, native: list[Any]) -> UnsupportedModelError:
    """The error for a model without a layer of full attention alone."""
    counts = Counter(type(layer).__name__ for layer in native)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return UnsupportedModelError(
        f"{name} has no layer to compress: kvsketch compresses layers of full attention alone, and the cache of this "
        f"model has {kinds or 'no layers'}. Use transformers.DynamicCache"
    )


def unread(name: str, layer: int, keys: Sequence[int], values: Sequence[int]) -> UnsupportedModelError:
    """The error for a layer whose keys and values, of shapes [B, H, S, D], nobody read."""
    if keys[1] == 1 and keys[-1] != values[-1]:
        reason = (
            "it caches the latent vectors of multi-head latent attention, and its attention has no expand_kv in which "
            "kvsketch could read them"
        )
    else:
        reason = (
            "the keys that the cache returned did not come to transformers' AttentionInterface. Families with an "
            f"adapter: {', '.join(ADAPTED)}"
        )
    return UnsupportedModelError(
        f"the attention of {name} (layer {layer}) never read the compressed cache: {reason}. Use "
        "transformers.DynamicCache for this model. (If the last forward was interrupted earlier: "
        "cache.reset().)"
    )


def _attend_with_float_mask(
    original: Callable[..., Any], self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """GPT-J and CodeGen: `_attn` takes [B, H, n, D] queries and an additive mask, and returns [B, H, n, D]."""
    view = getattr(key, TAG, None)
    if view is None:
        return original(self, query, key, value, attention_mask)

    def own() -> tuple[Tensor, Tensor | None]:
        output, weights = original(self, query, key, value, attention_mask)
        return output.transpose(1, 2), weights

    scale = 1.0 / float(self.scale_attn)
    output, weights = attend(view, self, query.to(value.dtype), scale, attention_mask, own)
    return output.transpose(1, 2), weights


def _mpt_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """MPT attends inside its forward, with ALiBi: the bias of key j is slope * (j - newest), a function of the
    logical index.
    """
    if not hasattr(past_key_values, "tokens_stored"):
        return original(self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
    batch, new, _ = hidden_states.shape
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (t.view(batch, new, self.n_heads, self.head_dim).transpose(1, 2) for t in mixed.chunk(3, dim=2))
    key, value = past_key_values.update(key, value, self.layer_idx)
    view = getattr(key, TAG)
    bias = position_bias[None, :, :, -view.seen :]
    scale = float(self.softmax_scale)
    visible = None if attention_mask is None else ~attention_mask

    def own() -> tuple[Tensor, Tensor]:
        logits = query @ key.transpose(-1, -2) * scale + bias
        if visible is not None:
            logits = logits.masked_fill(~visible, torch.finfo(query.dtype).min)
        weights = logits.float().softmax(-1).to(value.dtype)
        return (weights @ value).transpose(1, 2), weights

    output, weights = attend(view, self, query, scale, visible, own, bias=bias)
    return self.out_proj(output.reshape(batch, new, -1)), weights


def _keep_cache_at_rope_switch(
    original: Callable[..., Any], self: Any, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Phi-3 drops its cache, also a user's, without a word where LongRoPE switches factors: ours is reset instead."""
    inputs = original(self, input_ids, past_key_values=past_key_values, **kwargs)
    if hasattr(past_key_values, "tokens_stored") and inputs.get("past_key_values") is None:
        past_key_values.reset()
        inputs["past_key_values"] = past_key_values
    return inputs


# family -> class, method, and what runs around it
ADAPTED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "codegen": ("CodeGenAttention", "_attn", _attend_with_float_mask),
    "gptj": ("GPTJAttention", "_attn", _attend_with_float_mask),
    "mpt": ("MptAttention", "forward", _mpt_forward),
    "phi3": ("Phi3ForCausalLM", "prepare_inputs_for_generation", _keep_cache_at_rope_switch),
}
BIASED = ("mpt",)  # adapters that add a bias to the logits
