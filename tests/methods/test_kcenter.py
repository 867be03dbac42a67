"""k-center on plain keys: the guarantee of the greedy choice, the window that slides, counts that add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache, ops
from kvsketch.methods import KCenter
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import generate, padded

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE = 2, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def feed(table: SlotTable, method: KCenter, keys: Tensor) -> None:
    table.append(keys, keys.clone())
    method.compress(table, keys.new_zeros(keys.shape[0], 2 * keys.shape[1], *keys.shape[2:]))


def compressed(method: KCenter, keys: Tensor) -> SlotTable:
    table = SlotTable(LayerContext(0, 1))
    feed(table, method, keys)
    return table


def kept(table: SlotTable, head: int = 0, row: int = 0) -> list[int]:
    return [i for i in table.index_slots()[row, head].tolist() if i >= 0]


def planted(count: int, clusters: int, seed: int) -> tuple[Tensor, float]:
    """Keys [1, 1, count, SIZE] around far middles, and the radius of that clustering."""
    middle = 10 * normal(clusters, SIZE, seed=seed)
    label = torch.randint(clusters, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    keys = middle[label] + 0.2 * normal(count, SIZE, seed=seed + 1)
    return keys[None, None], float((keys - middle[label]).norm(dim=-1).max())


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_every_old_key_lies_within_twice_the_planted_radius(form: str) -> None:
    """The bound of the greedy choice, and of its coarse form, for the centers that the method really keeps."""
    bound = 2.0 if form == "exact" else 2.0 / 0.9
    for seed in range(5):
        keys, radius = planted(100, 12, seed)
        table = compressed(KCenter(budget=22, recent=10, form=form), keys)
        centers = [i for i in kept(table) if i < 90]
        assert len(centers) == 12 and kept(table)[12:] == list(range(90, 100))
        distance = torch.cdist(keys[0, 0, :90], keys[0, 0, centers]).amin(-1).max()
        assert float(distance) <= bound * radius
        recent = torch.cdist(keys[0, 0, :90], keys[0, 0, 78:90]).amin(-1).max()
        assert float(recent) > bound * radius, "the same number of recent tokens must fail"


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_centers_are_distinct_begin_with_the_first_token_and_are_in_order(form: str) -> None:
    keys = normal(2, HEADS, 70, SIZE)
    table = compressed(KCenter(budget=30, recent="40%", sinks=3, form=form), keys)
    other = compressed(KCenter(budget=30, recent="40%", sinks=3, form="exact" if form == "coarse" else "coarse"), keys)
    assert kept(table) != kept(other)
    for row in range(2):
        for head in range(HEADS):
            tokens = kept(table, head, row)
            assert tokens == sorted(set(tokens)) and len(tokens) == 30
            assert tokens[:3] == [0, 1, 2] and tokens[-12:] == list(range(58, 70))
            own = keys[row : row + 1, head : head + 1, :58].contiguous()
            expected = ops.farthest_first(own, 18, given=3, form=form).index
            assert tokens[:-12] == sorted(expected.flatten().tolist())


def test_a_budget_for_everything_keeps_everything() -> None:
    """k = n: no token goes, and attention over the bounded table is exact attention."""
    keys = normal(2, HEADS, 40, SIZE)
    table = SlotTable(LayerContext(0, 1))
    table.padding = torch.tensor([0, 13], device=DEVICE)
    method = KCenter(budget=39, recent=10)
    feed(table, method, keys)
    assert not table.exact and kept(table, row=1) == list(range(13, 40))
    query = normal(2, HEADS, 1, SIZE, seed=5)
    out = ops.weighted_attention(query, table.key_slots(), table.value_slots(), table.log_den, table.log_den, 1.0)
    exact = ops.weighted_attention(query, keys[:, :, 13:], keys[:, :, 13:], None, None, 1.0)
    torch.testing.assert_close(out[1], exact[1], atol=1e-5, rtol=1e-5)
    whole = SlotTable(LayerContext(0, 1))
    feed(whole, KCenter(budget=40, recent=10), keys)
    assert whole.exact


def test_a_row_whose_budget_is_shorter_than_the_window_keeps_to_it() -> None:
    """A quarter of the second row's 20 tokens are its last 5, alone and beside a longer row."""
    keys, method = normal(2, HEADS, 60, SIZE), KCenter(budget="25%", recent=10)
    table = SlotTable(LayerContext(0, 1))
    table.padding = torch.tensor([0, 40], device=DEVICE)
    feed(table, method, keys)
    assert kept(table, row=1) == list(range(55, 60)) and kept(table)[-10:] == list(range(50, 60))
    assert kept(compressed(method, keys[1:, :, 40:])) == list(range(15, 20))


