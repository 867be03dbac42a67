"""Files of format 1 are read, and go on with the tokens that the version which wrote them chose.

Each file in tests/data/format1 holds two rows, one left-padded, after a prompt of 24 tokens and 5 steps; `tokens.json`
holds the method of each file and the tokens that follow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from kvsketch import CompressedCache
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.saving.model_identity import ModelIdentity
from tests.helpers import zoo

FOLDER = Path(__file__).parents[1] / "data" / "format1"
TOKENS: dict[str, Any] = json.loads((FOLDER / "tokens.json").read_text())
PADS = (0, 5)


def model() -> Any:
    """A llama whose weights come from a stream of numbers that no version of torch or transformers changes."""
    built, stream = zoo.build("llama"), numpy.random.RandomState(7)
    for _, weight in sorted(built.named_parameters()):
        numbers = torch.from_numpy(stream.uniform(-1, 1, tuple(weight.shape))).float()
        weight.data.copy_(numbers / 2 if weight.dim() > 1 else 1 + numbers / 8)
    return built


def greedy(model: Any, cache: CompressedCache, token: torch.Tensor, count: int) -> list[list[int]]:
    """`count` single tokens, each the best after the one before, [steps][rows]."""
    chosen = []
    for _ in range(count):
        seen = cache.tokens_seen + 1
        mask = (torch.arange(seen) >= torch.tensor(PADS)[:, None]).long()
        positions = (mask.cumsum(-1) - 1)[:, -1:]
        with torch.no_grad():
            logits = model(token, past_key_values=cache, attention_mask=mask, position_ids=positions).logits
        token = logits[:, -1:].argmax(-1)
        chosen.append(token.flatten().tolist())
    return chosen


@pytest.mark.parametrize("name", TOKENS)
def test_a_file_of_format_1_goes_on_as_it_would_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a config says of its model changes with transformers; the weights are those of the file.
    monkeypatch.setattr(ModelIdentity, "differences", lambda *args: [])
    path, expected = FOLDER / f"{name}.kvs", TOKENS[name]
    assert sealed_file.verified(path)["version"] == "1"
    llama = model()
    cache = CompressedCache.load(path, llama)
    assert (str(cache.method), cache.tokens_seen) == (expected["method"], 29)
    assert greedy(llama, cache, torch.tensor([[5], [6]]), 12) == expected["tokens"]
