"""positions=cache against oracles without a cache, and the warning where the positions of a model end.

In a one-layer model keys do not depend on what was dropped, so the unmodified model, run on the kept tokens alone, is
the truth. Deeper models and methods whose heads keep different tokens are compared with one forward whose attention
turns every key for every query, by counts made here from lists of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import rotary
from kvsketch.cache.chunks import chunk_spans
from kvsketch.methods import H2O, supporting
from kvsketch.ops.rotate_keys import reference
from kvsketch.slots import SlotTable, in_place
from tests.cache.test_oracle import BUDGET, SCHEDULES, SINKS, step_by_step
from tests.helpers import zoo
from tests.helpers.common import generate, padded, with_budget

STREAMING = f"streamingllm:budget={BUDGET}:sinks={SINKS}"
BY_PLACE = f"{STREAMING}:positions=cache"
LINEAR: dict[str, Any] = {
    **zoo.FAMILIES["llama"][1], "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
EXTRA = {
    "phi": ("phi", {**zoo.FAMILIES["llama"][1], "partial_rotary_factor": 0.5}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "qwen3_next": ("qwen3_next", {**LINEAR, **EXPERTS}),
}
FAMILIES = sorted([f for f, (kind, _) in zoo.FAMILIES.items() if kind in rotary.FAMILIES] + list(EXTRA))
# Families whose layers differ, of which those of full attention are compressed.
DIFFER = ("gemma2", "gemma3", "gpt_oss", "olmo3", "qwen3_5", "qwen3_next")
PLACED = supporting("cache_positions")


def build(family: str, **changes: Any) -> Any:
    if family not in EXTRA:
        return zoo.build(family, **changes)
    torch.manual_seed(0)
    kind, settings = EXTRA[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**settings, **changes})).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    return model


def named(name: str, budget: int = BUDGET) -> str:
    return with_budget(name, budget) + ":positions=cache"


def by_steps(model: Any, cache: CompressedCache, ids: Tensor, prompt: int) -> Tensor:
    """Logits after each token from `prompt` on, which come one by one."""
    model(ids[:, :prompt], past_key_values=cache)
    parts = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(prompt, ids.shape[1])]
    return torch.cat(parts, 1)


def on_kept_tokens(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """The unmodified model on sinks and window alone, at positions 0, 1, 2, ..."""
    kept = ([*range(SINKS), *range(t - (BUDGET - SINKS), t + 1)] for t in range(prompt, ids.shape[1]))
    return torch.cat([model(ids[:, each], use_cache=False).logits[:, -1:] for each in kept], 1)


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_one_layer_equals_the_model_on_the_kept_tokens(family: str) -> None:
    kinds = {"layer_types": ["full_attention"]} if family in DIFFER else {}
    model, ids = build(family, num_hidden_layers=1, **kinds), zoo.tokens(2, 42)
    expected = on_kept_tokens(model, ids, 30)
    assert distance(by_steps(model, CompressedCache(model, BY_PLACE), ids, 30), expected) < 1e-5
    assert distance(by_steps(model, CompressedCache(model, STREAMING), ids, 30), expected) > 1e-3


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
@torch.no_grad()
def test_stretched_contexts_are_rotated_by_their_own_angles(rope: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, **rope}
    model, ids = zoo.build("llama", num_hidden_layers=1, rope_parameters=parameters), zoo.tokens(1, 50)
    ours = by_steps(model, CompressedCache(model, BY_PLACE), ids, 30)
    assert distance(ours, on_kept_tokens(model, ids, 30)) < 1e-5


@torch.no_grad()
def test_one_position_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, 50)
    expected, gone_after = on_kept_tokens(model, ids, 30), reference.gone_after
    for step in (1, -1):
        monkeypatch.setattr(reference, "gone_after", lambda index, seen, by=step: gone_after(index, seen + by))
        assert distance(by_steps(model, CompressedCache(model, BY_PLACE), ids, 30), expected) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_are_the_models_own_numbers(family: str) -> None:
    model = build(family)
    own = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    own = next((buffer for name, buffer in own.items() if "full_attention" in name), next(iter(own.values())))
    assert rotary.frequencies(model.config) == tuple(own.tolist())


# several layers, heads that differ: attention that turns each key for each query


@contextmanager
def turning(model: Any, visible: Tensor, gone: Tensor) -> Iterator[None]:
    """Inside the block the model attends where `visible` [B, 1 or H, L, L], keys rotated by `gone` positions."""
    angle = torch.tensor(rotary.frequencies(model.config), dtype=torch.float64)
    half = len(angle)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        q, k, v = (t.double() for t in (query, *(t.repeat_interleave(group, 1) for t in (key, value))))
        q_pairs, k_pairs = (torch.complex(t[..., :half], t[..., half : 2 * half]) for t in (q, k))
        turn = torch.polar(torch.ones((), dtype=torch.float64), gone[..., None].double() * angle)
        logits = torch.einsum("bhic,bhjc,bhijc->bhij", q_pairs, k_pairs.conj(), turn.conj()).real
        logits = logits + q[..., 2 * half :] @ k[..., 2 * half :].mT
        weights = (logits * scaling).masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).to(value.dtype).contiguous(), None

    own = model.config._attn_implementation
    AttentionInterface.register("turning", attend)
    model.config._attn_implementation = "turning"
    try:
        yield
    finally:
        model.config._attn_implementation = own


def places(kept: list[int], pad: int, query: int, first_new: int, length: int) -> tuple[Tensor, Tensor]:
    """What a query sees of `length` tokens, and how many between itself and each are gone."""
    there = sorted({j for j in kept if j >= pad} | set(range(max(pad, first_new), query + 1)) | {query})
    visible, gone = torch.zeros(length, dtype=torch.bool), torch.zeros(length, dtype=torch.long)
    for place, j in enumerate(there):
        visible[j] = True
        gone[j] = (query - j) - (len(there) - 1 - place)
    return visible, gone


def streaming_places(chunks: list[int], pads: list[int], length: int) -> tuple[Tensor, Tensor]:
    visible = torch.zeros(len(pads), 1, length, length, dtype=torch.bool)
    gone = torch.zeros(len(pads), 1, length, length, dtype=torch.long)
    for row, pad in enumerate(pads):
        kept: list[int] = []
        start = 0
        for chunk in chunks:
            for i in range(start, start + chunk):
                visible[row, 0, i], gone[row, 0, i] = places(kept, pad, i, start, length)
            kept = [j for j in kept + list(range(start, start + chunk)) if j >= pad]
            start += chunk
            if len(kept) > BUDGET:
                kept = kept[:SINKS] + kept[SINKS - BUDGET :]
    return visible, gone


def oracle(model: Any, ids: Tensor, mask: Tensor, visible: Tensor, gone: Tensor) -> Tensor:
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with turning(model, visible, gone):
        return model(ids, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "schedule", "pads"),
    [*(("llama", schedule, [0, 4, 17]) for schedule in SCHEDULES), ("gpt_neox", "second_turn", [0])],
)
@torch.no_grad()
def test_streamingllm_equals_the_rotating_model(family: str, schedule: str, pads: list[int]) -> None:
    model, chunks = zoo.build(family), SCHEDULES[schedule]
    ids, mask = padded(zoo.tokens(len(pads), sum(chunks)), pads)
    cache = CompressedCache(model, BY_PLACE)
    ours = step_by_step(model, ids, cache, chunks, mask)
    visible, gone = streaming_places(chunks, pads, ids.shape[1])
    expected, real = oracle(model, ids, mask, visible, gone), mask.bool()
    assert distance(ours[real], expected[real]) < 2e-5
    by_text = oracle(model, ids, mask, visible, torch.zeros_like(gone))
    assert distance(by_text[real], expected[real]) > 1e-3, "the two positions must differ"
    assert cache.tokens_stored <= BUDGET and cache.tokens_seen == ids.shape[1]


@pytest.mark.parametrize("way", ["one forward", "many"])
@pytest.mark.parametrize("pads", [[0], [0, 4, 17]], ids=["alone", "left_padded"])
@torch.no_grad()
def test_streams_equal_the_rotating_model(way: str, pads: list[int]) -> None:
    model, length, chunk = zoo.build("llama"), 45, 11
    ids, mask = padded(zoo.tokens(len(pads), length), pads)
    cache = CompressedCache(model, BY_PLACE, prefill="stream", chunk=chunk)
    if way == "many":
        ours = kvsketch.prefill(model, ids, cache, mask)[:, None]
    else:
        ours = step_by_step(model, ids, cache, [length], mask)
    chunks = [end - start for start, end in chunk_spans(length, chunk)]
    expected = oracle(model, ids, mask, *streaming_places(chunks, pads, length))
    real = mask.bool()[:, -ours.shape[1] :]
    assert distance(ours[real], expected[:, -ours.shape[1] :][real]) < 2e-5


@pytest.mark.parametrize("name", [name for name in PLACED if name != "balancekv"])
@torch.no_grad()
def test_each_head_reads_its_own_places(name: str) -> None:
    """The tokens in each head's slots before each forward, counted here, say where it finds them."""
    model, chunks, pads = zoo.build("llama", num_hidden_layers=1), [30] + [1] * 10 + [5] + [1] * 3, [0, 6]
    ids, mask = padded(zoo.tokens(len(pads), sum(chunks)), pads)
    text = named(name) + ":weights=false" * (name == "uniform")
    cache = CompressedCache(model, text)
    length, heads = ids.shape[1], 4
    visible = torch.zeros(len(pads), heads, length, length, dtype=torch.bool)
    gone = torch.zeros(len(pads), heads, length, length, dtype=torch.long)
    logits, start = [], 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for chunk in chunks:
        table, end = cache.slot_layers[0].table, start + chunk
        for b, h in ((b, h) for b in range(len(pads)) for h in range(heads)):
            kept = list(range(start)) if table.exact else [j for j in table.index[b, h // 2].tolist() if j >= 0]
            for i in range(start, end):
                visible[b, h, i], gone[b, h, i] = places(kept, pads[b], i, start, length)
        out = model(
            ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
            past_key_values=cache,
        )  # fmt: skip
        logits.append(out.logits)
        start = end
    expected, real = oracle(model, ids, mask, visible, gone), mask.bool()
    assert distance(torch.cat(logits, 1)[real], expected[real]) < 2e-5
    assert gone[visible].max() > 10


@pytest.mark.parametrize("name", PLACED)
def test_a_budget_that_holds_everything_is_the_full_cache_bit_for_bit(name: str) -> None:
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 40), [0, 13])
    caches = CompressedCache(model, named(name, 80)), DynamicCache(config=model.config)
    ours, full = (generate(model, ids, cache, attention_mask=mask, max_new_tokens=6) for cache in caches)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, full.logits, strict=True))
    cache = CompressedCache(model, named(name, 80))
    model(ids[:1], past_key_values=cache)
    for layer in cache.slot_layers:
        layer.method.bound(layer.table, 100)
        assert not layer.table.exact
        assert torch.equal(layer.table.read_keys(), layer.table.key_slots())


