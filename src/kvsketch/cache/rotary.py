"""The rotary embedding of a model, as far as its config tells: the angle by which a position rotates two channels.

Knows configs alone, no model. Families are listed whose channels i and i + half form a pair, in latent attention those
of the slots (`slots.latent`); for others nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsketch.slots.positions import CACHE, Positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = (
    "axk1", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite",
    "llama", "minicpm3", "mistral", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "stablelm", "starcoder2", "youtu",
)  # fmt: skip
# Those whose angles do not change with the length of the text.
FIXED = ("linear", "llama3", "yarn")
# Those whose `factor` tells how much longer than trained a text may be; by convention the config's length stays.
STRETCHED = ("linear", "dynamic", "yarn")
LONGER = "use a model with a longer context"


def frequencies(config: PretrainedConfig) -> tuple[float, ...]:
    """Radians per position of channel pairs (i, i + half), i < half; empty where the config does not tell."""
    config = config.get_text_config(decoder=True)
    rope = _rope(config)
    if config.model_type not in FAMILIES or rope is None or _expands_before_the_cache(config):
        return ()
    kind = rope.get("rope_type", "default")
    if kind in FIXED:
        # Here, for vLLM's plugin imports this file and not what models are made of.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return tuple(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].tolist())
    if kind != "default" or "rope_theta" not in rope:
        return ()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * rope.get("partial_rotary_factor", 1.0))
    # The model's own float32 numbers: far into a text the last bit of an angle counts.
    return tuple((1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)).tolist())


def trained_positions(config: PretrainedConfig) -> int | None:
    """How many positions the model was trained on, or stretched to; None where no position ends (ALiBi)."""
    config = config.get_text_config(decoder=True)
    trained = getattr(config, "max_position_embeddings", None)
    if not isinstance(trained, int) or getattr(config, "alibi", False):
        return None
    rope = _rope(config) or {}
    if rope.get("rope_type") in STRETCHED:
        before = rope.get("original_max_position_embeddings") or trained
        return max(trained, int(float(rope.get("factor") or 1.0) * before))
    return trained


def last_position(config: PretrainedConfig) -> int | None:
    """How many positions there are at all, in a table of the model; None: rotary embeddings go on."""
    config = config.get_text_config(decoder=True)
    last = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return last if _rope(config) is None and not hasattr(config, "rope_theta") else None


def positions(config: PretrainedConfig, choice: str | None) -> Positions:
    """How a cache reads its keys: `choice` is text, cache, or None for a method that has no such choice."""
    name, angles = str(config.get_text_config(decoder=True).model_type), frequencies(config)
    trained = trained_positions(config)
    if choice == CACHE:
        if not angles:
            raise ValueError(f"positions=cache rotates keys by the rotary angles of the model, and {unknown(config)}")
        advice = f"Use a smaller budget or chunk, prefill='stream', or {LONGER}."
        return Positions(name, trained, angles, advice)
    if not angles:
        advice = f"{LONGER.capitalize()}."
    elif choice is None:
        advice = f"{LONGER.capitalize()}, or a bounded method with positions=cache, such as streamingllm."
    else:
        advice = f"Use positions=cache, which counts places in the cache instead of the text, or {LONGER}."
    return Positions(name, trained, advice=advice)


def unknown(config: PretrainedConfig, instead: str = "positions=text") -> str:
    """Why the angles are not known, and what to do."""
    config = config.get_text_config(decoder=True)
    kind = (_rope(config) or {}).get("rope_type", "default")
    if config.model_type in FAMILIES and kind not in ("default", *FIXED):
        return (
            f"those of this {config.model_type} (rope_type {kind!r}) change with the length of the text; "
            f"use {instead}, or a config with one of: default, {', '.join(FIXED)}"
        )
    return f"{config.model_type} has none that are known; use {instead}, or a model of: {', '.join(FAMILIES)}"


def _expands_before_the_cache(config: PretrainedConfig) -> bool:
    """Whether latent attention caches the keys of all heads, whose rotary channels come last (earlier releases)."""
    if not getattr(config, "kv_lora_rank", None):
        return False
    # Here, for vLLM's plugin imports this file and not what models are made of.
    from kvsketch.cache import latent

    return latent.sizes_of(config) is None


def _rope(config: PretrainedConfig) -> dict[str, Any] | None:
    """The rotary settings of the full-attention layers."""
    rope = getattr(config, "rope_parameters", None)
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else None
    return rope if isinstance(rope, dict) else None