def test_an_isolated_key_survives() -> None:
    keys = normal(1, 1, 200, SIZE)
    keys[0, 0, 77] += 30.0
    assert 77 in kept(compressed(KCenter(budget=6, recent=3), keys))


def test_the_window_slides_over_fixed_centers() -> None:
    keys = normal(1, HEADS, 100, SIZE)
    table = compressed(KCenter(budget=20, recent=8), keys[:, :, :60])
    centers = [kept(table, head)[:12] for head in range(HEADS)]
    addresses = [t.data_ptr() for t in table.tensors()]
    method = KCenter(budget=20, recent=8)
    for now in range(60, 100):
        feed(table, method, keys[:, :, now : now + 1])
        for head in range(HEADS):
            assert sorted(kept(table, head)) == [*centers[head], *range(now - 7, now + 1)]
    assert [t.data_ptr() for t in table.tensors()] == addresses


def test_a_short_prompt_fills_up_before_it_slides() -> None:
    keys = normal(1, 1, 60, SIZE)
    table, method = SlotTable(LayerContext(0, 1)), KCenter(budget=16, recent=6)
    feed(table, method, keys[:, :, :5])
    for now in range(5, 60):
        feed(table, method, keys[:, :, now : now + 1])
        if not table.exact:
            assert sorted(kept(table)) == [*range(10), *range(now - 5, now + 1)]
    assert table.stored() == 16


def test_without_sliding_generated_tokens_stay() -> None:
    """The papers' form, asked for by name: memory grows by what is generated, and by nothing else."""
    keys = normal(1, HEADS, 420, SIZE)
    method = KCenter(budget=20, recent=8, slide=False)
    table = compressed(method, keys[:, :, :60])
    before = [kept(table, head) for head in range(HEADS)]
    grown = 0
    for now in range(60, 420):
        due, length = method.maintenance_due(table), table.length
        feed(table, method, keys[:, :, now : now + 1])
        assert due == (table.length != length), "growing is announced, so that it is not captured"
        grown += due
        assert table.stored() == method.budget_tokens(table) == 20 + now - 59
    assert grown == 2
    for head in range(HEADS):
        assert sorted(kept(table, head)) == [*before[head], *range(60, 420)]
    feed(table, method, keys[:, :, :30])
    assert table.stored() == 20, "the next turn is compressed"


def test_a_second_turn_chooses_among_what_is_left() -> None:
    keys = normal(1, 1, 130, SIZE)
    method = KCenter(budget=20, recent=8)
    table = compressed(method, keys[:, :, :60])
    for now in range(60, 70):
        feed(table, method, keys[:, :, now : now + 1])
    left = [i for i in [*sorted(kept(table)), *range(70, 130)] if i < 122]
    feed(table, method, keys[:, :, 70:130])
    expected = ops.farthest_first(keys[:, :, left], 12).index.flatten().tolist()
    assert kept(table) == sorted(left[i] for i in expected) + list(range(122, 130))


@pytest.mark.parametrize(
    "method", ["kcenter:budget=25%", "kcenter:budget=30:recent=30%", "kcenter:budget=20:form=coarse"]
)
def test_rows_of_a_batch_choose_as_if_alone(method: str) -> None:
    """Windows and budgets that are shares follow each row's own length; a row that fits whole stays whole."""
    model = zoo.build("qwen2")
    lengths = [60, 41, 22]
    rows = [zoo.tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(row, (60 - row.shape[1], 0)) for row in rows])
    batch, mask = padded(batch, [60 - n for n in lengths])
    together = generate(model, batch, CompressedCache(model, method), attention_mask=mask)
    for i, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method))
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kcenter:weights=count", "weights=count is refused, it always means none"),
        ("kcenter:form=fast", "form=fast is not valid; use exact or coarse"),
        ("kcenter:budget=10:recent=10", "budget=10 cannot hold 1 sinks and a recent window of 10"),
        ("kcenter:slide=maybe", "is not a yes or no"),
    ],
)
def test_wrong_parameters_say_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvsketch.parse_method(text)


def test_centers_of_a_stream_without_sliding() -> None:
    """Before its last chunk a streamed prompt is longer than what was read."""
    model = zoo.build("llama")
    cache = CompressedCache(model, "kcenter:budget=24:recent=4:slide=false", prefill="stream", chunk=16)
    with torch.no_grad():
        model(zoo.tokens(1, 63), past_key_values=cache)
    assert (cache.tokens_seen, cache.tokens_stored) == (63, 24)
