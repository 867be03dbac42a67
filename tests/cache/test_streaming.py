"""Streaming prefill: chunks read the compressed past, and it does not matter how the prompt arrives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import attention, masks
from kvsketch.cache.chunks import chunk_spans
from kvsketch.cache.layer import SlotLayer
from kvsketch.slots import SlotTable
from tests.cache.test_oracle import oracle
from tests.helpers import zoo
from tests.helpers.common import FED, bounded, generate, padded, thinned, with_budget

METHODS = list(FED)
BOUNDED = bounded()
SINGLE = [n for n, m in FED.items() if not m().settles]  # no layer waits for the others
RECALL = [n for n, m in FED.items() if m.family == "recall"]
FORMS = [
    "balancekv:budget=16:form=stream",
    "balancekv:budget=16:form=paper:block=8",
    "subgen:budget=16:normalizer=clipped:policy=double",
    "subgen:budget=16:sampling=mixed",
]
CHUNK, LENGTH = 12, 61


def stream(model: Any, method: str, chunk: int = CHUNK) -> CompressedCache:
    return CompressedCache(model, method, prefill="stream", chunk=chunk)


def assert_same_state(one: CompressedCache, other: CompressedCache) -> None:
    for a, b in zip(one.slot_layers, other.slot_layers, strict=True):
        assert (a.table.seen, a.table.prompt_tokens) == (b.table.seen, b.table.prompt_tokens)
        assert len(a.table.tensors()) == len(b.table.tensors()) > 1
        for x, y in zip(tensors_of(a.table), tensors_of(b.table), strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


def tensors_of(table: SlotTable) -> list[Tensor]:
    """Everything that is held; while every token is, without padding and spare room, which nobody reads."""
    if not table.exact:
        return table.tensors()
    real = table.index_slots() >= 0
    return [table.key_slots()[real], table.value_slots()[real]]


@pytest.mark.parametrize("method", thinned([*(with_budget(name, 16) for name in SINGLE), "uniform:budget=25%", *FORMS]))
def test_one_forward_and_many_leave_the_same_cache(method: str) -> None:
    """The prompt at once, chunk by chunk, and as generate prepares it; then a second turn."""
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, LENGTH), [0, 17])
    more = torch.ones(2, 30, dtype=torch.long)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    caches = [stream(model, method) for _ in range(3)]
    with torch.no_grad():
        first = [
            model(ids, attention_mask=mask, position_ids=positions, past_key_values=caches[0]).logits[:, -1],
            kvsketch.prefill(model, ids, caches[1], mask),
            model._prefill(ids, model.generation_config, {"attention_mask": mask, "past_key_values": caches[2]}).logits[
                :, -1
            ],
        ]
        for logits, cache in zip(first[1:], caches[1:], strict=True):
            torch.testing.assert_close(logits, first[0], atol=1e-4, rtol=1e-4)
            assert_same_state(caches[0], cache)
        turn = zoo.tokens(2, 30, seed=1)
        both = torch.cat([mask, more], 1)
        later = (both.cumsum(-1) - 1)[:, -30:]
        at_once = model(turn, attention_mask=both, position_ids=later, past_key_values=caches[0]).logits[:, -1]
        torch.testing.assert_close(kvsketch.prefill(model, turn, caches[1]), at_once, atol=1e-4, rtol=1e-4)
        assert_same_state(caches[0], caches[1])


@pytest.mark.parametrize(
    "method",
    [
        "rehearse:budget=16:sinks=2:recent=4:bits=16",
        "expected:budget=16:sinks=2",
        "snapkv:budget=16:window=4:share=model",
        "h2o:budget=16:sinks=2:recent=4:share=model",
        "kvzip:budget=16:sinks=2",
        "full:bits=auto",
        "snapkv:budget=16:window=4:bits=auto",
    ],
)
def test_a_stream_of_layers_that_decide_together_is_refused_in_one_forward(method: str) -> None:
    """No layer may read the second chunk before all have read the first; the call to use instead reads it."""
    model, ids = zoo.build("llama"), zoo.tokens(1, LENGTH)
    cache, fresh = stream(model, method), stream(model, method)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=r"61 tokens in one forward .* kvsketch\.prefill"):
            model(ids, past_key_values=cache)
        assert cache.tokens_seen == 0
        torch.testing.assert_close(kvsketch.prefill(model, ids, cache), kvsketch.prefill(model, ids, fresh))
        assert_same_state(cache, fresh)
        cache.reset()
        fresh.reset()
    at_once = generate(model, ids, cache, max_new_tokens=3).sequences
    assert kvsketch.generate(model, ids, fresh, max_new_tokens=3, do_sample=False).tolist() == at_once.tolist()
    with torch.no_grad():
        model(ids[:, : CHUNK + 1], past_key_values=CompressedCache(model, method, prefill="stream", chunk=CHUNK))


@pytest.mark.parametrize("name", METHODS)
def test_a_chunk_that_holds_the_prompt_is_exact_prefill(name: str) -> None:
    model = zoo.build("qwen2")
    ids, mask = padded(zoo.tokens(2, 40), [0, 7])
    # A refit makes more of what attention kernels round differently.
    method = with_budget(name, 16) + ":refit=none" * (name == "rehearse")
    exact, streamed = CompressedCache(model, method), stream(model, method, chunk=40)
    runs = [generate(model, ids, cache, attention_mask=mask, max_new_tokens=5) for cache in (exact, streamed)]
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert_same_state(exact, streamed)


@pytest.mark.parametrize("name", ["full", "streamingllm", "h2o", "subgen", "balancekv", "quest", "clusterkv"])
def test_nothing_to_compress_is_the_full_cache(name: str) -> None:
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 40), [0, 13])
    caches = stream(model, with_budget(name, 80)), DynamicCache(config=model.config)
    ours, full = (generate(model, ids, cache, attention_mask=mask, max_new_tokens=6) for cache in caches)
    assert ours.sequences.tolist() == full.sequences.tolist()
    for a, b in zip(ours.logits, full.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_row_alone_equals_that_row_behind_whole_chunks_of_padding(name: str) -> None:
    model, method = zoo.build("llama"), with_budget(name, 16)
    row = zoo.tokens(1, 40)
    batch = torch.cat([zoo.tokens(1, 40 + 2 * CHUNK, seed=5), torch.nn.functional.pad(row, (2 * CHUNK, 0))])
    batch, mask = padded(batch, [0, 2 * CHUNK])
    alone = kvsketch.prefill(model, row, stream(model, method))
    together = kvsketch.prefill(model, batch, stream(model, method), mask)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", [7, LENGTH - 5])
@pytest.mark.parametrize(
    "method", [*(with_budget(name, 16) for name in RECALL), "clusterkv:budget=25%:sinks=2:skip_layers=0"]
)
def test_a_row_of_a_recall_method_is_what_it_is_alone_whatever_its_padding(method: str, padding: int) -> None:
    """Chunks are cut elsewhere in the padded row; everything is kept and indexed at the end of the prompt."""
    model = zoo.build("llama")
    row = zoo.tokens(1, LENGTH - padding)
    batch = torch.cat([zoo.tokens(1, LENGTH, seed=5), torch.nn.functional.pad(row, (padding, 0))])
    batch, mask = padded(batch, [0, padding])
    options = {"max_new_tokens": 6, "suppress_tokens": [0]}
    together = generate(model, batch, stream(model, method), attention_mask=mask, **options)
    for alone in (stream(model, method), CompressedCache(model, method)):
        for a, b in zip(together.logits, generate(model, row, alone, **options).logits, strict=True):
            torch.testing.assert_close(a[1], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("name", RECALL)
def test_a_stream_that_breaks_off_is_refused_until_a_reset(name: str, offload: str) -> None:
    """The first of two turns is complete, the second is not: what it has read is no prompt that anyone asked for."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 80)
    options = ":recluster=5:recluster_into=2" if name == "clusterkv" else ""
    cache = stream(model, f"{with_budget(name, 16)}:offload={offload}{options}")
    kvsketch.prefill(model, ids[:, :30], cache)

    def stop(read: int) -> None:
        if read == 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvsketch.prefill(model, ids[:, 30:], cache, after_chunk=stop)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cache\.reset\(\)"):
        model(ids[:, 54:55], past_key_values=cache)
    cache.reset()
    fresh = stream(model, str(cache.method))
    torch.testing.assert_close(kvsketch.prefill(model, ids, cache), kvsketch.prefill(model, ids, fresh))


