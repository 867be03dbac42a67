"""BalanceKV as a stream: value buckets, two structures, key-only slots, and the promises every bounded method makes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, ops
from kvsketch.methods import BalanceKV, parse_method
from kvsketch.methods.balancekv.stream import ZERO_VALUE, first_batch, shares
from kvsketch.slots import NEG_INF, LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import also, generate, padded

LN2 = math.log(2.0)
SCALE = 0.25
TEXT = "balancekv:form=stream:budget=16:sinks=2:recent=4"


def tokens(count: int, seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values whose norms spread over several buckets, two of them zero, and queries."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, count, size, generator=generator) for _ in range(2))
    values = values * 4 ** torch.randn(2, 2, count, 1, generator=generator)
    values[:, :, -20:-18] = 0
    return 0.5 * keys, values, 0.5 * torch.randn(2, 4, count, size, generator=generator)


def stream(method: BalanceKV, count: int, chunks: list[int] | None = None) -> SlotTable:
    keys, values, queries = tokens(count)
    table, start = SlotTable(LayerContext(0, 1)), 0
    table.forward.scale = SCALE
    for chunk in chunks or [count]:
        part = slice(start, start + chunk)
        table.append(keys[:, :, part], values[:, :, part])
        method.compress(table, queries[:, :, part])
        start += chunk
    return table


def contents(table: SlotTable, weights: Tensor) -> list[list[tuple[int, int]]]:
    """(logical index, level) of the tokens in one sum, for each row and head."""
    result = []
    for index, weight in zip(table.index_slots().flatten(0, 1), weights.flatten(0, 1), strict=True):
        used = weight > NEG_INF
        pairs = zip(index[used].tolist(), (weight[used] / LN2).round().int().tolist(), strict=True)
        result.append(sorted(pairs))
    return result


# structure


@pytest.mark.parametrize("form", ["stream", "paper"])
def test_buckets_are_dyadic_disjoint_and_total(form: str) -> None:
    table = stream(BalanceKV(budget=120, form=form, block=32), 700)
    assert table.log_num is not None and table.values is not None
    bucket = table.state.bucket.long()
    index = table.index_slots()
    entered = bucket > 0
    middle = (index >= 15) & (index < 700 - 15)
    assert torch.equal(entered, middle), "every token of the middle has one bucket, no other has"
    count = table.values.shape[2]
    norm = table.value_slots().norm(dim=-1)
    real = entered[..., :count] & (norm > 0)
    lower = 2.0 ** (bucket[..., :count] - 32)
    assert ((lower <= norm) & (norm < 2 * lower))[real].all()
    assert (table.log_num[bucket == ZERO_VALUE] == NEG_INF).all(), "no value, no numerator"
    assert form == "stream" or int((bucket == ZERO_VALUE).sum()) == 8, "but still in the denominator"
    arrived = table.state.arrived
    assert (arrived.sum(-1) == 700 - 30).all() and (arrived[..., ZERO_VALUE] == 2).all()


def test_sets_hold_at_most_a_batch_and_samples_differ() -> None:
    table = stream(BalanceKV(form="paper", block=32, sinks=4, recent=8), 1500)
    assert table.log_num is not None and table.log_den is not None
    level = (table.log_num / LN2).round()
    bucket = table.state.bucket.long()
    for row in range(2):
        for head in range(2):
            for number in range(1, ZERO_VALUE):
                sizes = torch.bincount(level[row, head][(bucket[row, head] == number) & (level[row, head] >= 0)].long())
                assert (sizes <= 32).all()
    numerator, denominator = contents(table, table.log_num), contents(table, table.log_den)
    assert numerator != denominator
    assert table.values is not None and table.values.shape[2] < table.length, "some slots carry a key only"


def test_a_prompt_at_once_is_a_prompt_token_by_token() -> None:
    """The paper's form at a time when the window has just passed a multiple of t."""
    method = BalanceKV(form="paper", block=16, sinks=4, recent=8)
    count = 12 + 16 * 13
    once = stream(method, count)
    for chunks in ([1] * count, [50, 1, 1, 1, 60, *[1] * (count - 113)]):
        slowly = stream(method, count, chunks)
        assert once.log_num is not None and slowly.log_num is not None
        assert once.log_den is not None and slowly.log_den is not None
        assert contents(once, once.log_num) == contents(slowly, slowly.log_num)
        assert contents(once, once.log_den) == contents(slowly, slowly.log_den)


