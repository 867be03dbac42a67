"""The attention seam: masks of every kind looked up at the slots, wrapping and unwrapping, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface
from transformers.masking_utils import add_offsets_to_mask_function

from kvsketch import CompressedCache
from kvsketch.cache import attention, masks
from tests.helpers import zoo

SEEN, NEW = 12, 3


def at_slots(index: torch.Tensor, query: torch.Tensor, mask: Any) -> torch.Tensor | None:
    return masks.mask_at_slots(mask, query, lambda: index, SEEN, index.shape[1])


@pytest.fixture
def slots() -> torch.Tensor:
    """[B=2, H=2, S=6] logical indices: a few old tokens, an empty slot and the new tokens 9, 10, 11."""
    return torch.tensor([[[0, 4, -1, 9, 10, 11], [1, 5, 7, 9, 10, 11]], [[3, 4, -1, 9, 10, 11], [3, 8, 7, 9, 10, 11]]])


def expected(slots: torch.Tensor, pads: list[int]) -> torch.Tensor:
    visible = torch.zeros(2, 2, NEW, 6, dtype=torch.bool)
    for b, h, i, s in torch.cartesian_prod(*(torch.arange(n) for n in visible.shape)).tolist():
        visible[b, h, i, s] = pads[b] <= max(int(slots[b, h, s]), 0) <= SEEN - NEW + i
    return visible


def test_every_kind_of_mask_says_the_same(slots: torch.Tensor) -> None:
    pads = [0, 3]
    query = torch.zeros(2, 4, NEW, 8)
    padding = torch.arange(SEEN)[None] >= torch.tensor(pads)[:, None]
    i = torch.arange(SEEN - NEW, SEEN)[:, None]
    boolean = (torch.arange(SEEN)[None] <= i)[None, None] & padding[:, None, None]
    block = create_block_mask(
        # what transformers does: the function counts queries from the first one of the forward
        add_offsets_to_mask_function(lambda b, h, q, kv: (kv <= q) & (kv >= torch.tensor(pads)[b]), SEEN - NEW, 0),
        2,
        None,
        NEW,
        SEEN,
        device="cpu",
        BLOCK_SIZE=4,
    )
    additive = torch.zeros(boolean.shape).masked_fill(~boolean, torch.finfo(torch.float32).min)
    wanted = expected(slots, pads)
    empty = slots < 0
    for mask in (boolean, additive, padding, block):
        result = at_slots(slots, query, mask)
        assert result is not None
        visible = result if result.dtype == torch.bool else result == 0
        hidden_slots = empty.unsqueeze(2).expand_as(visible)
        assert torch.equal(visible[~hidden_slots], wanted[~hidden_slots])
        last = masks.last_row_visible(mask, SEEN)
        assert last is not None and torch.equal(last, padding)


def test_no_mask_and_one_query_sees_everything(slots: torch.Tensor) -> None:
    assert at_slots(slots, torch.zeros(2, 4, 1, 8), None) is None
    causal = at_slots(slots, torch.zeros(2, 4, NEW, 8), None)
    assert causal is not None and torch.equal(
        causal[slots.unsqueeze(2).expand_as(causal) >= 0],
        expected(slots, [0, 0])[slots.unsqueeze(2).expand_as(causal) >= 0],
    )


def test_unknown_masks_are_refused(slots: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="dict"):
        at_slots(slots, torch.zeros(2, 4, NEW, 8), {})


def test_install_happens_once_and_is_reversible() -> None:
    attention.uninstall()
    original = AttentionInterface.get_interface
    import kvsketch  # importing changes nothing

    assert AttentionInterface.get_interface is original
    attention.install()
    wrapped = AttentionInterface.get_interface
    attention.install()
    assert AttentionInterface.get_interface is wrapped is not original
    attention.uninstall()
    assert AttentionInterface.get_interface is original and kvsketch


@pytest.mark.parametrize("wrong", [None, "llama", torch.nn.Linear(2, 2), 3])
def test_a_cache_needs_a_model_or_config(wrong: Any) -> None:
    with pytest.raises(ValueError, match="model or its config"):
        CompressedCache(wrong, "full")


def test_a_model_without_full_attention_is_refused() -> None:
    model = zoo.build("mistral", sliding_window=8)
    with pytest.raises(ValueError, match="mistral has no layer to compress"):
        CompressedCache(model, "streamingllm:budget=16")


def test_attention_that_changes_values_is_refused() -> None:
    model = zoo.build("llama")
    cache = CompressedCache(model, "full")
    keys, values = cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    interface = AttentionInterface().get_interface("sdpa", None)
    with pytest.raises(ValueError, match="Linear changes keys or values"):
        interface(torch.nn.Linear(2, 2), torch.zeros(1, 4, 3, 8), keys, torch.cat([values, values], 1), None)


def test_phi3_long_rope_keeps_the_users_cache() -> None:
    long_rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                 "original_max_position_embeddings": 16}  # fmt: skip
    model = zoo.build(
        "phi3", rope_parameters=long_rope, original_max_position_embeddings=16, max_position_embeddings=64
    )
    cache = CompressedCache(model, "streamingllm:budget=8")
    out = model.generate(zoo.tokens(1, 30), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 34) and cache.tokens_seen == 33 and cache.tokens_stored == 8


def test_a_cache_that_is_turned_off_is_refused() -> None:
    """transformers would feed the whole text at every step into the cache, without a word."""
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(
            zoo.tokens(1, 9), past_key_values=CompressedCache(model, "full"), use_cache=False, max_new_tokens=3
        )
    with pytest.warns(UserWarning, match="mpt turns its cache off"):
        CompressedCache(zoo.build("mpt", use_cache=False), "full")


def test_a_model_with_another_cache_compiles_in_one_piece() -> None:
    model = zoo.build("llama")
    CompressedCache(model, "full")
    ids = zoo.tokens(1, 10)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