@pytest.mark.parametrize("name", PLACED)
def test_text_positions_read_the_stored_keys_themselves(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    texts = (with_budget(name, 16), with_budget(name, 16) + ":positions=text")
    caches = [CompressedCache(model, text) for text in texts]
    runs = [generate(model, ids, cache, max_new_tokens=5) for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    table = caches[0].slot_layers[0].table
    assert not table.exact and table.read_keys().data_ptr() == table.keys.read.data_ptr()
    rotated = generate(model, ids, CompressedCache(model, named(name, 16)), max_new_tokens=5)
    assert not torch.allclose(rotated.logits[-1], runs[0].logits[-1], atol=1e-3)


# what methods score by


def rotated_by_hand(table: SlotTable) -> Tensor:  # [B, H, S, D] float64
    """The keys at their places, one slot after the other."""
    assert table.index is not None
    keys, angle = table.key_slots().double().clone(), torch.tensor(table.context.rotary, dtype=torch.float64)
    half = len(angle)
    for b, h in ((b, h) for b in range(keys.shape[0]) for h in range(keys.shape[1])):
        tokens = table.index[b, h].tolist()
        for slot, token in enumerate(tokens):
            gone = sum(other not in tokens for other in range(token + 1, table.seen)) if token >= 0 else 0
            z = torch.complex(keys[b, h, slot, :half], keys[b, h, slot, half : 2 * half])
            z = z * torch.polar(torch.ones_like(angle), gone * angle)
            keys[b, h, slot, : 2 * half] = torch.cat([z.real, z.imag])
    return keys


@pytest.mark.parametrize("recording", [False, True], ids=["logits left behind", "keys read again"])
@pytest.mark.parametrize("chunks", [[40, 1, 1, 1, 1], [40, 6, 5]], ids=["steps", "chunks"])
@torch.no_grad()
def test_scores_are_the_attention_that_was_paid(
    recording: bool, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """h2o sums up the softmax over rotated keys."""
    model, ids, observed = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, sum(chunks)), []
    observe = H2O.observe

    def watched(method: H2O, table: SlotTable, queries: Tensor) -> None:
        if table.exact:
            return observe(method, table, queries)
        before = table.state.score.clone()
        logits = table.forward.scale * queries.unflatten(1, (2, 2)).double() @ rotated_by_hand(table).unsqueeze(2).mT
        token = torch.arange(table.seen - queries.shape[2], table.seen).view(1, 1, 1, -1, 1)
        index = table.index.view(1, 2, 1, 1, -1)
        mass = logits.masked_fill((index < 0) | (index > token), -torch.inf).softmax(-1).sum((2, 3))
        observe(method, table, queries)
        observed.append(distance(table.state.score, before + mass.float()))
        return None

    monkeypatch.setattr(H2O, "observe", watched)
    cache, start = CompressedCache(model, named("h2o", 20)), 0
    for chunk in chunks:
        # A forward that may be rolled back leaves no logits for later.
        cache.slot_layers[0].record_past = recording and start > 0
        model(ids[:, start : start + chunk], past_key_values=cache)
        start += chunk
    cache.slot_layers[0].compress_pending()
    assert len(observed) == len(chunks) - 1 and max(observed) < 1e-5


# rows, beams, files, roll backs, number formats


@pytest.mark.parametrize("name", PLACED)
@torch.no_grad()
def test_a_row_alone_equals_that_row_in_a_padded_batch(name: str) -> None:
    model, chunk, text = zoo.build("llama"), 12, named(name, 16)
    row = zoo.tokens(1, 40)
    ids = torch.cat([zoo.tokens(1, 40 + 2 * chunk, seed=5), torch.nn.functional.pad(row, (2 * chunk, 0))])
    ids, mask = padded(ids, [0, 2 * chunk])
    for options in ({}, {"prefill": "stream", "chunk": chunk}):
        alone, together = (CompressedCache(model, text, **options) for _ in range(2))
        one = generate(model, row, alone, max_new_tokens=6)
        both = generate(model, ids, together, attention_mask=mask, max_new_tokens=6)
        assert one.sequences[0, 40:].tolist() == both.sequences[1, ids.shape[1] :].tolist()
        torch.testing.assert_close(both.logits[-1][1], one.logits[-1][0], atol=1e-4, rtol=1e-4)


def test_beams_keep_their_places() -> None:
    """The best of two beams, read again from the start as one row, has the logits of its own last step."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 30)
    cache = CompressedCache(model, BY_PLACE)
    beams = generate(model, ids, cache, num_beams=3, max_new_tokens=15)
    table = cache.slot_layers[0].table
    assert table.read_keys().shape[0] == 3
    single = CompressedCache(model, BY_PLACE)
    with torch.no_grad():
        by_steps(model, single, beams.sequences[:, :-1], 30)
    row = (table.index == single.slot_layers[0].table.index).flatten(1).all(1)
    close = [torch.allclose(keys, single.slot_layers[0].table.read_keys()[0], atol=1e-4) for keys in table.read_keys()]
    assert row.any() and any(close)


@torch.no_grad()
def test_a_saved_cache_goes_on_at_its_places(tmp_path: Path) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 50)
    cache = CompressedCache(model, BY_PLACE)
    by_steps(model, cache, ids[:, :40], 30)
    cache.save(tmp_path / "places.kvs")
    loaded = CompressedCache.load(tmp_path / "places.kvs", model)
    assert loaded.method == cache.method and loaded.slot_layers[0].table.context.positions.rotated_by
    for t in range(40, 50):
        pair = [model(ids[:, t : t + 1], past_key_values=each).logits for each in (cache, loaded)]
        assert torch.equal(*pair)
    cache.reset()
    again = by_steps(model, cache, ids, 30)
    assert torch.equal(again, by_steps(model, CompressedCache(model, BY_PLACE), ids, 30))


@pytest.mark.parametrize("name", ["streamingllm", "h2o", "snapkv"])
def test_tokens_rolled_back_leave_no_hole(name: str) -> None:
    """Three of five drafted tokens are taken back: the cache goes on as if they had never come."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    generate(model, ids, CompressedCache(model, named(name, 16)), max_new_tokens=20, prompt_lookup_num_tokens=3)
    cache, other = (CompressedCache(model, named(name, 16)) for _ in range(2))
    with torch.no_grad():
        for each in (cache, other):
            model(ids, past_key_values=each)
        cache.activate_past_recording()
        drafts = torch.cat([ids[:, :2], zoo.tokens(1, 3, seed=9)], 1)
        model(drafts, past_key_values=cache)
        cache.crop(-3)
        model(drafts[:, :2], past_key_values=other)
        after = [model(ids[:, 5:8], past_key_values=each).logits for each in (cache, other)]
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_with_a_large_common_part(dtype: torch.dtype) -> None:
    """Keys of trained models share a large vector; rotated and rounded once they err as any rounding does."""
    model, ids = zoo.build("qwen2", num_hidden_layers=1), zoo.tokens(1, 60)
    model.model.layers[0].self_attn.k_proj.bias.copy_(20 * torch.randn(16, generator=torch.Generator().manual_seed(0)))
    expected = on_kept_tokens(model, ids, 30)
    model = model.to(dtype)
    ours = by_steps(model, CompressedCache(model, BY_PLACE), ids, 30).float()
    own = on_kept_tokens(model, ids, 30).float()
    assert ours.isfinite().all()
    assert distance(ours, expected) < 1.5 * distance(own, expected) + 1e-3


# refusals


@pytest.mark.parametrize("family", sorted(set(zoo.FAMILIES) - set(FAMILIES)))
def test_models_without_known_angles_are_refused_by_name(family: str) -> None:
    config = zoo.build(family).config
    with pytest.raises(ValueError, match=rf"{config.model_type} has none that are known; use positions=text.*llama"):
        CompressedCache(config, BY_PLACE)
    CompressedCache(config, STREAMING)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_change_with_the_text_are_refused(kind: str) -> None:
    config = zoo.build("llama").config
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": kind, "factor": 2.0, **factors}
    with pytest.raises(ValueError, match=f"llama .rope_type '{kind}'. change with the length.*positions=text"):
        CompressedCache(config, BY_PLACE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("subgen:positions=cache", "subgen: positions=cache is refused.*several slots.*streamingllm, h2o, snapkv"),
        ("pyramidkv:positions=cache", "pyramidkv: positions=cache is refused.*measured.*streamingllm, h2o, snapkv"),
        ("rehearse:positions=cache", "rehearse: positions=cache is refused.*distances in the text"),
        ("streamingllm:positions=place", "positions=place is not valid; use text or cache"),
        ("quest:positions=cache", "quest: positions=cache is refused.*places in the text.*streamingllm"),
        ("full:positions=cache", "full: positions=cache is refused.*keeps every token"),
    ],
)
def test_methods_without_places_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvsketch.CompressedCache(zoo.build("llama"), text)


# where positions end


@contextmanager
def heard(count: int) -> Iterator[list[str]]:
    """So many warnings about positions come out of the block."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if w.category is RuntimeWarning and "positions" in str(w.message)]
    assert len(messages) == count, messages


def short(limit: int = 40, **changes: Any) -> Any:
    return zoo.build("llama", max_position_embeddings=limit, **changes)


@pytest.mark.parametrize("text", ["streamingllm:budget=12", "full", "quest:budget=20", "subgen:budget=20"])
@torch.no_grad()
def test_a_text_longer_than_the_models_positions_warns_once(text: str) -> None:
    model, ids = short(), zoo.tokens(1, 60)
    cache = CompressedCache(model, text)
    with heard(0):
        by_steps(model, cache, ids[:, :40], 30)
    with heard(1) as messages:
        for t in range(40, 60):
            model(ids[:, t : t + 1], past_key_values=cache)
    assert "tokens_seen=41 passes the 40 positions that llama was trained on" in messages[0]
    assert "positions=cache" in messages[0] and "longer context" in messages[0]
    assert ("such as streamingllm" in messages[0]) == (not text.startswith("streamingllm"))
    with heard(0):
        cache.reset()
        by_steps(model, cache, ids, 30)


@pytest.mark.parametrize("way", ["generate", "prefill", "stream in one forward"])
@torch.no_grad()
def test_prompts_warn_as_well(way: str) -> None:
    model, ids = short(), zoo.tokens(1, 60)
    cache = CompressedCache(model, "streamingllm:budget=12", prefill="stream", chunk=16)
    with heard(1):
        if way == "generate":
            generate(model, ids[:, :36], cache)
        elif way == "prefill":
            kvsketch.prefill(model, ids, cache)
        else:
            model(ids, past_key_values=cache)


def test_replayed_steps_count_and_warn() -> None:
    """A captured step runs no code of a layer but this."""
    cache = CompressedCache(short(), "streamingllm:budget=12")
    table = cache.slot_layers[0].table
    table.seen = 39
    with heard(0):
        in_place.count_replayed(table)
    with heard(1):
        for _ in range(5):
            in_place.count_replayed(table)


@torch.no_grad()
def test_places_end_with_budget_and_chunk() -> None:
    model, ids = short(), zoo.tokens(1, 100)
    with heard(0):
        cache = CompressedCache(model, BY_PLACE, prefill="stream", chunk=28)
        kvsketch.prefill(model, ids, cache)
        by_steps(model, CompressedCache(model, BY_PLACE), ids, 40)
    with heard(1) as messages:
        kvsketch.prefill(model, ids, CompressedCache(model, BY_PLACE, prefill="stream", chunk=29))
    assert "12 slots and 29 new tokens" in messages[0] and "smaller budget or chunk" in messages[0]
    with heard(1) as messages:
        by_steps(model, CompressedCache(model, BY_PLACE), ids, 41)
    assert "41 slots and 0 new tokens" in messages[0] and "prefill='stream'" in messages[0]


@pytest.mark.parametrize("family", ["mpt", "opt", "gpt2", "cohere"])
def test_positions_end_where_the_config_says(family: str) -> None:
    model = zoo.build(family)
    assert rotary.trained_positions(model.config) == (None if family == "mpt" else 512)
    alone = rotary.positions(model.config, "text")
    assert "positions=cache" not in alone.advice and "longer context" in alone.advice


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_stretched_contexts_end_later(rope: dict[str, Any], positions: int) -> None:
    config = zoo.build("llama").config
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    assert rotary.trained_positions(config) == positions
