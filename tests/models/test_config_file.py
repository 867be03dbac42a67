"""Sizes that are read from a config.json, against those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvsketch.cache.memory import sizes_of
from kvsketch.models import config_file
from kvsketch.sizing import weight_bytes

NUMBERS = dict(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, dtype="bfloat16",
)  # fmt: skip


def saved(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**NUMBERS, **fields}))
    return path


@pytest.mark.parametrize(
    "fields",
    [
        dict(model_type="llama"),
        dict(model_type="llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=48),
        dict(model_type="llama", dtype=None, torch_dtype="float32"),
        dict(model_type="mistral", sliding_window=None),
        dict(model_type="qwen2", use_sliding_window=False, sliding_window=512),
        dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, tie_word_embeddings=True,
             layer_types=["full_attention", "full_attention", "sliding_attention", "sliding_attention"]),
        dict(model_type="qwen3", head_dim=32, attention_bias=True),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path, **fields)
    known, config = config_file.read(path), AutoConfig.from_pretrained(str(path))
    assert known is not None and known.weights == weight_bytes(config)
    for tokens in (50, 3000):
        sizes = sizes_of(config, tokens)
        named = {name: getattr(sizes, name) for name in vars(known.shape)}
        assert replace(known.shape, context=tokens) == type(known.shape)(**named)


@pytest.mark.parametrize(
    "fields",
    [
        dict(model_type="gemma3_text"),
        dict(model_type="mistral", sliding_window=512),
        dict(model_type="qwen2", use_sliding_window=True, sliding_window=64),
        dict(model_type="qwen2", layer_types=["full_attention", "linear_attention"] * 2),
        dict(model_type="qwen3"),
        dict(model_type="llama", num_key_value_heads=None),
        dict(model_type="llama", dtype=None),
        dict(model_type="llama", quantization_config={}),
    ],
    ids=str,
)
def test_transformers_is_asked_where_the_file_does_not_say(fields: dict[str, Any], tmp_path: Path) -> None:
    assert config_file.read(saved(tmp_path, **fields)) is None
