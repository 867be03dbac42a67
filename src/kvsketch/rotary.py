"""The rotary embedding of a model, as far as its config tells: the angle by which a position turns a pair of channels.

Knows configs alone, no model. Families are listed whose channels i and i + half form a pair; for others nothing is
known.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = (
    "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
)  # fmt: skip
# Those whose angles do not change with the length of the text.
FIXED = ("linear", "llama3", "yarn")


def frequencies(config: PretrainedConfig) -> tuple[float, ...]:
    """Radians per position of channel pairs (i, i + half), i < half; empty where the config does not tell."""
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None)
    if config.model_type not in FAMILIES or not isinstance(rope, dict):
        return ()
    kind = rope.get("rope_type", "default")
    if kind in FIXED:
        return tuple(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].tolist())
    if kind != "default" or "rope_theta" not in rope:
        return ()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * rope.get("partial_rotary_factor", 1.0))
    return tuple(float(rope["rope_theta"]) ** (-2 * i / size) for i in range(size // 2))
