"""PyramidKV: the schedule of budgets over the layers; the scores are SnapKV's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsketch
from kvsketch import CompressedCache
from kvsketch.methods import PyramidKV
from kvsketch.methods.pyramidkv import READINGS
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import generate, padded


def schedule(method: PyramidKV, prompt: int, layers: int) -> list[int]:
    return [int(method.allot(SlotTable(LayerContext(rank, layers)), prompt).total) for rank in range(layers)]


def window(method: PyramidKV, prompt: int) -> int:
    return int(method.allot(SlotTable(LayerContext(0, 1)), prompt).recent)


def test_the_papers_numbers() -> None:
    """Capacity 2048, window 32, 32 layers, a long prompt: 3932 tokens beside the window below, 100 above."""
    tokens = schedule(PyramidKV(budget=2048, budget_is="mean"), 32768, 32)
    assert tokens[0] == 3932 + 32 and tokens[-1] == 100 + 32
    steps = {a - b for a, b in itertools.pairwise(tokens)}
    assert steps <= {123, 124}, "equal steps up to rounding: 3832 / 31"
    assert 2047 <= sum(tokens) / 32 <= 2048
    rounded_down = [3932 + 32 - layer * (3832 // 31) for layer in range(32)]
    assert sum(rounded_down) / 32 > 2048, "the released rounding breaks the promise that ours keeps"


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5000), st.integers(1, 40000), st.integers(1, 80), st.integers(1, 40), st.integers(0, 4))
def test_the_mean_over_layers_keeps_the_promise(budget: int, prompt: int, layers: int, beta: int, sinks: int) -> None:
    budget += 2 * sinks
    method = PyramidKV(budget=budget, beta=beta, sinks=sinks, budget_is="mean")
    tokens = schedule(method, prompt, layers)
    assert sum(tokens) <= budget * layers
    assert sum(tokens) >= (budget - 1) * layers, "and wastes less than a token per layer"
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] >= sinks + window(method, prompt), "sinks and window fit everywhere"
    assert tokens[0] <= max(budget, prompt)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5000), st.integers(1, 40000), st.integers(1, 80), st.integers(1, 40), st.integers(0, 4))
def test_no_layer_exceeds_the_budget_by_default(budget: int, prompt: int, layers: int, beta: int, sinks: int) -> None:
    budget += 2 * sinks
    method = PyramidKV(budget=budget, beta=beta, sinks=sinks)
    tokens = schedule(method, prompt, layers)
    assert tokens == sorted(tokens, reverse=True)
    assert budget - 2 <= tokens[0] <= budget, "the lowest layer uses what the budget allows"
    assert tokens[-1] >= sinks + window(method, prompt)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4000), st.integers(1, 40), st.integers(0, 40), st.sampled_from(READINGS))
def test_a_share_below_the_sinks_keeps_the_promise(
    percent: int, prompt: int, layers: int, sinks: int, budget_is: str
) -> None:
    """A share is known when the prompt is: it may be smaller than the sinks, and no error can say so in advance."""
    method = PyramidKV(budget=f"{percent}%", sinks=sinks, budget_is=budget_is)
    tokens, budget = schedule(method, prompt, layers), method.budget.of(prompt)
    assert sum(tokens) <= budget * layers
    assert budget_is == "mean" or max(tokens) <= budget
    assert min(tokens) >= 1


def test_short_prompts_give_every_layer_the_same() -> None:
    method = PyramidKV(budget=100, window=20, budget_is="mean")
    assert schedule(method, 100, 4) == schedule(method, 159, 4) == [100] * 4
    # Just long enough: the lowest layer would hold more than there is, so it holds everything.
    assert schedule(method, 160, 4) == [20 + 140, 120, 80, 20 + 20]
    assert schedule(method, 1000, 4) == [20 + 156, 125, 74, 20 + 4]


def test_beta_one_is_snapkv() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    runs = [
        generate(model, ids, CompressedCache(model, f"{name}:budget=16:window=4"))
        for name in ("snapkv", "pyramidkv:beta=1", "pyramidkv")
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    assert not torch.equal(runs[0].logits[-1], runs[2].logits[-1])


def test_layers_hold_what_the_schedule_says() -> None:
    model, ids = zoo.build("llama", num_hidden_layers=4), zoo.tokens(1, 90)
    cache = CompressedCache(model, "pyramidkv:budget=20:window=4:budget_is=mean")
    generate(model, ids, cache, max_new_tokens=6)
    stored = [layer.table.stored() for layer in cache.slot_layers]
    assert stored == schedule(PyramidKV(budget=20, window=4, budget_is="mean"), 90, 4) == [36, 25, 14, 4]
    full = CompressedCache(model, "snapkv:budget=20:window=4")
    generate(model, ids, full, max_new_tokens=6)
    assert cache.device_bytes <= full.device_bytes, "an uneven share of the same memory"


def test_only_compressed_layers_count() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    model = zoo.build("gemma3", num_hidden_layers=6, layer_types=kinds)
    cache = CompressedCache(model, "pyramidkv:budget=20:window=4:budget_is=mean")
    assert [(layer.table.context.rank, layer.table.context.compressed_layers) for layer in cache.slot_layers] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    with torch.no_grad():
        model(zoo.tokens(1, 90), past_key_values=cache)
    assert [layer.table.stored() for layer in cache.slot_layers] == [36, 20, 4]
    cache.reset()
    assert [layer.table.context.rank for layer in cache.slot_layers] == [0, 1, 2]


@pytest.mark.parametrize("budget", ["16", "40%"])
def test_rows_of_a_batch_follow_their_own_schedule(budget: str) -> None:
    """One row is long enough for a pyramid, one too short, one fits whole: each as if it were alone."""
    model = zoo.build("qwen2")
    method = f"pyramidkv:budget={budget}:window=2"
    lengths = [60, 20, 12]
    rows = [zoo.tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(row, (60 - row.shape[1], 0)) for row in rows])
    batch, mask = padded(batch, [60 - n for n in lengths])
    together = generate(model, batch, CompressedCache(model, method), attention_mask=mask)
    for i, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method))
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-4, rtol=1e-4)


def test_wrong_beta() -> None:
    with pytest.raises(ValueError, match=r"pyramidkv: beta=0 is not valid; use a whole number, 1"):
        kvsketch.parse_method("pyramidkv:beta=0")


@pytest.mark.parametrize("pads", [[0], [0, 30]], ids=["alone", "left_padded"])
def test_a_model_with_many_sinks_stays_within_a_small_share(pads: list[int]) -> None:
    model = zoo.build("llama", num_hidden_layers=4)
    ids, mask = padded(zoo.tokens(len(pads), 60), pads)
    cache = CompressedCache(model, "pyramidkv:budget=10%:sinks=8")
    generate(model, ids, cache, attention_mask=mask, max_new_tokens=6)
    assert cache.tokens_stored <= 6
