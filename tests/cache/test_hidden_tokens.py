"""Tokens that a mask hides inside a row leave no trace, or the method refuses the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache

from kvsketch import CompressedCache, parse_method
from kvsketch.cache import masks
from kvsketch.cache.forward import Forward
from tests.helpers import zoo
from tests.helpers.common import FED, generate, padded, with_budget

IGNORING = [name for name, method in FED.items() if method.ignores_hidden_tokens]
REFUSING = [name for name in FED if name not in IGNORING]
REASON = r"hides token 30 of batch row 1, .*{method} would .*on the left .*one at a time.*DynamicCache"


def fed(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One forward of the last tokens that `mask` covers; positions count the visible ones."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits


def talk(model: Any, cache: Any, padding_seed: int) -> torch.Tensor:
    """Logits of two turns and some steps; the second turn of row 1 begins with 9 hidden tokens."""
    question = zoo.tokens(2, 20, seed=1)
    question[1, :9] = zoo.tokens(1, 9, seed=padding_seed)
    mask = torch.ones(2, 62, dtype=torch.long)
    mask[1, 30:39] = 0
    logits = [fed(model, cache, zoo.tokens(2, 30), mask[:, :30]), fed(model, cache, question, mask[:, :50])[:, 9:]]
    logits += [fed(model, cache, zoo.tokens(2, 1, seed=n), mask[:, : n + 1]) for n in range(50, 62)]
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", IGNORING)
@pytest.mark.parametrize("prefill", ["exact", "stream"])
def test_another_hidden_token_changes_nothing(name: str, prefill: str) -> None:
    model = zoo.build("llama")
    caches = [CompressedCache(model, with_budget(name, 24), prefill=prefill, chunk=7) for _ in range(2)]
    first, second = (talk(model, cache, seed) for cache, seed in zip(caches, (7, 8), strict=True))
    assert torch.equal(first, second)
    assert not torch.equal(first, talk(model, CompressedCache(model, "streamingllm:budget=9:sinks=1"), 7))


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize(("budget", "prefill"), [(16, "exact"), (96, "stream")])
def test_methods_that_would_read_them_refuse_until_the_cache_is_reset(name: str, budget: int, prefill: str) -> None:
    model, method = zoo.build("llama"), parse_method(with_budget(name, budget))
    # Where layers decide together, a forward is one chunk.
    cache = CompressedCache(model, method, prefill=prefill, chunk=64 if method.settles else 7)
    reason = REASON.format(method=name)
    with pytest.raises(ValueError, match=reason):
        talk(model, cache, 7)
    with pytest.raises(ValueError, match=reason):
        fed(model, cache, zoo.tokens(2, 1), torch.ones(2, 51, dtype=torch.long))
    cache.reset()
    assert fed(model, cache, *padded(zoo.tokens(2, 30), [0, 9])).isfinite().all()


@pytest.mark.parametrize("name", FED)
def test_a_second_turn_whose_rows_are_padded_apart(name: str) -> None:
    """`generate` with questions of different lengths: the tokens of transformers' own cache, or the refusal."""
    model, first = zoo.build("llama"), zoo.tokens(2, 24)
    question, mask = padded(zoo.tokens(2, 7, seed=1), [0, 4])
    whole = torch.cat([torch.ones(2, 30, dtype=mask.dtype), mask], 1)

    def answers(cache: Any) -> list[list[int]]:
        text = torch.cat([generate(model, first, cache, max_new_tokens=6).sequences, question], 1)
        return generate(model, text, cache, attention_mask=whole, max_new_tokens=6).sequences.tolist()

    cache = CompressedCache(model, with_budget(name, 96))
    if name in IGNORING:
        assert answers(cache) == answers(DynamicCache(config=model.config))
    else:
        with pytest.raises(ValueError, match=REASON.format(method=name)):
            answers(cache)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gptj", "mpt"])
