"""Copies of a cache: tensors of its own, made with few launches."""

from __future__ import annotations

import copy

import torch

from kvsketch import CompressedCache
from kvsketch.slots.tensors import copies
from tests.helpers import zoo
from tests.helpers.common import padded


def test_only_tensors_that_fill_a_storage_of_their_own_are_copied_together() -> None:
    whole, wide = torch.arange(6.0), torch.arange(8)
    shared = torch.zeros(2, 2)
    result = copies([whole, whole, wide[2:5], shared, shared.view(4)])
    assert [*result] == [id(whole)] and torch.equal(result[id(whole)], whole)
    assert result[id(whole)].data_ptr() != whole.data_ptr()


def test_a_copy_of_a_cache_goes_on_by_itself() -> None:
    model, (ids, mask) = zoo.build("llama"), padded(zoo.tokens(2, 70), [0, 5])
    cache = CompressedCache(model, "rehearse")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        before = [t.clone() for layer in cache.slot_layers for t in layer.table.tensors()]
        copied = copy.deepcopy(cache)
        assert copied.method is cache.method
        own, others = ({t.data_ptr() for x in each.slot_layers for t in x.table.tensors()} for each in (cache, copied))
        assert not own & others
        model(ids[:, :1], past_key_values=copied)
    after = [t for layer in cache.slot_layers for t in layer.table.tensors()]
    assert all(map(torch.equal, before, after)) and (cache.tokens_seen, copied.tokens_seen) == (70, 71)
