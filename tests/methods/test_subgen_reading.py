"""What is read from SubGen's table: the ratio of two unbiased sums, bounded or self-normalised, and its health."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, ops
from kvsketch.methods import SubGen
from kvsketch.methods.subgen.slots import state_of
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.methods.subgen_tables import feed, read, subgen, tokens


@pytest.mark.parametrize("sampling", ["sampling=norms", "sampling=mixed"])
def test_the_two_sums_of_a_table_are_unbiased(sampling: str) -> None:
    """Mean over 600 heads that hold the same tokens; false alarm 6e-5 each."""
    keys, values = (t.expand(1, 600, -1, -1) for t in tokens(120, heads=1))
    method, table = subgen(f"budget=40:normalizer=paper:{sampling}"), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, [100] + [1] * 20)
    query = keys[:, :, :1] * 0.5
    exact = (table.forward.scale * (query @ keys.mT)).exp()[0, 0, 0]
    out, (_, log_den) = ops.weighted_attention(
        query,
        table.key_slots(),
        table.value_slots(),
        table.log_num,
        table.log_den,
        table.forward.scale,
        return_state=True,
    )
    den = log_den[0, :, 0].double().exp()
    num = out[0, :, 0, 0].double() * den
    for result, expected in ((den, exact.sum()), (num, (exact * values[0, 0, :, 0]).sum())):
        assert abs(result.mean() - expected) < 4 * result.std() / 600**0.5
        assert result.std() > 0


def test_self_normalised_output_stays_among_the_values() -> None:
    keys, values = tokens(200)
    method, table = subgen("budget=40:normalizer=self"), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, [200])
    assert table.log_num is None
    assert read(table, keys[:, :, -5:] * 3).norm(dim=-1).max() <= values.norm(dim=-1).max() * (1 + 1e-5)


def test_clipping_bounds_the_ratio_of_the_sums() -> None:
    """A heavy key that one sum holds and the other does not scales the paper's output; clipped, by rho at most."""
    keys, values = tokens(200, heads=40)
    keys[:, :, 77] *= 6.0
    query = keys[:, :, 77:78] * 0.3
    plain, clipped = subgen("budget=40:normalizer=paper"), subgen("budget=40:normalizer=clipped:rho=2")
    table = SlotTable(LayerContext(0, 1))
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
    method, table = subgen("budget=200:normalizer=clipped"), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, [150])
    assert method.health(table, keys[:, :, -1:]).abs().max() == 0
    feed(table, method, keys[:, :, 150:], values[:, :, 150:], [250])
    health = method.health(table, keys[:, :, -4:] * 0.2)
    assert 0 < health.abs().mean() < 0.3


@pytest.mark.parametrize("setting", ["normalizer=clipped", "normalizer=self", "sampling=mixed"])
def test_coalescing_changes_neither_output_nor_storage(setting: str) -> None:
    keys, values = tokens(60)
    tables = []
    for coalesce in ("true", "false"):
        tables.append(SlotTable(LayerContext(0, 1)))
        method = subgen(f"budget=50:delta=1.0:{setting}:coalesce={coalesce}")
        feed(tables[-1], method, keys, values, [51] + [1] * 9)
    once, apart = tables
    torch.testing.assert_close(read(once, keys[:, :, -2:]), read(apart, keys[:, :, -2:]), atol=1e-5, rtol=1e-4)
    assert once.stored() < apart.stored() <= 50
    assert once.keys.shape == apart.keys.shape


