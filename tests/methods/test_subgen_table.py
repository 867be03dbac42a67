"""SubGen in a slot table: one structure however tokens arrive, rows that do not know each other, budget and bytes."""

from __future__ import annotations

import pytest
import torch

from kvsketch import CompressedCache
from kvsketch.methods.subgen.slots import exact_until, layout_of, state_of
from kvsketch.slots import NEG_INF, LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import also, generate
from tests.methods.subgen_tables import DEVICE, SIZE, feed, read, subgen, tokens

CHUNKS = {"chunked": [60, 50, 40], "decoded": [20] + [1] * 130, "mixed": [70, 1, 1, 1, 27, 1, 1, 48]}


TWO_SUMS = "normalizer=clipped:delta=7"
SETTINGS = {
    "self": "",
    "self_mixed": "sampling=mixed",
    "absorb": TWO_SUMS,
    "absorb_mixed": f"{TWO_SUMS}:sampling=mixed",
    "double": f"{TWO_SUMS}:policy=double",
    "grow": f"{TWO_SUMS}:policy=grow",
}


@pytest.mark.parametrize(
    ("chunks", "setting"),
    [
        *((chunks, setting) for chunks in ("chunked", "mixed") for setting in SETTINGS),
        ("decoded", "self"),
        ("decoded", "absorb_mixed"),
        *also(*(("decoded", setting) for setting in SETTINGS if setting not in ("self", "absorb_mixed"))),
    ],
)
def test_however_the_tokens_arrive_the_table_is_the_same(chunks: str, setting: str) -> None:
    """Blocked updates, chunks and the in-place step draw the same numbers: every slot holds the same token."""
    keys, values = tokens(150)
    values[:, :, 60] = 0.0
    method = subgen(f"budget=40:{SETTINGS[setting]}".rstrip(":"))
    whole, other = SlotTable(LayerContext(0, 1)), SlotTable(LayerContext(0, 1))
    feed(whole, method, keys, values, [150])
    feed(other, method, keys, values, CHUNKS[chunks])
    assert torch.equal(whole.index, other.index)
    for table in (whole, other):
        # What an empty slot still holds is of no account.
        table.keys.read.masked_fill_((table.index < 0)[..., None], 0.0)
        table.values.read.masked_fill_((table.index[:, :, : table.values.shape[2]] < 0)[..., None], 0.0)
    for name, expected in vars(state_of(whole)).items():
        if expected is not None:
            result = getattr(state_of(other), name)
            torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    state = state_of(whole)
    for counted in (state.folded, state.counts.sum(-1) if method.normalizer == "clipped" else None):
        assert counted is None or int(counted[0, 0]) == 150 - 4 - 10, "sinks and window stay out"


@pytest.mark.parametrize(
    "setting", ["budget=40", "budget=30%", "budget=40:normalizer=clipped", "budget=30%:sampling=mixed"]
)
def test_a_row_does_the_same_alone_and_beside_longer_ones(setting: str) -> None:
    """Rows exceed their budgets at different steps; until then each keeps everything."""
    lengths, steps = [90, 30, 12], 50
    method = subgen(setting)
    keys, values = tokens(90 + steps, batch=3)
    together = SlotTable(LayerContext(0, 1))
    together.append(keys[:, :, :90], values[:, :, :90])
    together.padding = torch.tensor([90 - n for n in lengths], device=DEVICE)
    together.forward.scale = SIZE**-0.5
    method.compress(together, keys)
    alone = []
    for row, length in enumerate(lengths):
        table = SlotTable(LayerContext(0, 1))
        feed(table, method, keys[row : row + 1, :, 90 - length :], values[row : row + 1, :, 90 - length :], [length])
        alone.append(table)
    for step in range(90, 90 + steps):
        new = slice(step, step + 1)
        due = method.maintenance_due(together)
        before = together.state.plan
        feed(together, method, keys[:, :, new], values[:, :, new], [1])
        assert due == (before is not together.state.plan), "a rewrite is announced, and nothing else is"
        out = read(together, keys[:, :, new])
        for row, table in enumerate(alone):
            feed(table, method, keys[row : row + 1, :, new], values[row : row + 1, :, new], [1])
            expected = read(table, keys[row : row + 1, :, new])
            torch.testing.assert_close(out[row : row + 1], expected, atol=1e-4, rtol=1e-4)
        assert together.stored() <= method.budget_tokens(together)


def test_a_table_given_its_shape_early_ends_as_the_one_that_was_not() -> None:
    keys, values = tokens(80)
    method = subgen("budget=40")
    early, late = SlotTable(LayerContext(0, 1)), SlotTable(LayerContext(0, 1))
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


