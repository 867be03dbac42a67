"""Multi-head latent attention (DeepSeek V2 and V3 and their kin): slots of latent vectors.

A token is a latent c and one rotary key r, which all heads share. The model caches both and makes keys and values of
them behind the cache (`expand_kv`): head h has the key [U_h c; r] and the value V_h c. Instead of that,

    <q, [U_h c; r]> = <[q_r; U_h' q_c], [r; c]>,     sum_i p_i V_h c_i = V_h sum_i p_i c_i

so the table is one KV head with keys [r; c] and values c (`slots.latent`), read with absorbed queries. Several tokens
of a text of which nothing has gone are read by the model's own attention over expanded keys and values.

Which models: those of transformers whose attention classes have `expand_kv`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvsketch.cache.layer import TAG, LayerView, SlotLayer
from kvsketch.methods import supporting
from kvsketch.methods.base import Method
from kvsketch.slots.latent import reads_codes, rotated, rotated_back
from kvsketch.slots.table import stored_vectors

EXPAND = "expand_kv"
NEIGHBOURS = ("deepseek_v2",)  # families that rotate neighbouring rotary channels together


def sizes_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """The sizes of the latent and of the rotary key that a model caches of a token; None: its attention has none."""
    text = config.get_text_config(decoder=True)
    return (text.kv_lora_rank, text.qk_rope_head_dim) if any(attention_classes(config)) else None


def attention_classes(config: PretrainedConfig) -> Iterator[type]:
    """The attention classes of a model in transformers that expand latents behind the cache."""
    text = config.get_text_config(decoder=True)
    home = type(text).__module__
    if not getattr(text, "kv_lora_rank", None) or not home.startswith("transformers.models."):
        return
    name = home.replace(".configuration_", ".modeling_")
    for result in list(vars(sys.modules.get(name) or importlib.import_module(name)).values()):
        if isinstance(result, type) and EXPAND in vars(result):
            yield result


def require_latent_slots(method: Method, name: str) -> None:
    """Raises ValueError for a method that cannot keep latents."""
    if (reason := method.capabilities.latent.reason) is not None:
        raise ValueError(
            f"{method} does not work with {name}, whose latent attention stores a key and its value as one vector: "
            f"{reason}. Methods that work: {', '.join(supporting('latent'))}, rehearse:refit=none"
        )


class LatentView(LayerView):
    """What a forward reads of latents."""

    def attend(self, query: Tensor, scale: float, mask: Any, bias: Tensor | None = None, **options: Any) -> Tensor:
        table = self.layer.table
        if not reads_codes(table):
            return super().attend(query, scale, mask, bias, **options)
        sums = super().attend(rotated(table, query), scale, mask, bias, **options)
        return rotated_back(table, sums).to(query.dtype)


class LatentLayer(SlotLayer):
    """A layer whose table holds latents. `update` takes and returns c [B, 1, n, R] and r [B, 1, n, E], as the model
    caches them.
    """

    rotates_neighbours = False  # whether rotary channels 2i and 2i + 1 rotate together, not i and i + half

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        latents, rotary = key_states, value_states
        keys = torch.cat([self.halves(rotary), latents], -1)
        tagged, _ = super().update(keys, keys[..., rotary.shape[3] :])
        view: LayerView = getattr(tagged, TAG)
        if expands(view) and self.table.seen > self.table.new_tokens:
            latents, rotary = stored_vectors(self.table)
            rotary = self.neighbours(rotary)
        latents = latents.view_as(latents)
        setattr(latents, TAG, view)
        return latents, rotary

    def view(self) -> LayerView:
        return LatentView.of(self)

    @property
    def asked(self) -> int:
        """How many of the newest queries of several tokens are absorbed: those that the method looks at."""
        last = None if self.record_past else self.method.last_queries
        return self.table.new_tokens if last is None else max(2, last)

    def halves(self, rotary: Tensor) -> Tensor:
        """Rotary channels of the model, [..., E], with those that rotate together half of the size apart."""
        return rotary.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.rotates_neighbours else rotary

    def neighbours(self, rotary: Tensor) -> Tensor:
        """The same back."""
        return rotary.unflatten(-1, (2, -1)).mT.flatten(-2) if self.rotates_neighbours else rotary


class PairedLatentLayer(LatentLayer):
    """The same for models that rotate neighbouring channels together."""

    rotates_neighbours = True


def layer_kind(config: PretrainedConfig) -> type[LatentLayer]:
    """The class of the layers of a model with latent attention."""
    paired = config.get_text_config(decoder=True).model_type in NEIGHBOURS
    return PairedLatentLayer if paired else LatentLayer


def expands(view: LayerView) -> bool:
    """Whether this forward is read by the model's own attention, over expanded keys and values."""
    return view.exact and view.layer.table.new_tokens > 1


def expand_kv(original: Callable[..., Any], self: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Around the method of the same name: latents of a compressed layer are expanded where that is what is read."""
    view = getattr(latents, TAG, None)
    if view is None:
        return original(self, latents, rotary)
    keys, values = original(self, latents, rotary) if expands(view) else (latents.view_as(latents), rotary)
    setattr(keys, TAG, view)
    view.handed_shape = values.shape
    return keys, values


class Absorbed:
    """The projections of one attention module, in the form that reads latents."""

    def __init__(self, module: Any, layer: LatentLayer) -> None:
        projection, self.layer = module.kv_b_proj, layer
        if type(projection) not in (nn.Linear,) or projection.bias is not None or projection.weight.is_meta:
            raise ValueError(
                f"{type(module).__name__} of {layer.model_name} holds kv_b_proj as {type(projection).__name__}, and "
                "latents are read with its plain weights: load the model without quantization, adapters on kv_b_proj "
                "or offloaded weights, or use transformers.DynamicCache"
            )
        self.plain, values = module.qk_nope_head_dim, module.v_head_dim
        weight = projection.weight.unflatten(0, (-1, self.plain + values))  # [Hq, plain + values, R]
        self.keys, self.values = weight[:, : self.plain], weight[:, self.plain :]

    def queries(self, query: Tensor) -> Tensor:  # [B, Hq, n, E + R]
        """Queries of the model, [B, Hq, n, plain + E]."""
        plain, rotary = query[..., : self.plain], query[..., self.plain :]
        return torch.cat([self.layer.halves(rotary), plain @ self.keys], -1)

    def heads(self, latents: Tensor) -> Tensor:  # [B, n, Hq, values]
        """Sums of latents, [B, n, Hq, R], as the outputs of the heads."""
        return (latents.transpose(1, 2) @ self.values.mT).transpose(1, 2).contiguous()
