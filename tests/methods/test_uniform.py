"""Uniform sampling: the law of its sample and of its weights, in one turn and over several.

Draws depend on the head, so heads that hold the same keys and values are independent runs. Seeds are fixed; a check of
a mean or a variance over 800 heads raises a false alarm with a chance of 6e-5.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache, ops
from kvsketch.methods import Uniform
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo

HEADS, SIZE, SIGMAS = 800, 4, 4.0


def tokens(count: int, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(1, 1, count, SIZE, generator=generator) for _ in range(2))
    return keys.expand(1, heads, -1, -1), values.expand(1, heads, -1, -1)


def feed(table: SlotTable, method: Uniform, keys: Tensor, values: Tensor, chunks: list[int]) -> None:
    start = table.seen
    for chunk in chunks:
        part = slice(start, start + chunk)
        table.append(keys[:, :, part], values[:, :, part])
        table.forward.scale = 0.5
        method.compress(table, keys[:, :, part])
        start += chunk


def off_by(result: Tensor, expected: float) -> float:
    """Distance of the mean from its expected value, in standard errors."""
    return float((result.mean() - expected).abs() / (result.std() / len(result) ** 0.5))


def weights_of(table: SlotTable, count: int) -> Tensor:  # [H, count]
    """What each token of the text weighs, 0 where it is not kept."""
    weights = torch.zeros(table.shape[1], count + 1, dtype=torch.float64)
    return weights.scatter_add(1, table.index_slots()[0] % (count + 1), table.log_den[0].double().exp())[:, :count]


@pytest.mark.parametrize("chunks", [[120], [60, 60], [40] + [1] * 80], ids=["whole", "chunked", "decoded"])
def test_both_sums_are_unbiased_with_the_variance_of_a_simple_random_sample(chunks: list[int]) -> None:
    """Var = n^2 (1 - m / n) S^2 / m for m of n tokens drawn without replacement; sinks and window add nothing to it."""
    keys, values = tokens(120)
    table = SlotTable(LayerContext(0, 1))
    feed(table, Uniform(budget=40, sinks=4, recent=8), keys, values, chunks)
    query = keys[:, :, :1]
    e = (0.5 * (query @ keys.mT)).double().exp()[0, 0, 0]
    out, (_, log_den) = ops.weighted_attention(
        query, table.key_slots(), table.value_slots(), table.log_den, table.log_den, 0.5, return_state=True
    )
    den = log_den[0, :, 0].double().exp()
    n, m = 120 - 12, 40 - 12
    for sums, terms in ((den, e), (out[0, :, 0, 0].double() * den, e * values[0, 0, :, 0].double())):
        variance = n * n * (1 - m / n) * float(terms[4:112].var()) / m
        assert off_by(sums, float(terms.sum())) < SIGMAS
        assert off_by((sums - terms.sum()).square(), variance) < SIGMAS
    assert off_by(den * 0.97, float(e.sum())) > SIGMAS, "weights that are off by 3% would be noticed"


def test_weights_add_up_to_the_tokens_and_are_optional() -> None:
    keys, values = tokens(120, heads=3)
    table = SlotTable(LayerContext(0, 1))
    feed(table, Uniform(budget=40, sinks=4, recent=8), keys, values, [100] + [1] * 20)
    weights = weights_of(table, 120)
    torch.testing.assert_close(weights.sum(-1), torch.full((3,), 120.0, dtype=torch.float64))
    assert (weights[:, :4] == 1).all() and (weights[:, -8:] == 1).all(), "sinks and window weigh 1"
    drawn = weights[:, 4:112]
    torch.testing.assert_close(drawn[drawn > 0], torch.full((3 * 28,), 108 / 28, dtype=torch.float64))
    plain = SlotTable(LayerContext(0, 1))
    feed(plain, Uniform(budget=40, sinks=4, recent=8, weights=False), keys, values, [100] + [1] * 20)
    assert weights_of(plain, 120).sum(-1).tolist() == [40.0] * 3


TURNS = {
    "equal": ("25%", [200, 200, 200]),
    "short_first": ("25%", [80, 300]),
    "short_turns": ("25%", [300] + [20] * 6),
    "with_answers": ("1/4", [200] + [1] * 40 + [150] + [1] * 40),
    "early_shape": ("100%", [100] + [1] * 50 + [150]),
}


@pytest.mark.parametrize("case", TURNS)
def test_every_token_weighs_one_in_the_mean_over_several_turns(case: str) -> None:
    """A share grows with the prompt: tokens of the first turn had less room, and no later one can bring them back."""
    share, chunks = TURNS[case]
    count = sum(chunks)
    keys, values = tokens(count)
    method, table = Uniform(budget=share, sinks=4, recent=8), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, chunks[:1])
    if case == "early_shape":
        method.bound(table, count)
        assert not table.exact
    feed(table, method, keys, values, chunks[1:])
    assert table.stored() <= method.budget_tokens(table)
    weights = weights_of(table, count)
    torch.testing.assert_close(weights.sum(-1), torch.full((HEADS,), float(count), dtype=torch.float64))
    bounds = [4]
    for chunk in chunks:
        bounds.append(bounds[-1] + chunk - (4 if len(bounds) == 1 else 0))
    several = [(a, min(b, count - 8)) for a, b in itertools.pairwise(bounds) if b - a > 1]
    for start, end in several:
        mass = weights[:, start:end].sum(-1)
        near = abs(float(mass.mean()) - (end - start)) < 0.02 * (end - start)
        assert near or off_by(mass, end - start) < SIGMAS, (start, end, float(mass.mean()))
    pooled = (weights > 0)[:, 4 : count - 8].double()
    pooled *= (count - 12) / pooled.sum(-1, keepdim=True)
    first = pooled[:, : several[0][1] - 4].sum(-1)
    assert off_by(first, several[0][1] - 4) > SIGMAS, "one weight for all tokens would be noticed"


def test_strata_of_a_row_do_not_depend_on_the_batch() -> None:
    """Three turns of three rows of other lengths, and each row alone."""
    lengths, turns = [200, 130, 60], [150, 1, 1, 90, 1]
    method = Uniform(budget="25%", sinks=2, recent=4)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, 200 + sum(turns), SIZE, generator=generator) for _ in range(2))
    together = SlotTable(LayerContext(0, 1))
    together.append(keys[:, :, :200], values[:, :, :200])
    together.padding = torch.tensor([200 - n for n in lengths])
    method.compress(together, keys)
    feed(together, method, keys, values, turns)
    assert together.state.strata.shape == (3, 3)
    for row, length in enumerate(lengths):
        table = SlotTable(LayerContext(0, 1))
        own = [t[row : row + 1, :, 200 - length :] for t in (keys, values)]
        feed(table, method, *own, [length, *turns])
        for head in range(2):
            result = [
                sorted(zip(t.position_slots()[b, head].tolist(), t.log_den[b, head].tolist(), strict=True))
                for t, b in ((table, 0), (together, row))
            ]
            ours, theirs = ([pair for pair in pairs if pair[0] >= 0] for pairs in result)
            assert [p for p, _ in ours] == [p for p, _ in theirs]
            torch.testing.assert_close(torch.tensor([w for _, w in ours]), torch.tensor([w for _, w in theirs]))


def test_strata_follow_beams_and_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, ids = zoo.build("llama"), zoo.tokens(1, 120)
    cache = CompressedCache(model, "uniform:budget=25%:recent=4:sinks=2")
    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:110], past_key_values=cache)
        cache.save(tmp_path / "turns.kvs")
        other = kvsketch.CompressedCache.load(tmp_path / "turns.kvs", model)
        other.batch_repeat_interleave(2)
        expected = model(ids[:, 110:111], past_key_values=cache).logits
        result = model(ids[:, 110:111].repeat(2, 1), past_key_values=other).logits
    assert cache.slot_layers[0].table.state.strata.shape[1] == 2
    torch.testing.assert_close(result, expected.repeat(2, 1, 1))
