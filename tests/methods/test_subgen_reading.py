"""What is read from SubGen's table: the ratio of two unbiased sums, bounded or self-normalised, and its health."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from subgen_tables import feed, read, subgen, tokens
from torch import Tensor

import zoo
from kvsketch import CompressedCache, ops
from kvsketch.methods import SubGen
from kvsketch.slots import SlotTable


def test_the_two_sums_of_a_table_are_unbiased() -> None:
    """Mean over 600 heads that hold the same tokens; false alarm 6e-5 each."""
    keys, values = (t.expand(1, 600, -1, -1) for t in tokens(120, heads=1))
    method, table = subgen("budget=40:normalizer=paper"), SlotTable(0, 1)
    feed(table, method, keys, values, [100] + [1] * 20)
    query = keys[:, :, :1] * 0.5
    exact = (table.scale * (query @ keys.mT)).exp()[0, 0, 0]
    out, (_, log_den) = ops.weighted_attention(
        query, table.key_slots(), table.value_slots(), table.log_num, table.log_den, table.scale, return_state=True
    )
    den = log_den[0, :, 0].double().exp()
    num = out[0, :, 0, 0].double() * den
    for found, expected in ((den, exact.sum()), (num, (exact * values[0, 0, :, 0]).sum())):
        assert abs(found.mean() - expected) < 4 * found.std() / 600**0.5
        assert found.std() > 0


def test_self_normalised_output_stays_among_the_values() -> None:
    keys, values = tokens(200)
    method, table = subgen("budget=40:normalizer=self"), SlotTable(0, 1)
    feed(table, method, keys, values, [200])
    assert table.log_num is None
    assert read(table, keys[:, :, -5:] * 3).norm(dim=-1).max() <= values.norm(dim=-1).max() * (1 + 1e-5)


def test_clipping_bounds_the_ratio_of_the_sums() -> None:
    """A heavy key that one sum holds and the other does not scales the paper's output; clipped, by rho at most."""
    keys, values = tokens(200, heads=40)
    keys[:, :, 77] *= 6.0
    query = keys[:, :, 77:78] * 0.3
    plain, clipped = subgen("budget=40:normalizer=paper"), subgen("budget=40:rho=2")
    table = SlotTable(0, 1)
    feed(table, plain, keys, values, [200])
    health = plain.health(table, query)
    assert health.abs().max() > math.log(2.0), "the sums must disagree somewhere, or nothing is tested"
    free, bounded = read(table, query, plain.clip).norm(dim=-1), read(table, query, clipped.clip).norm(dim=-1)
    factor = (health.clamp(-math.log(2.0), math.log(2.0)) - health).exp()
    torch.testing.assert_close(bounded[free > 1e-20], (free * factor)[free > 1e-20], atol=1e-4, rtol=1e-3)
    assert plain.clip is None
    assert clipped.clip == math.log(2.0)


def test_health_is_zero_while_everything_is_exact_and_near_zero_after() -> None:
    keys, values = tokens(400, heads=8)
    method, table = subgen("budget=200"), SlotTable(0, 1)
    feed(table, method, keys, values, [150])
    assert method.health(table, keys[:, :, -1:]).abs().max() == 0
    feed(table, method, keys[:, :, 150:], values[:, :, 150:], [250])
    health = method.health(table, keys[:, :, -4:] * 0.2)
    assert 0 < health.abs().mean() < 0.3


def test_coalescing_changes_neither_output_nor_storage() -> None:
    keys, values = tokens(60)
    tables = []
    for text in ("budget=50:delta=1.0", "budget=50:delta=1.0:coalesce=false"):
        tables.append(SlotTable(0, 1))
        feed(tables[-1], subgen(text), keys, values, [51] + [1] * 9)
    once, apart = tables
    torch.testing.assert_close(read(once, keys[:, :, -2:]), read(apart, keys[:, :, -2:]), atol=1e-5, rtol=1e-4)
    assert once.stored() < apart.stored() <= 50
    assert once.keys.shape == apart.keys.shape


def test_values_of_zero_read_as_zero() -> None:
    keys, values = tokens(100)
    table = SlotTable(0, 1)
    feed(table, subgen("budget=30"), keys, values * 0, [90] + [1] * 10)
    assert (read(table, keys[:, :, :1]) == 0).all()


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("normalizer", ["clipped", "paper", "self"])
def test_a_model_reads_both_sums_of_a_bounded_table(new: int, normalizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the output projection is the ratio of the two sums over the slots each query may see, clipped."""
    model, ids = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, 60 + new)
    cache = CompressedCache(model, f"subgen:budget=24:sinks=2:rho=1.02:normalizer={normalizer}")
    seen: dict[str, Any] = {}

    def keep(self: SubGen, table: SlotTable, queries: Tensor) -> None:
        seen.update(table=table, queries=queries)

    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        monkeypatch.setattr(SubGen, "compress", keep)
        projection = model.model.layers[0].self_attn.o_proj
        projection.register_forward_pre_hook(lambda module, inputs: seen.update(out=inputs[0]))
        model(ids[:, 60:], past_key_values=cache)
    table, queries = seen["table"], seen["queries"].double()
    group = queries.shape[1] // table.keys.shape[1]
    scores = table.scale * queries @ table.keys.double().repeat_interleave(group, 1).mT  # [B, Hq, n, S]
    last = 60 + torch.arange(new)[:, None]
    visible = (table.index >= 0).repeat_interleave(group, 1)[:, :, None] & (
        table.index.repeat_interleave(group, 1)[:, :, None] <= last
    )
    num, den = (
        (scores + weights.double().repeat_interleave(group, 1)[:, :, None]).exp() * visible
        for weights in (table.log_den if table.log_num is None else table.log_num, table.log_den)
    )
    total, weight = den.sum(-1, keepdim=True), num[..., : table.values.shape[2]].sum(-1, keepdim=True)
    if normalizer == "clipped":
        assert ((weight / total).log().abs() > math.log(1.02)).any(), "nothing would be clipped"
        total = torch.minimum(torch.maximum(total, weight / 1.02), weight * 1.02)
    expected = num[..., : table.values.shape[2]] @ table.values.double().repeat_interleave(group, 1) / total
    torch.testing.assert_close(seen["out"].double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4)