@pytest.mark.parametrize("normalizer", ["clipped", "self", "self:sampling=mixed"])
def test_budget_is_a_promise_for_every_size(normalizer: str) -> None:
    keys, values = tokens(70)
    for budget in [*range(7, 20), 26, 33, 50]:
        method = subgen(f"budget={budget}:sinks=2:normalizer={normalizer}")
        plan = method.plan(budget)
        total = plan.sinks + plan.recent + plan.samples + plan.clusters * (plan.per_cluster + 1)
        assert total <= budget <= total + plan.per_cluster
        table = SlotTable(LayerContext(0, 1))
        feed(table, method, keys, values, [60] + [1] * 10)
        assert table.stored() <= budget
        assert {0, 1} <= set(table.index[0, 0].tolist())


def test_each_sum_has_half_of_what_the_exact_tokens_leave() -> None:
    """Of 900 slots: 26 clusters of 16 keys and a representative, and samples."""
    plan = subgen("budget=1000:sinks=4:recent=96:normalizer=clipped").plan(1000)
    assert (plan.samples, plan.clusters, plan.per_cluster) == (900 - 26 * 17, 26, 16)


def test_the_seeds_of_the_method_and_of_the_cache_are_added() -> None:
    (keys, values), held = tokens(60), []
    for own, given in ((0, 1), (1, 0), (0, 0)):
        table = SlotTable(LayerContext(0, 1, seed=given))
        feed(table, subgen(f"budget=40:seed={own}"), keys, values, [60])
        held.append(table.index)
    assert torch.equal(held[0], held[1]) and not torch.equal(held[0], held[2])


@pytest.mark.parametrize("share", ["3%", "10%", "25%"])
def test_shares_follow_the_prompt_as_it_grows(share: str) -> None:
    keys, values = tokens(200)
    method = subgen(f"budget={share}:normalizer=clipped")
    table = SlotTable(LayerContext(0, 1))
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


@pytest.mark.parametrize("budget", [1024, 4096])
@pytest.mark.parametrize("normalizer", ["clipped", "self"])
def test_bytes_are_those_of_the_formula(budget: int, normalizer: str) -> None:
    """e [(m (t + 1) d + (s + sinks + recent + 1) (d + dv)] + 12 per slot + 4 (m + s), within 2%, at 8B shapes."""
    method, table = subgen(f"budget={budget}:normalizer={normalizer}"), SlotTable(LayerContext(0, 1))
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
    if normalizer == "clipped":
        assert measured < dense * budget / (budget + 60), "a key without a value costs half a slot"


def test_policies_under_pressure() -> None:
    """Far keys keep coming: absorb and double stay within the budget, grow opens a cluster for each."""
    keys, values = tokens(120)
    result = {}
    for policy in ("absorb", "double", "grow"):
        table = SlotTable(LayerContext(0, 1))
        feed(table, subgen(f"budget=40:normalizer=clipped:policy={policy}:delta=0.01"), keys, values, [60] + [1] * 60)
        result[policy] = table
        assert int(state_of(table).counts[0, 0].sum()) == 120 - 4 - 10
    assert result["absorb"].stored() <= 40
    assert result["double"].stored() <= 40
    assert result["grow"].stored() > 120
    assert (state_of(result["absorb"]).delta == 0.01).all()
    assert (state_of(result["double"]).delta > 0.1).all()
    assert subgen("normalizer=clipped:policy=grow").maintenance_due(result["grow"])


@pytest.mark.parametrize(
    "setting",
    [
        "normalizer=clipped:policy=double",
        "normalizer=clipped:policy=grow",
        "normalizer=clipped:rho=4",
        "normalizer=self",
        "normalizer=paper",
        "normalizer=paper:s=4:t=1",
        "sampling=mixed",
    ],
)
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


def test_a_share_that_leaves_no_room_keeps_sinks_and_window() -> None:
    keys, values = tokens(102)
    table = SlotTable(LayerContext(0, 1))
    feed(table, subgen("budget=4%:sinks=2:normalizer=clipped"), keys, values, [100, 1, 1])
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
        ("sampling=keys", "norms or mixed"),
        ("budget=16:recent=11:normalizer=clipped", "larger budget"),
        ("budget=100:s=90", "larger budget"),
        ("budget=100:s=20:t=8:clusters=9:normalizer=clipped", "larger budget"),
    ],
)
def test_bad_settings_name_the_choices(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        subgen(text)
