"""What every method promises, whatever it does: budget, bytes, counting, sinks, padding, beams, seeds, extreme
numbers.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import FED, generate, held, padded, require_angles, thinned, with_budget

METHODS = list(FED)
BOUNDED = [n for n, m in FED.items() if m.family in ("evict", "summarise")]
SHARED = ["snapkv:share=model", "h2o:share=layer"]  # heads of different sizes


def full_bytes(model: torch.nn.Module, ids: torch.Tensor) -> int:
    cache = CompressedCache(model, "full")
    model(ids, past_key_values=cache)
    return cache.device_bytes


def assert_within_budget(cache: CompressedCache, budget: int) -> None:
    """No layer holds more than its own budget, and none of these exceeds `budget`."""
    assert held(cache) <= budget
    for layer in cache.slot_layers if not cache.method.budget_is_mean else ():
        most = layer.method.budget_tokens(layer.table)
        assert most is not None and layer.table.stored() <= most <= budget


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in BOUNDED), ("h2o", "gemma3"), ("pyramidkv", "gemma3"), ("h2o", "gptj")],
)
def test_budget_and_bytes_hold_at_every_step(name: str, family: str) -> None:
    model, ids = zoo.build(family), zoo.tokens(2, 120)
    require_angles(name, model)
    cache = CompressedCache(model, with_budget(name, 16))
    with torch.no_grad():
        for start, end in [(0, 100), *((i, i + 1) for i in range(100, 120))]:
            model(ids[:, start:end], past_key_values=cache)
            assert_within_budget(cache, 16)
            assert cache.tokens_seen == cache.get_seq_length() == end
    assert cache.host_bytes == 0
    uncompressed = sum(
        t.numel() * t.element_size()
        for layer in cache.layers
        if layer not in cache.slot_layers
        for t in (layer.keys, layer.values)
    )
    # Methods with a mean have room for a while, which is more than so short a text.
    short = cache.method.budget_is_mean
    assert short or cache.device_bytes - uncompressed < 0.45 * (full_bytes(model, ids) - uncompressed)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_share_is_of_the_prompt(name: str) -> None:
    model = zoo.build("llama")
    cache = CompressedCache(model, with_budget(name, 25).replace("budget=25", "budget=25%"))
    generate(model, zoo.tokens(1, 80), cache, max_new_tokens=10)
    assert_within_budget(cache, 20)


@pytest.mark.parametrize("name", BOUNDED)
def test_sinks_and_recent_tokens_stay(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, with_budget(name, 16))
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        for i in range(50, 60):
            model(ids[:, i : i + 1], past_key_values=cache)
            for layer in cache.slot_layers:
                for head in layer.table.index_slots()[0].tolist():
                    assert {0, 1} <= set(head), "sinks"
                    assert {i, i - 1, i - 2, i - 3} <= set(head), "recent window"


@pytest.mark.touchy
@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_a_row_alone_equals_that_row_in_a_left_padded_batch(name: str) -> None:
    """With a share of its own tokens; a number of tokens is tried below."""
    model = zoo.build("qwen2")
    lengths = [40, 29, 6]  # a quarter of 6 tokens is less than the sinks
    rows = [zoo.tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(r, (40 - r.shape[1], 0)) for r in rows])
    batch, mask = padded(batch, [40 - n for n in lengths])
    method = with_budget(name, 16).replace("budget=16", "budget=25%")
    together = generate(model, batch, CompressedCache(model, method), attention_mask=mask, max_new_tokens=7)
    for i, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method), max_new_tokens=7)
        assert together.sequences[i, 40:].tolist() == alone.sequences[0, row.shape[1] :].tolist()
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.touchy
@pytest.mark.parametrize(
    "method", thinned([*(n for n in METHODS if n != "full"), *SHARED, "quest:page=4", "clusterkv:recluster=8"])
)
def test_a_row_that_outgrows_its_budget_beside_a_longer_one(method: str) -> None:
    """Rows that fit the budget when they begin, and one that does not, each as it is alone at every step."""
    model, (name, *options) = zoo.build("qwen2"), method.split(":")
    lengths = [45, 3, 9]
    rows = [zoo.tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(r, (45 - r.shape[1], 0)) for r in rows])
    batch, mask = padded(batch, [45 - n for n in lengths])
    method = ":".join([with_budget(name, 12), *options])
    # The query of token 0, whose embedding is zero, likes all keys alike: what it reads would be chance.
    options = {"max_new_tokens": 14, "suppress_tokens": [0]}
    together = generate(model, batch, CompressedCache(model, method), attention_mask=mask, **options)
    for i, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method), **options)
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", thinned([*METHODS, *SHARED]))
def test_beams_reorder_everything(name: str) -> None:
    """Each returned beam must equal its own text replayed alone through a cache of the same method."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    out = generate(
        model,
        ids,
        CompressedCache(model, with_budget(name, 16)),
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
        max_new_tokens=8,
    )
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        cache = CompressedCache(model, with_budget(name, 16))
        with torch.no_grad():
            logits = [model(ids, past_key_values=cache).logits[0, -1]]
            for token in sequence[40:-1]:
                logits.append(model(token.view(1, 1), past_key_values=cache).logits[0, -1])
        logprob = torch.stack(logits).log_softmax(-1).gather(1, sequence[40:, None]).sum()
        torch.testing.assert_close(logprob / (len(sequence) - 40), score, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_seed_reproduces(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    caches = [CompressedCache(model, with_budget(name, 16), seed=seed) for seed in (3, 3, 4)]
    runs = [generate(model, ids, cache, max_new_tokens=4).logits[-1] for cache in caches]
    assert torch.equal(runs[0], runs[1])
    fields = {f.name for f in dataclasses.fields(kvsketch.METHODS[name])}
    if "seed" in fields and getattr(kvsketch.METHODS[name], "random", False):
        assert not torch.equal(runs[0], runs[2])


RANDOM = {
    **{name: with_budget(name, 24) for name, method in FED.items() if method.random},
    "subgen_two_sums": "subgen:budget=24:sinks=2:normalizer=clipped",
    "subgen_mixed": "subgen:budget=24:sinks=2:sampling=mixed",
    "balancekv_stream": "balancekv:budget=24:sinks=2:recent=4:form=stream",
}


def test_the_random_methods_are_known() -> None:
    assert RANDOM.keys() >= {"uniform", "keyformer", "subgen", "balancekv", "clusterkv"}


def drawn(model: torch.nn.Module, text: str, seed: int) -> list[torch.Tensor]:
    """What each layer of a cache stores of the same random tokens: its slots, scores and clusters, in one tensor."""
    cache, result = CompressedCache(model, text, seed=seed), []
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    for layer in cache.slot_layers:
        generator = torch.Generator().manual_seed(5)
        keys, values, queries = (torch.randn(2, n * heads, 85, size, generator=generator) for n in (1, 1, 2))
        table = layer.table
        table.forward.scale = size**-0.5
        for part in (slice(0, 80), *(slice(i, i + 1) for i in range(80, 85))):
            layer.method.prepare(table, keys[:, :, part], values[:, :, part])
            table.append(keys[:, :, part], values[:, :, part])
            layer.method.compress(table, queries[:, :, part])
        # The hash states of the draws tell the seed, whether it is used or not.
        state = [tensor for name, tensor in table.state.named() if name != "streams"]
        result.append(torch.cat([tensor.flatten().double() for tensor in [table.index_slots(), *state]]))
    return result


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_of_a_cache_changes_the_draws_of_every_layer(name: str) -> None:
    """Experiments give each sample a seed of its own, so that intervals hold the error of the draws too."""
    model = zoo.build("llama")
    runs = [drawn(model, RANDOM[name], seed) for seed in (1, 1, 2)]
    for same, again, other in zip(*runs, strict=True):
        assert torch.equal(same, again)
        assert same.shape != other.shape or not torch.equal(same, other)


@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_rolled_back_tokens_leave_no_trace(name: str) -> None:
    """Prompt lookup under eviction: candidates that were rejected change nothing that is said afterwards."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 6).repeat(1, 6)
    cache = CompressedCache(model, with_budget(name, 16))
    looked_up = model.generate(
        ids, past_key_values=cache, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
    )
    assert looked_up.shape[1] == 48 and cache.tokens_seen == 47
    if name in BOUNDED:
        assert_within_budget(cache, 16)


@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, 2) for name in (*METHODS, *SHARED)), *thinned((name, 0) for name in (*METHODS, *SHARED)),
     *((name, kept) for name in ("h2o", "subgen", "quest") for kept in (1, 4))],
)  # fmt: skip
def test_a_draft_counts_by_what_is_left_of_it(name: str, kept: int) -> None:
    """Four drafted tokens of which some are taken back equal the rest fed alone, and the table keeps its shape."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    caches = [CompressedCache(model, with_budget(name, 16)) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :50], past_key_values=cache)
            model(ids[:, 50:51], past_key_values=cache)
            cache.activate_past_recording()
        before = caches[0].device_bytes
        model(ids[:, 51:55], past_key_values=caches[0])
        caches[0].crop(kept - 4)
        if kept:
            model(ids[:, 51 : 51 + kept], past_key_values=caches[1])
        caches[1].crop(0)
        assert caches[0].tokens_seen == caches[1].tokens_seen == 51 + kept
        if name in BOUNDED:
            assert_within_budget(caches[0], 16)
        if name in (*BOUNDED, *SHARED) and not caches[0].method.budget_is_mean:
            assert caches[0].device_bytes == before
        again = [model(ids[:, 56:57], past_key_values=cache).logits for cache in caches]
    # A recall method reads everything for several tokens at once and a part for a single one.
    if kept != 1 or caches[0].method.family != "recall":
        torch.testing.assert_close(*again, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*METHODS, *SHARED])
def test_copies_are_independent(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    cache = CompressedCache(model, with_budget(name, 16))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        branch = copy.deepcopy(cache)
        once = model(ids[:, :1], past_key_values=cache).logits
        model(ids[:, 1:2], past_key_values=cache)
        again = model(ids[:, :1], past_key_values=branch).logits
    assert torch.equal(once, again)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extreme_logits_stay_finite(name: str, dtype: torch.dtype) -> None:
    """Keys and queries whose inner products reach 1e4, in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    table = SlotTable(LayerContext(0, 1))
    method = kvsketch.parse_method(with_budget(name, 16))
    direction = torch.randn(64, generator=generator).sign()
    for new in (50, 1, 1, 1):
        keys = (torch.randn(1, 2, new, 1, generator=generator).sign() * direction * 12.5).to(dtype)
        values = torch.randn(1, 2, new, 64, generator=generator).to(dtype)
        queries = (direction * 12.5).expand(1, 4, new, 64).to(dtype)
        table.append(keys, values)
        table.forward.scale = 1.0
        if new == 1 and not table.exact:
            num = table.log_den if table.log_num is None else table.log_num
            out = kvsketch.ops.weighted_attention(
                queries, table.key_slots(), table.value_slots(), num, table.log_den, 1.0
            )
            assert out.isfinite().all()
        method.compress(table, queries)
        assert all(t.isfinite().all() for t in (table.key_slots(), table.value_slots()))


@pytest.mark.parametrize("name", METHODS)
def test_short_contexts_are_kept_whole(name: str) -> None:
    """Shorter than any window, and than a budget in tokens; a share of three tokens may still evict."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 3)
    cache = CompressedCache(model, name)
    ours = generate(model, ids, cache, max_new_tokens=4)
    theirs = generate(model, ids, DynamicCache(config=model.config), max_new_tokens=4)
    budget = getattr(cache.method, "budget", None)
    if budget is None or budget.share is None:
        assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize("name", METHODS)
def test_text_form_round_trips(name: str) -> None:
    for text in (name, with_budget(name, 16)):
        method = kvsketch.parse_method(text)
        assert kvsketch.parse_method(str(method)) == method


@pytest.mark.parametrize("name", METHODS)
def test_docstring_says_what_it_is(name: str) -> None:
    method = kvsketch.METHODS[name]
    first = (method.__doc__ or "").strip().splitlines()[0]
    assert 20 < len(first) < 140 and first.endswith((".", ":")) and method.name == name