@pytest.mark.parametrize(
    ("method", "way"),
    [*((with_budget(name, 16), "one forward") for name in BOUNDED), (FORMS[0], "many"), ("h2o:budget=16", "many")],
)
def test_memory_does_not_grow_with_the_prompt(method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a layer's table when it is largest, between the arrival of a chunk and its compression."""
    model = zoo.build("llama")
    largest = {}
    compress = SlotLayer.compress

    def watched(layer: SlotLayer, queries: Tensor) -> None:
        bytes_held = sum(t.numel() * t.element_size() for t in layer.table.tensors())
        largest[length] = max(largest.get(length, 0), bytes_held)
        compress(layer, queries)

    monkeypatch.setattr(SlotLayer, "compress", watched)
    for length in (60, 180):
        cache = stream(model, method, chunk=20)
        with torch.no_grad():
            model(zoo.tokens(1, length), past_key_values=cache) if way == "one forward" else kvsketch.prefill(
                model, zoo.tokens(1, length), cache
            )
        assert cache.tokens_seen == length and cache.tokens_stored <= 16
    assert largest[180] == largest[60]


def test_no_mask_is_built_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a chunk by all tokens before it would grow with the prompt."""
    model, seen = zoo.build("llama"), []
    attend = attention._attend_module

    def watched(
        own: Any, view: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **k: Any
    ) -> Any:
        seen.append(mask)
        return attend(own, view, module, query, key, value, mask, **k)

    monkeypatch.setattr(attention, "_attend_module", watched)
    ids, mask = padded(zoo.tokens(2, LENGTH), [0, 17])
    kvsketch.prefill(model, ids, stream(model, "streamingllm:budget=16"), mask)
    assert len(seen) == 2 * len(chunk_spans(LENGTH, CHUNK)) and all(m is None for m in seen)


def test_other_masks_are_read_as_they_are() -> None:
    """A mask that says more than order and padding, here a token that nobody may look back at."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    visible = torch.ones(40, 40).tril().bool()[None, None].clone()
    visible[..., 5] = torch.eye(40).bool()[:, 5]
    with torch.no_grad():
        expected = oracle(model, ids, visible, torch.ones_like(ids))
        ours = model(ids, attention_mask=visible, past_key_values=stream(model, "full")).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_which_masks_are_causal() -> None:
    causal = torch.ones(6, 10).tril(4).bool().expand(2, 1, 6, 10)
    left = torch.arange(10) >= torch.tensor([0, 3]).view(2, 1, 1, 1)
    padding = torch.tensor([0, 3])
    additive = torch.zeros(2, 1, 6, 10).masked_fill(~(causal & left), torch.finfo(torch.float32).min)
    hole = (causal & left).clone()
    hole[1, 0, 4, 6] = False
    biased = additive.clone()
    biased[0, 0, 5, 2] = -0.5
    assert masks.is_causal(None, 10, 6, None) and masks.is_causal(causal.clone(), 10, 6, None)
    assert masks.is_causal(causal & left, 10, 6, padding) and masks.is_causal(additive, 10, 6, padding)
    assert masks.is_causal(left[:, 0, 0].long(), 10, 6, padding)
    for other in (hole, biased, left[:, 0, 0].long().flip(1), (causal & left).repeat(1, 2, 1, 1), object()):
        assert not masks.is_causal(other, 10, 6, padding)
    assert not masks.is_causal(causal.clone(), 10, 6, padding)


def test_transformers_own_chunks_are_the_same_chunks() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 4 * CHUNK)
    ours = generate(model, ids, stream(model, "h2o:budget=16"))
    theirs = generate(model, ids, stream(model, "h2o:budget=16"), prefill_chunk_size=CHUNK)
    assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize(
    ("length", "shares", "prefill"),
    [(4 * CHUNK, [12, 24, 36, 48], "exact"), (4 * CHUNK + 1, [12, 24, 36, 48, 48], "stream")],
)
@pytest.mark.parametrize("name", thinned(BOUNDED))
def test_transformers_own_chunks_know_of_no_prompt(name: str, length: int, shares: list[int], prefill: str) -> None:
    """A share is of what has come so far; a last chunk of one token counts as a generated one."""
    model, ids = zoo.build("llama"), zoo.tokens(1, length)
    method = with_budget(name, 16).replace("budget=16", "budget=50%")
    cache, whole = (CompressedCache(model, method, prefill=prefill, chunk=CHUNK) for _ in range(2))
    result: list[tuple[int, int]] = []
    hook = model.register_forward_hook(
        lambda *_: result.append((cache.slot_layers[0].table.prompt_tokens, cache.tokens_stored))
    )
    model.generate(ids, past_key_values=cache, prefill_chunk_size=CHUNK, max_new_tokens=1, do_sample=False)
    hook.remove()
    assert [share for share, _ in result] == shares
    assert all(stored <= share // 2 for share, stored in result)
    kvsketch.prefill(model, ids, whole)
    assert whole.slot_layers[0].table.prompt_tokens == length


def test_tokens_can_be_rolled_back_after_a_stream() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 6).repeat(1, 6)
    options = {"max_new_tokens": 12, "do_sample": False}
    looked_up = model.generate(ids, past_key_values=stream(model, "full", 7), prompt_lookup_num_tokens=3, **options)
    assert looked_up.tolist() == model.generate(ids, **options).tolist()