def test_both_sums_are_close_to_the_exact_ones() -> None:
    """Unit keys and values of one norm, the theorem's setting: relative errors of a few percent at t = 128."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.nn.functional.normalize(torch.randn(1, 1, 4000, 16, generator=generator), dim=-1) for _ in range(2)
    )
    values = values + 1.0
    queries = torch.nn.functional.normalize(torch.randn(1, 1, 50, 16, generator=generator), dim=-1)
    table = SlotTable(LayerContext(0, 1))
    table.forward.scale = SCALE
    table.append(keys, values)
    BalanceKV(form="paper", block=128, sinks=4, recent=8).compress(table, queries)
    weights = (SCALE * queries @ table.key_slots().mT).exp()
    exact = (SCALE * queries @ keys.mT).exp()
    assert table.log_num is not None and table.log_den is not None and table.values is not None
    count = table.values.shape[2]
    num = (weights[..., :count] * table.log_num[:, :, None, :count].exp()) @ table.values.read
    den = (weights * table.log_den[:, :, None].exp()).sum(-1)
    assert ((num - exact @ values).norm(dim=-1) / (exact @ values).norm(dim=-1)).mean() < 0.05
    assert ((den - exact.sum(-1)).abs() / exact.sum(-1)).mean() < 0.05
    assert table.stored() < 2500


@pytest.mark.parametrize(
    ("form", "steps"), [*also(("stream:budget=300", 0)), ("stream:budget=300", 100), ("paper:block=64", 100)]
)
def test_both_sums_represent_every_token(form: str, steps: int) -> None:
    """The sum of the weights and, over 4 heads and 2 seeds, the means of both sums: those of all tokens in a budget,
    and as published, where the smaller class stays, a few percent below.

    Of 1,500 tokens at most some 300 are stored: without merging, with merging of the first level only or without
    weights a fifth of the mass is left.
    """
    generator = torch.Generator().manual_seed(0)
    count = 1500 + steps
    keys, values, queries = (
        torch.nn.functional.normalize(torch.randn(1, 4, n, 16, generator=generator), dim=-1) for n in (count, count, 20)
    )
    values = values + 1.0
    exact = (SCALE * queries @ keys.mT).exp()
    num_ratios, den_ratios = [], []
    for seed in range(2):
        table, method = SlotTable(LayerContext(0, 1, seed)), parse_method(f"balancekv:form={form}:sinks=4:recent=8")
        table.forward.scale = SCALE
        for start, end in [(0, 1500), *((i, i + 1) for i in range(1500, count))]:
            table.append(keys[:, :, start:end], values[:, :, start:end])
            method.compress(table, queries[:, :, : min(20, end - start)])
        assert table.log_num is not None and table.log_den is not None and table.values is not None
        assert int((table.log_num > NEG_INF).sum(-1).max()) < 400
        for log_weights in (table.log_num, table.log_den):
            mass = log_weights.exp().sum(-1) / count
            least = 0.7 if form.startswith("paper") else 0.999
            assert (mass > least).all() and (mass < 1.02).all() and float(mass.mean()) > 0.85
            assert (log_weights.amax(-1) / LN2).round().min() >= 3, "halves of halves of halves"
        terms, held = (SCALE * queries @ table.key_slots().mT).exp(), table.values.shape[2]
        num = (terms[..., :held] * table.log_num[:, :, None, :held].exp()) @ table.values.read
        den = (terms * table.log_den[:, :, None].exp()).sum(-1)
        num_ratios.append((num * (exact @ values)).sum(-1) / (exact @ values).square().sum(-1))
        den_ratios.append(den / exact.sum(-1))
    for ratios in (torch.stack(num_ratios), torch.stack(den_ratios)):
        assert 0.87 < float(ratios.mean()) < 1.02
        assert float(ratios.std()) < 0.08


@pytest.mark.parametrize(("budget", "times", "steps"), [(128, 0.0, 60), (256, 4.0, 60), *also((256, 4.0, 300))])
def test_no_weight_is_lost_with_keys_as_models_have_them(budget: int, times: float, steps: int) -> None:
    """Long keys in bfloat16 with a large part in common, values of several norms, and decoded tokens.

    The walk's signs are nearly coins there: sets of a few tokens often have one class alone, and where the smaller one
    stayed, two thirds of both sums were gone after the prompt and nine tenths after 300 decoded tokens.
    """
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(1, 2, 1324, 64, generator=generator).bfloat16() for _ in range(3))
    keys = keys + times * torch.randn(1, 2, 1, 64, generator=generator).bfloat16()
    values = values * 2.0 ** (0.5 * torch.randn(1, 2, 1324, 1, generator=generator)).bfloat16()
    table, method = SlotTable(LayerContext(0, 1)), parse_method(f"balancekv:form=stream:budget={budget}")
    table.forward.scale = 64**-0.5
    for start, end in [(0, 1024), *((i, i + 1) for i in range(1024, 1024 + steps))]:
        table.append(keys[:, :, start:end], values[:, :, start:end])
        method.compress(table, queries[:, :, start:end])
        if end in (1024, 1024 + steps):
            assert table.log_num is not None and table.log_den is not None
            for log_weights in (table.log_num, table.log_den):
                torch.testing.assert_close(log_weights.exp().sum(-1), torch.full((1, 2), float(end)))


def test_negligible_buckets_go_and_change_nothing_that_matters() -> None:
    """Values of norm 1e-6 beside values of norm 1: dropped at a large epsilon, and the output moves by less than it."""
    generator = torch.Generator().manual_seed(0)
    keys = 0.1 * torch.randn(1, 1, 400, 8, generator=generator)
    values = torch.nn.functional.normalize(torch.randn(1, 1, 400, 8, generator=generator), dim=-1)
    values[:, :, ::2] *= 1e-6
    outputs, numbers = [], []
    for epsilon in (0.5, 1e-9):
        table = SlotTable(LayerContext(0, 1))
        table.forward.scale = SCALE
        table.append(keys, values)
        BalanceKV(form="paper", block=64, sinks=4, recent=8, epsilon=epsilon).compress(table, keys)
        outputs.append(
            ops.weighted_attention(keys, table.key_slots(), table.value_slots(), table.log_num, table.log_den, SCALE)
        )
        assert table.log_num is not None
        numbers.append(int((table.log_num > NEG_INF).sum()))
    assert numbers[0] < numbers[1]
    exact = torch.softmax(SCALE * keys @ keys.mT, -1)
    bound = 0.5 * exact.norm(dim=-1) * values.norm()
    assert ((outputs[0] - outputs[1]).norm(dim=-1) < bound).all()
    assert (outputs[0] - outputs[1]).norm(dim=-1).max() < 1e-5


def halved(shift: float = 0.0, scale: float = SCALE, **options: Any) -> list[list[tuple[int, int]]]:
    """What both sums hold of keys that all lie `shift` away in every coordinate.

    Keys are eighths and batches powers of two: their means are exact.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-8, 9, (1, 2, 300, 16), generator=generator) / 8 + shift
    values = torch.nn.functional.normalize(torch.randn(1, 2, 300, 16, generator=generator), dim=-1)
    table = SlotTable(LayerContext(0, 1))
    table.forward.scale = scale
    table.append(keys, values)
    BalanceKV(sinks=4, recent=8, **options).compress(table, keys)
    assert table.log_num is not None and table.log_den is not None
    return contents(table, table.log_num) + contents(table, table.log_den)


