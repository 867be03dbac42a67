"""SubGen in a slot table: one structure however tokens arrive, rows that do not know each other, budget and bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
import zoo
from common import generate
from kvsketch import CompressedCache, ops
from kvsketch.methods import SubGen
from kvsketch.methods.subgen_slots import exact_until, layout_of, state_of
from kvsketch.slots import NEG_INF, SlotTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 16


def tokens(count: int, heads: int = 2, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, heads, count, SIZE, generator=generator) for _ in range(2))
    return (keys * 1.5).to(DEVICE), values.to(DEVICE)


def feed(table: SlotTable, method: SubGen, keys: Tensor, values: Tensor, chunks: list[int]) -> None:
    start = 0
    for chunk in chunks:
        table.append(keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
        table.scale = SIZE**-0.5
        method.compress(table, keys[:, :, start : start + chunk])
        start += chunk


def read(table: SlotTable, query: Tensor, clip: float | None = None) -> Tensor:
    num = table.log_den if table.log_num is None else table.log_num
    return ops.weighted_attention(
        query, table.key_slots(), table.value_slots(), num, table.log_den, table.scale, clip=clip
    )


def subgen(text: str) -> SubGen:
    method = kvsketch.parse_method("subgen:" + text)
    assert isinstance(method, SubGen)
    return method


CHUNKS = {"chunked": [60, 50, 40], "decoded": [20] + [1] * 130, "mixed": [70, 1, 1, 1, 27, 1, 1, 48]}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("policy", ["absorb", "double", "grow"])
def test_however_the_tokens_arrive_the_table_is_the_same(chunks: str, policy: str) -> None:
    """Blocked updates, chunks and the in-place step draw the same numbers: every slot holds the same token."""
    keys, values = tokens(150)
    method = subgen(f"budget=40:policy={policy}")
    whole, other = SlotTable(0, 1), SlotTable(0, 1)
    feed(whole, method, keys, values, [150])
    feed(other, method, keys, values, CHUNKS[chunks])
    assert torch.equal(whole.index, other.index)
    for table in (whole, other):
        # What an empty slot still holds is of no account.
        table.keys.masked_fill_((table.index < 0)[..., None], 0.0)
        table.values.masked_fill_((table.index[:, :, : table.values.shape[2]] < 0)[..., None], 0.0)
    for name, expected in vars(state_of(whole)).items():
        if expected is not None:
            found = getattr(state_of(other), name)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert int(state_of(whole).counts.sum(-1)[0, 0]) == 150 - 4 - 10, "sinks and window stay out"


@pytest.mark.parametrize("budget", ["40", "30%"])
def test_a_row_does_the_same_alone_and_beside_longer_ones(budget: str) -> None:
    """Rows exceed their budgets at different steps; until then each keeps everything."""
    lengths, steps = [90, 30, 12], 50
    method = subgen(f"budget={budget}")
    keys, values = tokens(90 + steps, batch=3)
    together = SlotTable(0, 1)
    together.append(keys[:, :, :90], values[:, :, :90])
    together.padding = torch.tensor([90 - n for n in lengths], device=DEVICE)
    together.scale = SIZE**-0.5
    method.compress(together, keys)
    alone = []
    for row, length in enumerate(lengths):
        table = SlotTable(0, 1)
        feed(table, method, keys[row : row + 1, :, 90 - length :], values[row : row + 1, :, 90 - length :], [length])
        alone.append(table)
    for step in range(90, 90 + steps):
        new = slice(step, step + 1)
        due = method.maintenance_due(together)
        before = together.keys.data_ptr()
        feed(together, method, keys[:, :, new], values[:, :, new], [1])
        assert due == (before != together.keys.data_ptr()), "a rewrite is announced, and nothing else is"
        out = read(together, keys[:, :, new])
        for row, table in enumerate(alone):
            feed(table, method, keys[row : row + 1, :, new], values[row : row + 1, :, new], [1])
            expected = read(table, keys[row : row + 1, :, new])
            torch.testing.assert_close(out[row : row + 1], expected, atol=1e-4, rtol=1e-4)
        assert together.stored() <= method.budget_tokens(together)


def test_a_table_given_its_shape_early_ends_as_the_one_that_was_not() -> None:
    keys, values = tokens(80)
    method = subgen("budget=40")
    early, late = SlotTable(0, 1), SlotTable(0, 1)
    feed(late, method, keys, values, [20] + [1] * 60)
    feed(early, method, keys, values, [20])
    method.bound(early, 80)
    assert not early.exact
    shape = early.keys.shape
    feed(early, method, keys[:, :, 20:40], values[:, :, 20:40], [1] * 20)
    assert early.keys.shape == shape
    assert early.stored() == 40
    assert method.maintenance_due(early)
    feed(early, method, keys[:, :, 40:], values[:, :, 40:], [1] * 40)
    assert not method.maintenance_due(early)
    assert torch.equal(early.index, late.index)


@pytest.mark.parametrize("normalizer", ["clipped", "self"])
def test_budget_is_a_promise_for_every_size(normalizer: str) -> None:
    keys, values = tokens(70)
    for budget in [*range(7, 34), 50]:
        method = subgen(f"budget={budget}:sinks=2:normalizer={normalizer}")
        plan = method.plan(budget)
        total = plan.sinks + plan.recent + plan.samples + plan.clusters * (plan.per_cluster + 1)
        assert total <= budget <= total + plan.per_cluster
        table = SlotTable(0, 1)
        feed(table, method, keys, values, [60] + [1] * 10)
        assert table.stored() <= budget
        assert {0, 1} <= set(table.index[0, 0].tolist())


@pytest.mark.parametrize("share", ["3%", "10%", "25%"])
def test_shares_follow_the_prompt_as_it_grows(share: str) -> None:
    keys, values = tokens(200)
    method = subgen(f"budget={share}")
    table = SlotTable(0, 1)
    for chunk in ([20], [60], [1] * 5, [115]):
        done = table.seen
        feed(table, method, keys[:, :, done:], values[:, :, done:], chunk)
        assert table.stored() <= method.budget_tokens(table)
        state, plan = state_of(table), method.plan(method.budget_tokens(table))
        middle = int(state.counts.sum(-1).max())
        assert (state.counts.sum(-1) == middle).all()
        if share == "25%":
            # Tokens are in the window or in the structure, but for those that a smaller window let go.
            assert 0 <= table.seen - plan.sinks - middle <= plan.recent
        assert read(table, keys[:, :, :1]).isfinite().all()


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


@pytest.mark.parametrize("budget", [1024, 4096])
def test_bytes_are_those_of_the_formula(budget: int) -> None:
    """e [(m (t + 1) d + (s + sinks + recent + 1) (d + dv)] + 12 per slot + 4 (m + s), within 2%, at 8B shapes."""
    method, table = subgen(f"budget={budget}"), SlotTable(0, 1)
    size, heads, element = 128, 2, 2
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(1, heads, budget + 60, size, generator=generator).to(DEVICE, torch.bfloat16) for _ in "kv"
    )
    feed(table, method, keys, values, [budget + 60])
    plan = method.plan(budget)
    samples, clusters = plan.samples, plan.clusters
    exact = plan.sinks + plan.recent + 1
    paper = element * (clusters * (plan.per_cluster + 1) * size + samples * 2 * size) + 4 * (clusters + samples)
    window = element * exact * 2 * size
    slots = 12 * (exact + samples + clusters * plan.per_cluster)
    measured = sum(t.numel() * t.element_size() for t in table.tensors()) / heads
    assert abs(measured / (paper + window + slots) - 1) < 0.02
    dense = element * (budget + 60) * 2 * size
    assert measured < dense * budget / (budget + 60), "a key without a value costs half a slot"


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


def test_policies_under_pressure() -> None:
    """Far keys keep coming: absorb and double stay within the budget, grow opens a cluster for each."""
    keys, values = tokens(200)
    found = {}
    for policy in ("absorb", "double", "grow"):
        table = SlotTable(0, 1)
        feed(table, subgen(f"budget=40:policy={policy}:delta=0.01"), keys, values, [100] + [1] * 100)
        found[policy] = table
        assert int(state_of(table).counts[0, 0].sum()) == 200 - 4 - 10
    assert found["absorb"].stored() <= 40
    assert found["double"].stored() <= 40
    assert found["grow"].stored() > 200
    assert (state_of(found["absorb"]).delta == 0.01).all()
    assert (state_of(found["double"]).delta > 0.1).all()
    assert subgen("policy=grow").maintenance_due(found["grow"])


def test_values_of_zero_read_as_zero() -> None:
    keys, values = tokens(100)
    table = SlotTable(0, 1)
    feed(table, subgen("budget=30"), keys, values * 0, [90] + [1] * 10)
    assert (read(table, keys[:, :, :1]) == 0).all()


@pytest.mark.parametrize("setting", ["policy=double", "policy=grow", "normalizer=self", "normalizer=paper", "s=4:t=1"])
def test_settings_generate_with_padding(setting: str) -> None:
    model = zoo.build("llama")
    ids = zoo.tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    cache = CompressedCache(model, f"subgen:budget=20:sinks=2:{setting}")
    out = generate(model, ids, cache, attention_mask=mask)
    assert all(logits.isfinite().all() for logits in out.logits)
    table = cache.slot_layers[0].table
    assert "grow" in setting or cache.tokens_stored <= 20
    assert exact_until(table) == [1 << 62] * 2
    assert (table.index[1, :, : layout_of(table).exact] != 0).all(), "padding is not stored"


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("normalizer", ["clipped", "paper", "self"])
def test_a_model_reads_both_sums_of_a_bounded_table(new: int, normalizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the output projection is the ratio of the two sums over the slots each query may see, clipped."""
    model, ids = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, 60 + new)
    cache = CompressedCache(model, f"subgen:budget=24:sinks=2:rho=1.3:normalizer={normalizer}")
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
        assert ((weight / total).log().abs() > math.log(1.3)).any(), "nothing would be clipped"
        total = torch.minimum(torch.maximum(total, weight / 1.3), weight * 1.3)
    expected = num[..., : table.values.shape[2]] @ table.values.double().repeat_interleave(group, 1) / total
    torch.testing.assert_close(seen["out"].double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4)


def test_a_share_that_leaves_no_room_keeps_sinks_and_window() -> None:
    keys, values = tokens(102)
    table = SlotTable(0, 1)
    feed(table, subgen("budget=4%:sinks=2"), keys, values, [100, 1, 1])
    assert table.stored() <= 4
    assert set(table.index[0, 0].tolist()) - {-1} == {0, 1, 100, 101}
    assert (table.log_den > NEG_INF).sum(-1).max() == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("policy=drop", "grow, absorb, double"),
        ("normalizer=none", "paper, self, clipped"),
        ("form=kcenter", "method kcenter"),
        ("rho=0.5", "1 or more"),
        ("s=0", "above 0"),
        ("delta=-1", "0 or more"),
        ("budget=16:recent=11", "larger budget"),
        ("budget=100:s=90", "larger budget"),
        ("budget=100:s=20:t=8:clusters=9", "larger budget"),
    ],
)
def test_bad_settings_name_the_choices(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        subgen(text)