def test_generation_goes_on_after_prefill() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, LENGTH)
    at_once = generate(model, ids, stream(model, "h2o:budget=16"), max_new_tokens=6).sequences
    cache = stream(model, "h2o:budget=16")
    token = kvsketch.prefill(model, ids, cache).argmax(-1, keepdim=True)
    later = generate(model, torch.cat([ids, token], 1), cache, max_new_tokens=5).sequences
    assert later.tolist() == at_once.tolist()


def test_spans_leave_no_single_token() -> None:
    assert chunk_spans(10, None) == [(0, 10)] and chunk_spans(1, 4) == [(0, 1)] and chunk_spans(5, 4) == [(0, 5)]
    assert chunk_spans(8, 4) == [(0, 4), (4, 8)] and chunk_spans(9, 4) == [(0, 4), (4, 9)]
    assert chunk_spans(10, 4) == [(0, 4), (4, 8), (8, 10)] and chunk_spans(10, 4, True) == [(0, 4), (4, 10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "lazy"}, "prefill='lazy' is not one of exact, stream"),
        ({"prefill": "stream", "chunk": 1}, "chunk=1 is not"),
        ({"chunk": "2048"}, "chunk='2048' is not"),
        ({"chunk": True}, "chunk=True is not"),
    ],
)
def test_unknown_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedCache(zoo.build("llama"), "full", **options)