@pytest.mark.parametrize("form", [{"form": "stream", "budget": 80}, {"form": "paper", "block": 32}])
def test_what_all_keys_have_in_common_is_taken_off_only_where_centered(form: dict[str, Any]) -> None:
    """exp(scale <k - mean, l - mean>) does not know where the keys lie."""
    assert halved(shift=2.0, **form) == halved(**form)
    assert halved(shift=2.0, center=False, **form) != halved(center=False, **form)


@pytest.mark.parametrize("form", [{"form": "stream", "budget": 80}, {"form": "paper", "block": 32}])
def test_a_temperature_is_another_scale_of_the_walk(form: dict[str, Any]) -> None:
    """It balances exp(temp scale <k, l>)."""
    assert halved(temp=0.25, scale=1.0, **form) == halved(temp=1.0, scale=0.25, **form) != halved(scale=1.0, **form)


def test_theory_preset_runs_without_failing() -> None:
    method = BalanceKV(form="stream", budget=150, c="theory", sinks=4, recent=8)
    assert method.recipe.c > 100 and method.recipe.on_fail == "raise"
    assert stream(method, 600).stored() <= 150


@pytest.mark.parametrize("form", ["stream:budget=24", "paper:block=8"])
def test_rho_bounds_the_quotient_of_the_two_sums(form: str) -> None:
    """rho=1: the numerator's own weights divide it, at every reading of the cache; rho=none: the denominator's do."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    logits = {}
    for rho in ("1", "none", "own"):
        cache = CompressedCache(model, f"balancekv:form={form}:sinks=2:recent=4:rho={'none' if rho == 'own' else rho}")
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for layer in cache.slot_layers:
                assert layer.table.log_num is not None and not torch.equal(layer.table.log_num, layer.table.log_den)
                if rho == "own":
                    layer.table.parts["log_den"] = layer.table.log_num.clone()
            # One token reads the slots by one kernel, a chunk of them by another.
            chunk = copy.deepcopy(cache)
            logits[rho] = [
                model(zoo.tokens(1, n, seed=1), past_key_values=c).logits[0, 0] for c, n in ((cache, 1), (chunk, 5))
            ]
    for clipped, plain, own in zip(*logits.values(), strict=True):
        torch.testing.assert_close(clipped, own, atol=1e-5, rtol=1e-5)
        assert (plain - own).abs().max() > 1e-3
    assert BalanceKV(form="stream").clip == pytest.approx(math.log(4.0)) and BalanceKV().clip is None


# promises


@pytest.mark.parametrize(("budget", "walk"), [(16, "auto"), (60, "greedy"), (200, "auto")])
def test_the_budget_holds_at_every_token_in_place(budget: int, walk: str) -> None:
    method = BalanceKV(form="stream", budget=budget, sinks=2, recent=4, walk=walk)
    table = stream(method, 500)
    row = method.rows(table)[0]
    values, keys_only = shares(row)
    assert values + keys_only == budget and first_batch(row) <= values
    assert table.length == budget + 1 and table.value_slots().shape[2] == values + 1
    addresses = [tensor.data_ptr() for tensor in table.tensors()]
    for step in range(40):
        announced = method.maintenance_due(table)
        stored = table.stored()
        keys, new_values, queries = tokens(1, seed=step + 1)
        table.append(keys, new_values + 0.1)
        method.compress(table, queries)
        assert table.stored() <= budget
        assert announced or table.stored() == stored + 1
        assert addresses == [tensor.data_ptr() for tensor in table.tensors()]
        for held in table.index_slots().flatten(0, 1).tolist():
            assert {0, 1, *range(table.seen - 4, table.seen)} <= set(held)


@pytest.mark.parametrize(
    "method",
    [
        TEXT,
        *also(TEXT.replace("budget=16", "budget=40%")),
        "balancekv:form=paper:block=8:sinks=2:recent=4",
    ],
)
def test_a_row_alone_equals_that_row_in_a_left_padded_batch(method: str) -> None:
    """Also while decoding, where each row completes a batch, or exceeds its budget, at another step than the others."""
    model = zoo.build("qwen2")
    lengths = [40, 29, 13]
    rows = [zoo.tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(r, (40 - r.shape[1], 0)) for r in rows])
    batch, mask = padded(batch, [40 - n for n in lengths])
    steps = {"max_new_tokens": 9}
    together = generate(model, batch, CompressedCache(model, method), attention_mask=mask, **steps)
    for i, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method), **steps)
        assert together.sequences[i, 40:].tolist() == alone.sequences[0, row.shape[1] :].tolist()
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["stream", "paper:block=8"])
def test_beams_and_copies(form: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    text = TEXT.replace("form=stream", f"form={form}")
    beams = {"num_beams": 2, "num_return_sequences": 2, "output_scores": True, "max_new_tokens": 9}
    out = generate(model, ids, CompressedCache(model, text), **beams)
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        cache = CompressedCache(model, text)
        with torch.no_grad():
            logits = [model(ids, past_key_values=cache).logits[0, -1]]
            branch = copy.deepcopy(cache)
            for token in sequence[40:-1]:
                logits.append(model(token.view(1, 1), past_key_values=cache).logits[0, -1])
            again = model(sequence[40].view(1, 1), past_key_values=branch).logits[0, -1]
        assert torch.equal(again, logits[1])
        logprob = torch.stack(logits).log_softmax(-1).gather(1, sequence[40:, None]).sum()
        torch.testing.assert_close(logprob / (len(sequence) - 40), score, atol=1e-4, rtol=1e-4)


def test_rolled_back_drafts_and_chunks_keep_the_budget() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 6).repeat(1, 6)
    cache = CompressedCache(model, TEXT)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    assert model.generate(ids, past_key_values=cache, **options).shape[1] == 48
    assert cache.tokens_stored <= 16 and cache.tokens_seen == 47
    cache = CompressedCache(model, TEXT)
    generate(model, ids, cache, prefill_chunk_size=7)
    assert cache.tokens_stored <= 16


def test_a_table_bounded_ahead_of_time_decodes_the_same() -> None:
    method = BalanceKV(form="stream", budget=60, sinks=2, recent=8)
    early, late = stream(method, 50), stream(method, 50)
    method.bound(early, 200)
    assert not early.exact and late.exact
    for step in range(50):
        for table in (early, late):
            keys, values, queries = tokens(1, seed=step + 1)
            table.append(keys, values + 0.1)
            method.compress(table, queries)
    assert early.log_num is not None and late.log_num is not None
    assert contents(early, early.log_num) == contents(late, late.log_num)
