"""How a compressed cache is made: which models are served, which of their layers are compressed, and with what."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvsketch.cache import families, latent, rotary
from kvsketch.cache.forward import Forward
from kvsketch.cache.layer import SlotLayer
from kvsketch.methods.base import Method
from kvsketch.ops.codec import Codec
from kvsketch.slots.codes import MANY, UNQUANTISED, QuantBits
from kvsketch.slots.context import LayerContext
from kvsketch.slots.heads import require_one_device
from kvsketch.slots.latent import LatentTable
from kvsketch.slots.table import SlotTable


def served_config(model: Any, method: Method) -> PretrainedConfig:
    """The config of a model, or a config itself; ValueError for models that no compressed cache serves."""
    config = model if isinstance(model, PretrainedConfig) else getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"CompressedCache takes a transformers model or its config, not {type(model).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} is an encoder-decoder model; kvsketch supports decoder-only models")
    if getattr(config, "use_cache", True) is False:
        warnings.warn(f"{config.model_type} turns its cache off by default: pass use_cache=True", stacklevel=3)
    families.require_served(model, config, bounded=not method.keeps_all)
    return config


def native_layers(config: PretrainedConfig) -> list[Any]:
    """The layers of transformers' own cache."""
    layers = DynamicCache(config=config).layers
    if not any(map(is_compressible, layers)):
        raise families.no_layer(config.model_type, layers)
    return layers


def is_compressible(layer: Any) -> bool:
    """Whether a layer of transformers' own cache is one of full attention alone."""
    return type(layer) is DynamicLayer


def compressed_layers(
    native: Sequence[Any], model: Any, config: PretrainedConfig, method: Method, seed: int, chunk: int | None
) -> list[Any]:
    """The layers of a compressed cache: slot tables for full attention, the `native` ones elsewhere.

    chunk: tokens of a prompt that are read at once; None: all of them.
    """
    text = config.get_text_config(decoder=True)
    latents = latent.sizes_of(config)
    if latents is not None:
        latent.require_latent_slots(method, config.model_type)
    _require_codable(method.stored_bits, text, latents)
    shared = bool(getattr(text, "num_kv_shared_layers", 0))
    if shared:
        require_one_device(model)
    angles, positions = rotary.frequencies(config), rotary.positions(config, method.read_positions)
    if method.needs_angles and not angles:
        what, instead = method.needs_angles
        raise ValueError(
            f"{method.name} {what} by the rotary angles of the model, and {rotary.unknown(config, instead)}"
        )
    kinds = (SlotTable, SlotLayer) if latents is None else (LatentTable, latent.layer_kind(config))
    layers, forward = list(native), Forward(chunk)
    compressed = [i for i, layer in enumerate(native) if is_compressible(layer)]
    for rank, i in enumerate(compressed):
        context = LayerContext(i, len(native), seed, rank, len(compressed), angles, positions, method.stored_bits)
        table = kinds[0](context)
        layers[i] = kinds[1](table, method, config.model_type, forward, shared)
    link(layers, shared)
    return layers


def link(layers: Sequence[Any], shared: bool) -> None:
    """Tells slot layers of the others; `shared`: whether layers of the model share keys."""
    compressed = [layer for layer in layers if isinstance(layer, SlotLayer)]
    compressed[-1].together = compressed[:-1]
    for before, after in itertools.pairwise(layers):
        # Layers that share keys read one table with different queries; there is no single query to learn from.
        if isinstance(before, SlotLayer) and isinstance(after, SlotLayer) and not shared:
            after.before = before


def _require_codable(bits: QuantBits, text: PretrainedConfig, latents: tuple[int, int] | None) -> None:
    """Raises ValueError when heads of the model's size cannot be stored in the bits of the method."""
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, text.num_attention_heads)
    for count in {MANY if bits.auto else bits.keys, bits.values} - {UNQUANTISED}:
        for each in latents or (size,):
            Codec(count, each)
