"""Caches that the release before this one has saved are read, and go on as they did there.

They lie in `previous_release/`. The last commit of a release writes them, before the version is raised:

    python -m tests.cache.test_previous_release
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
from kvsketch import CompressedCache

FOLDER = Path(__file__).with_name("previous_release")
METHODS = {
    "full": "full",
    "snapkv": "snapkv:budget=24:sinks=2:window=8",
    "subgen": "subgen:budget=24:sinks=2:recent=8",
    "quantised": "expected:budget=48:sinks=2:recent=8:bits=4",
    "rehearse": "rehearse:budget=1/2",
    "quest": "quest:page=4:budget=16",
}
TOKENS, NEW = 96, 4


def fixed_model() -> LlamaForCausalLM:
    """The same numbers on every machine: fractions, and none that is drawn."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for number, weight in enumerate(model.parameters()):
        values = (torch.arange(weight.numel()) * (7919 + 2 * number) % 1009).float()
        weight.data = ((values - 504) / 1024 + (weight.dim() == 1)).view_as(weight)
    return model


def tokens(count: int, factor: int) -> torch.Tensor:
    return (torch.arange(count) * factor % 61)[None]


def goes_on(model: Any, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[None], past_key_values=cache).logits[0] for ids in tokens(NEW, 17).T])


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_of_the_release_before_goes_on(name: str) -> None:
    file, model = FOLDER / f"{name}.kvs", fixed_model()
    cache = CompressedCache.load(file, model)
    assert cache.tokens_seen == TOKENS and str(cache.method).startswith(METHODS[name].partition(":")[0])
    wanted = load_file(FOLDER / "logits.safetensors")[name]
    assert wanted.std() > 0.5
    torch.testing.assert_close(goes_on(model, cache), wanted, atol=1e-3, rtol=0)


def test_they_are_those_of_the_release_before() -> None:
    for name in METHODS:
        with safe_open(FOLDER / f"{name}.kvs", framework="pt") as file:
            written, here = Version(file.metadata()["kvsketch"]), Version(kvsketch.__version__)
        assert written < here and (here.major, here.minor) in (
            (written.major, written.minor + 1),
            (written.major + 1, 0),
        )


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    logits = {}
    for name, method in METHODS.items():
        model = fixed_model()
        cache = CompressedCache(model, method)
        kvsketch.prefill(model, tokens(TOKENS, 29), cache)
        cache.save(FOLDER / f"{name}.kvs")
        logits[name] = goes_on(model, CompressedCache.load(FOLDER / f"{name}.kvs", model))
    save_file(logits, FOLDER / "logits.safetensors")


if __name__ == "__main__":
    write()