@pytest.mark.parametrize("place", [slice(15, 17), slice(38, 40)], ids=["middle", "right padding"])
def test_a_prompt_is_refused_in_every_family(family: str, place: slice) -> None:
    model, mask = zoo.build(family), torch.ones(2, 40, dtype=torch.long)
    mask[1, place] = 0
    with torch.no_grad(), pytest.raises(ValueError, match=f"hides token {place.start} of batch row 1"):
        model(zoo.tokens(2, 40), attention_mask=mask, past_key_values=CompressedCache(model, "kcenter:budget=80"))


def test_hidden_steps_are_found_when_several_tokens_come() -> None:
    model, mask = zoo.build("llama"), torch.ones(2, 50, dtype=torch.long)
    mask[0, 41] = 0
    cache = CompressedCache(model, "quest:budget=16:skip_layers=0")
    fed(model, cache, zoo.tokens(2, 40), mask[:, :40])
    for n in range(40, 44):
        fed(model, cache, zoo.tokens(2, 1), mask[:, : n + 1])
    with pytest.raises(ValueError, match="hides token 41 of batch row 0"):
        fed(model, cache, zoo.tokens(2, 6), mask)


def prefix(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) | (key < 12)


def packed(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key // 15 == query // 15)


@pytest.mark.parametrize("shape", [prefix, packed])
@pytest.mark.parametrize("name", REFUSING)
def test_masks_of_prefixes_and_packed_texts_are_served(name: str, shape: Any) -> None:
    model, ids, at = zoo.build("llama"), zoo.tokens(2, 40), torch.arange(40)
    mask = shape(at[:, None], at[None])[None, None].expand(2, 1, 40, 40)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, past_key_values=CompressedCache(model, with_budget(name, 16))).logits
        assert torch.equal(ours, model(ids, attention_mask=mask, past_key_values=DynamicCache()).logits)


def test_what_counts_as_hidden_inside() -> None:
    rows = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    assert masks.hidden_inside(None, 5) is masks.hidden_inside(rows, 5) is None
    for row, token in ((0, 3), (1, 1), (1, 4)):
        mask = rows.clone()
        mask[row, token] = 0
        causal = mask[:, None, None].bool() & torch.ones(5, 5).tril().bool()
        added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        for given in (mask, causal, added, added.masked_fill(~causal, float("-inf"))):
            assert masks.hidden_inside(given, 5) == (row, token)
        assert masks.hidden_inside(mask, token) is None
    block = create_block_mask(lambda b, h, q, k: (k <= q) & (k != 7), 2, None, 40, 40, device="cpu")
    assert masks.hidden_inside(block, 40) == (0, 7)
    assert masks.hidden_inside(create_block_mask(lambda b, h, q, k: k <= q, 2, None, 40, 40, device="cpu"), 40) is None


def test_the_device_is_asked_once_in_a_forward_and_never_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    hidden_inside = masks.hidden_inside
    monkeypatch.setattr(masks, "hidden_inside", lambda mask, seen: looked.append(seen) or hidden_inside(mask, seen))
    model = zoo.build("llama", num_hidden_layers=3)
    ids, mask = padded(zoo.tokens(2, 41), [0, 5])
    cache = CompressedCache(model, "snapkv:budget=64")
    fed(model, cache, ids[:, :40], mask[:, :40])
    assert looked == [40]
    fed(model, cache, ids[:, 40:], mask)
    assert looked == [40]


def test_what_was_found_in_a_mask_holds_for_that_mask() -> None:
    forward, mask = Forward(), torch.ones(1, 5, dtype=torch.int64)
    result = [forward.once("sum", mask, 5, lambda: int(mask.sum())) for _ in range(2)]
    mask[0, 2] = 0
    result.append(forward.once("sum", mask, 5, lambda: int(mask.sum())))
    result.append(forward.once("sum", mask, 4, lambda: int(mask[:, :4].sum())))
    other = torch.zeros(1, 4, dtype=torch.int64)
    assert [*result, forward.once("sum", other, 4, lambda: int(other.sum()))] == [5, 5, 4, 3, 0]
