"""Adapters for the model families that bypass transformers' AttentionInterface, or that drop a user's cache.

Each adapter wraps one method of one class when a compressed cache is made for that family; with any other cache the
original runs untouched, and `kvsketch.uninstall` takes the wrapper out. A family with neither the interface nor an
adapter is refused with its name when its keys go unread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvsketch.cache.patches import Patch
from kvsketch.cache.view import TAG

_patches: dict[str, Patch] = {}  # family -> its adapter, once it was needed


class UnsupportedModelError(ValueError):
    """The model's attention cannot read a compressed cache."""


def adapt(config: PretrainedConfig) -> None:
    """Installs the adapter that the family of `config` needs, if any."""
    family = str(getattr(config, "model_type", ""))
    if family not in ADAPTED:
        return
    if family not in _patches:
        owner, name, around = ADAPTED[family]
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        _patches.setdefault(family, Patch(getattr(module, owner), name, around))
    _patches[family].install()


def _attend_with_float_mask(
    original: Callable[..., Any], self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """GPT-J and CodeGen: `_attn` takes [B, H, n, D] queries and an additive mask, and returns [B, H, n, D]."""
    view = getattr(key, TAG, None)
    if view is None:
        return original(self, query, key, value, attention_mask)
    scale = 1.0 / float(self.scale_attn)
    recalled = view.recall(query.to(value.dtype), scale, None, None)
    if recalled is not None:
        output, weights = recalled, None
    elif view.exact:
        output, weights = original(self, query, key, value, attention_mask)
    else:
        output, weights = view.attend(query.to(value.dtype), scale, attention_mask), None
    view.finish(self, query.to(value.dtype), scale, attention_mask)
    return output, weights


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
    if view.exact:
        output, weights = _eager_with_bias(query, key, value, scale, bias, visible)
    else:
        output, weights = view.attend(query, scale, visible, bias=bias), None
    view.finish(self, query, scale, visible)
    return self.out_proj(output.transpose(1, 2).reshape(batch, new, -1)), weights


def _eager_with_bias(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = query @ key.transpose(-1, -2) * scale + bias
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(query.dtype).min)
    weights = logits.float().softmax(-1).to(value.dtype)
    return weights @ value, weights


def _keep_cache_at_rope_switch(
    original: Callable[..., Any], self: Any, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Phi-3 throws its cache away where LongRoPE switches factors, silently also a user's: start ours anew instead."""
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
