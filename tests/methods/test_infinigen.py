"""InfiniGen: the turned channels, the threshold, and the choice against brute force."""

from __future__ import annotations

import pytest
import torch

import kvsketch
from kvsketch.methods import InfiniGen
from kvsketch.methods.infinigen import PARTIAL, SKEW
from kvsketch.slots import SlotTable

TOKENS, SIZE, GROUP = 90, 16, 2


def indexed(method: InfiniGen, seed: int = 0, batch: int = 2) -> tuple[SlotTable, torch.Tensor]:
    """A table of 90 tokens with one more appended, and that token's query; queries are long along few directions."""
    g = torch.Generator().manual_seed(seed)
    stretch = torch.linspace(2.0, 0.1, SIZE) ** 4
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=g)).Q
    table = SlotTable(0, 1)
    table.scale = 0.25
    for new in (TOKENS, 1):
        keys, values = (torch.randn(batch, 3, new, SIZE, generator=g) for _ in range(2))
        queries = (torch.randn(batch, 3 * GROUP, new, SIZE, generator=g) * stretch) @ turn
        table.append(keys, values)
        if new > 1:
            method.compress(table, queries)
    return table, queries


def true_scores(table: SlotTable, query: torch.Tensor) -> torch.Tensor:
    keys = table.key_slots().repeat_interleave(GROUP, 1)
    return (query @ keys.mT).squeeze(2) * table.scale


def test_directions_are_orthogonal_and_hold_the_queries_length() -> None:
    method = InfiniGen(budget=20, skip_layers=0)
    table, query = indexed(method)
    skew = table.row_state[SKEW]
    assert skew.shape == (2, 3, SIZE, 4), "a fifth of 16 channels, rounded up"
    torch.testing.assert_close(skew.mT @ skew, torch.eye(4).expand(2, 3, 4, 4), atol=1e-5, rtol=1e-5)
    held = (query.unflatten(1, (3, GROUP)).squeeze(3) @ skew).norm() / query.norm()
    assert held > 0.9, "four of sixteen directions carry nearly all of a query"
    torch.testing.assert_close(table.row_state[PARTIAL][:, :, :TOKENS], table.key_slots()[:, :, :TOKENS] @ skew)


def test_all_channels_and_no_threshold_choose_the_true_best() -> None:
    """An orthogonal turn keeps inner products: with every channel the choice is the exact top of the budget."""
    method = InfiniGen(budget=20, skip_layers=0, ratio=1.0, alpha=1e6)
    table, query = indexed(method)
    rows = method.choose_rows(table, query)
    best = true_scores(table, query)[..., :TOKENS].topk(19, dim=-1).indices
    for chosen, wanted in zip(rows.flatten(0, 1).tolist(), best.flatten(0, 1).tolist(), strict=True):
        assert set(chosen) == {*wanted, TOKENS}, "the best of the past and the query's own token"


def test_a_few_channels_find_most_of_the_best() -> None:
    table, query = indexed(InfiniGen(budget=20, skip_layers=0, alpha=1e6))
    rows = InfiniGen(budget=20, skip_layers=0, alpha=1e6).choose_rows(table, query)
    best = true_scores(table, query)[..., :TOKENS].topk(19, dim=-1).indices
    found = [
        len({*c} & {*w}) / 19 for c, w in zip(rows.flatten(0, 1).tolist(), best.flatten(0, 1).tolist(), strict=True)
    ]
    # No figure is promised for random keys; this asks for clearly more than the 0.21 of chance.
    assert sum(found) / len(found) > 0.6


def test_the_threshold_counts_what_is_near_the_maximum() -> None:
    method = InfiniGen(budget=60, skip_layers=0, ratio=1.0, alpha=2.0)
    table, query = indexed(method)
    scores = true_scores(table, query)[..., :TOKENS]
    near = (scores > scores.amax(-1, keepdim=True) - 2.0).sum(-1).float().mean(-1).round().long()
    read = (method.choose_rows(table, query) >= 0).sum(-1)
    assert (read == near.view(-1, 1) + 1).all(), "the mean over the heads of a row, and the query's own token"
    assert (near < 59).all(), "the cap must not hide the threshold"


def test_the_answer_is_attention_over_the_chosen() -> None:
    method = InfiniGen(budget=20, skip_layers=0)
    table, query = indexed(method)
    out = method.attend(table, query)
    rows = method.choose_rows(table, query)
    assert out is not None
    keys, values = (t.repeat_interleave(GROUP, 1) for t in (table.key_slots(), table.value_slots()))
    for b in range(2):
        for h in range(3 * GROUP):
            chosen = [r for r in rows[b, h].tolist() if r >= 0]
            weights = (keys[b, h, chosen] @ query[b, h, 0] * table.scale).softmax(0)
            torch.testing.assert_close(out[b, h, 0], weights @ values[b, h, chosen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text", ["infinigen:ratio=0", "infinigen:ratio=1.5", "infinigen:alpha=0", "infinigen:sinks=4"])
def test_wrong_parameters(text: str) -> None:
    with pytest.raises(ValueError, match="infinigen"):
        kvsketch.parse_method(text)
