"""Each kind of table under `generate` on the real SmolLM2, a grouped-query model: prompt, decoding, counts, sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache, models
from kvsketch.models import texts
from tests.helpers.common import also, bounded

pytestmark = pytest.mark.real_model
BUDGET = 64


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return models.load("smollm2-135m", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def prompt(smollm2: tuple[Any, Any]) -> Any:
    return texts.passkey_document(smollm2[1], tokens=192, depth=0.5, seed=3)


@pytest.fixture(scope="module")
def full_answer(smollm2: tuple[Any, Any], prompt: Any) -> Any:
    model, _ = smollm2
    return model.generate(
        prompt.input_ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


def text_form(name: str) -> str:
    fields = kvsketch.METHODS[name].__dataclass_fields__
    return f"{name}:budget={BUDGET}" if "budget" in fields else name


@pytest.mark.parametrize("name", ["full", "rehearse", *also("subgen", "clusterkv", "snapkv", "balancekv")])
def test_each_kind_of_table_generates(name: str, smollm2: tuple[Any, Any], prompt: Any, full_answer: Any) -> None:
    model, tokenizer = smollm2
    cache = CompressedCache(model, text_form(name))
    out = model.generate(
        prompt.input_ids,
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert cache.tokens_seen == out.sequences.shape[1] - 1
    assert all(logits.isfinite().all() for logits in out.logits)
    assert torch.equal(out.logits[0], full_answer.logits[0]), "prefill is the model's own, bit for bit"
    if name in bounded():
        budgets = [layer.method.budget_tokens(layer.table) for layer in cache.slot_layers]
        assert all(layer.table.stored() <= most for layer, most in zip(cache.slot_layers, budgets, strict=True))
    answer = tokenizer.decode(out.sequences[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    if cache.method.family in ("full", "recall"):
        assert str(prompt.passkey) in answer
    if name == "full":
        assert out.sequences.tolist() == full_answer.sequences.tolist()
