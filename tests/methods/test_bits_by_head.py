"""The script that gives layers and heads bits of their own: it spends the bytes it says, and spends them best."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvsketch import CompressedCache, prefill
from scripts.bits_by_head import KINDS, best_of_bytes, cheapest, slot_bytes
from tests.helpers import zoo

FORM = "scripts.bits_by_head:BitsByHead:budget=1/4:chunk=64"


def test_bits_cost_least_in_the_bytes_of_equal_bits() -> None:
    torch.manual_seed(0)
    # Each bit divides the cost of a head by four; heads differ.
    costs = torch.rand(2, 3, 2, 1).double().pow(4) * 0.25 ** torch.tensor(KINDS).double()
    counts = torch.tensor([[10.0, 200.0, 40.0], [5.0, 5.0, 5.0]]).double()
    bits = cheapest(costs, counts, (4, 2), 32)
    spent = (counts * slot_bytes(bits[..., 0], bits[..., 1], 32)).sum(1)
    assert (spent <= counts.sum(1) * slot_bytes(4, 2, 32)).all()
    pairs = list(itertools.product(range(len(KINDS)), repeat=2))
    for row in range(2):
        taken = sum(costs[row, a, i, KINDS.index(int(bits[row, a, i]))] for a in range(3) for i in range(2))
        for choice in itertools.product(pairs, repeat=3):
            own = [costs[row, a, 0, i] + costs[row, a, 1, j] for a, (i, j) in enumerate(choice)]
            size = [counts[row, a] * slot_bytes(KINDS[i], KINDS[j], 32) for a, (i, j) in enumerate(choice)]
            # With one multiplier no choice that takes as few bytes costs less.
            assert sum(own) >= taken - 1e-12 or sum(size) > spent[row]


def test_tokens_compete_for_bytes() -> None:
    worth = [torch.tensor([[[0.9, 0.1, float("-inf")], [0.5, 0.4, 0.3]]])]
    keep = best_of_bytes(worth, torch.tensor([[[1.0, 2.0]]]), torch.tensor([5.0]))
    assert keep[0].tolist() == [[[True, False, False], [True, True, False]]]


@pytest.mark.parametrize("rest", ["divide=none:like=44", "divide=layer:like=42", "divide=head:like=32:cost=worst"])
def test_it_reads_a_padded_batch_as_each_row_alone(rest: str) -> None:
    model = zoo.build("llama", num_hidden_layers=2, head_dim=32, hidden_size=128, num_attention_heads=4)
    ids, mask = zoo.tokens(2, 160), torch.ones(2, 160, dtype=torch.long)
    mask[1, :24] = 0
    kept = []
    with torch.no_grad():
        for rows in ((0, 1), (1,)):
            cache = CompressedCache(model, f"{FORM}:{rest}")
            first = 24 if rows == (1,) else 0
            prefill(model, ids[list(rows), first:], cache, attention_mask=mask[list(rows), first:])
            kept.append(sum(int((layer.table.index_slots()[-1] >= 0).sum()) for layer in cache.slot_layers))
    assert abs(kept[0] - kept[1]) <= 0.1 * kept[1]