def test_prompts_that_cannot_be_streamed_are_refused() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 40)
    hole = torch.ones_like(ids)
    hole[0, 20] = 0
    for arguments, message in (
        ((ids, stream(model, "full"), hole), "left padding only"),
        ((ids, stream(model, "full"), hole[:, 1:]), r"attention_mask must be \[2, 40\]"),
        ((ids[0], stream(model, "full")), "input_ids must be token ids"),
        ((ids, DynamicCache(config=model.config)), "CompressedCache, not DynamicCache"),
    ):
        with pytest.raises(ValueError, match=message):
            kvsketch.prefill(model, *arguments)


def test_an_exact_cache_is_prefilled_in_one_forward() -> None:
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 40), [0, 13])
    cache, other = (CompressedCache(model, "snapkv:budget=16") for _ in range(2))
    logits = kvsketch.prefill(model, ids, cache, mask)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        expected = model(ids, attention_mask=mask, position_ids=positions, past_key_values=other).logits[:, -1]
    torch.testing.assert_close(logits, expected)
    assert_same_state(cache, other)


def test_a_share_is_of_the_whole_prompt() -> None:
    model = zoo.build("llama")
    for way in (kvsketch.prefill, lambda m, i, c: m(i, past_key_values=c)):
        cache = stream(model, "streamingllm:budget=25%:sinks=2")
        way(model, zoo.tokens(1, 80), cache)
        assert cache.tokens_stored == 20 and isinstance(cache.slot_layers[0].table, SlotTable)


def test_the_documented_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "long_contexts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {"model": zoo.build("llama"), "input_ids": zoo.tokens(1, 50)}
    exec(compile(code, "long_contexts.md", "exec", dont_inherit=True), names)
    assert names["text"].shape == (1, 59) and names["cache"].tokens_seen == 58 and names["cache"].tokens_stored == 16


def test_a_saved_stream_goes_on(tmp_path: Path) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, LENGTH)
    cache = stream(model, "subgen:budget=16")
    kvsketch.prefill(model, ids, cache)
    cache.save(tmp_path / "stream.kvs")
    loaded = CompressedCache.load(tmp_path / "stream.kvs", model)
    assert (loaded.prefill, loaded.chunk) == ("stream", CHUNK)
    assert torch.equal(*(kvsketch.prefill(model, ids, each) for each in (cache, loaded)))
    assert_same_state(cache, loaded)