@pytest.mark.parametrize("setting", ["normalizer=clipped", "normalizer=self", "sampling=mixed", "sampling=mixed:s=1"])
def test_values_of_zero_read_as_zero(setting: str) -> None:
    keys, values = tokens(100)
    table = SlotTable(LayerContext(0, 1))
    feed(table, subgen(f"budget=30:{setting}"), keys, values * 0, [90] + [1] * 10)
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
    scores = table.forward.scale * queries @ table.keys.read.double().repeat_interleave(group, 1).mT  # [B, Hq, n, S]
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
    expected = num[..., : table.values.shape[2]] @ table.values.read.double().repeat_interleave(group, 1) / total
    torch.testing.assert_close(seen["out"].double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sampling", ["norms", "mixed"])
def test_self_normalised_weights_stand_for_all_tokens(sampling: str) -> None:
    """The weights of the samples add up to the tokens folded, in the mean over 600 heads. False alarm: 6e-5."""
    keys, values = (t.expand(1, 600, -1, -1) for t in tokens(150, heads=1))
    method, table = subgen(f"budget=40:sampling={sampling}"), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, [120] + [1] * 30)
    exact = table.log_den == 0
    total = table.log_den.double().exp().sum(-1)[0]
    assert int(exact.sum(-1).max()) == 4 + 10
    assert abs(total.mean() - 150) < 4 * total.std() / 600**0.5
    assert total.std() > 0
    # Without the weights the same samples stand for themselves alone.
    assert abs((table.log_den > float("-inf")).sum(-1).double().mean() - 150) > 100


def test_a_zero_value_counts_in_the_mixed_denominator() -> None:
    """A third of the values is zero: drawn by norms alone, their keys are missing from the denominator."""
    keys, values = (t.clone() for t in tokens(150, heads=1))
    values[:, :, ::3] = 0.0
    keys, values = (t.expand(1, 600, -1, -1) for t in (keys, values))
    means = {}
    for sampling in ("norms", "mixed"):
        table = SlotTable(LayerContext(0, 1))
        feed(table, subgen(f"budget=40:sampling={sampling}"), keys, values, [150])
        total = table.log_den.double().exp().sum(-1)[0]
        means[sampling] = (float(total.mean()), 4 * float(total.std()) / 600**0.5)
    assert abs(means["mixed"][0] - 150) < means["mixed"][1]
    assert means["norms"][0] < 120


def test_clusters_cover_a_prompt_whose_keys_drift() -> None:
    """delta comes from all keys of the prompt, so no key lies outside every cluster, and none is absorbed for want of
    room; a delta of the first keys would leave most of them outside.
    """
    keys, values = tokens(600, heads=4)
    keys = keys + torch.linspace(0, 6, 600)[:, None].to(keys)
    method, table = subgen("budget=80:normalizer=clipped"), SlotTable(LayerContext(0, 1))
    feed(table, method, keys, values, [600])
    state = state_of(table)
    middle = keys[:, :, 4:580]
    distance = torch.cdist(middle, state.representatives.float())
    distance = distance.masked_fill((state.counts == 0)[:, :, None], float("inf")).amin(-1)
    assert (distance > state.delta[..., None]).float().mean() < 0.05
    first = ops.farthest_first(keys[:, :, 4:81], state.counts.shape[2]).radius
    assert (distance > first[..., None]).float().mean() > 0.2, "the check must tell the two apart"


def test_rho_is_what_bounds_the_output_of_a_model() -> None:
    """Two values of rho, one cache each: the logits differ, and with a wide one they are those of the plain ratio."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    logits = {}
    for setting in ("clipped:rho=1.02", "clipped:rho=1.5", "clipped:rho=1e30", "paper"):
        cache = CompressedCache(model, f"subgen:budget=24:sinks=2:normalizer={setting}")
        with torch.no_grad():
            model(ids[:, :56], past_key_values=cache)
            # Several tokens at once, and one: two ways of reading.
            logits[setting] = [model(ids[:, i:j], past_key_values=cache).logits for i, j in ((56, 59), (59, 60))]
    for place in range(2):
        several = [logits[name][place] for name in logits]
        torch.testing.assert_close(several[2], several[3])
        assert not torch.allclose(several[0], several[1], atol=1e-4)
        assert not torch.allclose(several[0], several[3], atol=1e-4)
