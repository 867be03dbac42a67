"""Shapes and weights of a plain decoder from its config.json, without transformers.

A family whose layers all attend to the whole text, or to a window that `layer_types` names, and whose weights are the
ones below. Others are read by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvsketch.layer_bytes import ModelBytes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BIASES = {"qwen2": True, "mistral": False}  # of query, key and value; others: `attention_bias`, of the output too
OWN_HEAD_SIZE = ("qwen3",)  # families whose heads have a size of their own, unless the file names another
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"
)  # fmt: skip


class ConfigFile(NamedTuple):
    """What a config.json says of sizes."""

    weights: int  # bytes
    shape: ModelBytes


def read(path: Path) -> ConfigFile | None:
    """What the file says; None where transformers must be asked."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        return None
    numbers = [config.get(name) for name in NEEDED]
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not all(type(number) is int and number > 0 for number in numbers) or dtype not in ITEM_SIZES:
        return None
    windows = _windows(config)
    if windows is None or "quantization_config" in config or not isinstance(_head_size(config), int):
        return None
    itemsize, layers = ITEM_SIZES[str(dtype)], config["num_hidden_layers"]
    shape = ModelBytes(
        1, 1, config["num_key_value_heads"], config["num_attention_heads"], _head_size(config), itemsize,
        layers - len(windows), windows,
    )  # fmt: skip
    return ConfigFile(itemsize * _parameters(config), shape) if shape.layers else None


def _windows(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The windows of the layers that have one; None: the file does not say which these are."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is None:
        return () if window is None or config.get("use_sliding_window") is False else None
    if not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]:
        return None
    sliding = kinds.count("sliding_attention")
    if kinds.count("full_attention") + sliding != len(kinds):
        return None
    if not sliding:
        return ()
    return (window,) * sliding if isinstance(window, int) else None


def _head_size(config: Mapping[str, Any]) -> Any:
    if config["model_type"] in OWN_HEAD_SIZE:
        return config.get("head_dim")
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _parameters(config: Mapping[str, Any]) -> int:
    """Numbers in the embedding, in each layer's projections and norms, in the last norm and in the head."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    size = _head_size(config)
    queries, pairs = config["num_attention_heads"] * size, 2 * config["num_key_value_heads"] * size
    layer = 2 * hidden * queries + hidden * pairs + 3 * hidden * inner + 2 * hidden
    own = config.get("attention_bias", False)
    layer += (queries + pairs) * BIASES.get(family, own) + hidden * (own and family not in BIASES)
    layer += (2 * inner + hidden) * (family == "llama" and config.get("mlp_bias", False))
    layer += 2 * size * (family == "qwen3")
    tied = config.get("tie_word_embeddings", False)
    return config["num_hidden_layers"] * layer + hidden + (1 if tied else 2) * config["vocab_size"] * hidden
