"""A document that others continue: read where it lies, never changed, and seen by each as if it were its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch import CompressedCache, ops
from kvsketch.cache.document import attention_to, joined
from kvsketch.slots import SlotTable, coding
from tests.helpers import zoo
from tests.helpers.common import also, generate
from tests.helpers.tiny import save_tiny_model

LENGTH, ASKED = 150, 21
REHEARSE = "rehearse:chunk=64:wait=64"
FORMS = [
    f"{REHEARSE}:bits=16",
    REHEARSE,
    f"{REHEARSE}:bits=8:share=head:refit=fold",
    "expected:bits=4:wait=64",
    "full",
    "full:bits=4",
]
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


def read(model: Any, method: str, length: int = LENGTH, seed: int = 0, **options: Any) -> CompressedCache:
    document = CompressedCache(model, method, **options)
    kvsketch.prefill(model, zoo.tokens(1, length, seed=seed), document)
    return document


def decoded(table: SlotTable) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and weights in float64, [B, H, S, ...]."""
    keys, values = table.key_slots().double(), table.value_slots().double()
    weights = table.log_weights()[1]
    return keys, values, torch.zeros(keys.shape[:3]).double() if weights is None else weights.double()


def softmax_over(parts: list[tuple[Tensor, Tensor, Tensor]], query: Tensor, scale: float) -> Tensor:
    """Attention of [B, Hq, n, D] queries to all parts in one softmax; weights [B, H, S] or [B, H, n, S]."""
    group, outputs = query.shape[1] // parts[0][0].shape[1], []
    for row in range(len(query)):
        logits, values = [], []
        for part in parts:
            keys, vectors, weights = (x[row if len(x) > 1 else 0].repeat_interleave(group, 0) for x in part)
            weights = weights if weights.dim() == 3 else weights.unsqueeze(1)
            logits.append(scale * query[row].double() @ keys.mT + weights)
            values.append(vectors)
        outputs.append(torch.cat(logits, -1).softmax(-1) @ torch.cat(values, 1))
    return torch.stack(outputs)


@pytest.fixture
def oracle() -> Iterator[Any]:
    """A model without any cache, whose attention reads a document's decoded slots and, causally, the new tokens."""
    documents: list[SlotTable] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        new = query.shape[2]
        hidden = torch.zeros(new, new).double().masked_fill(torch.ones(new, new).triu(1) > 0, -torch.inf)
        own = key.double(), value.double(), hidden.expand(*key.shape[:2], new, new)
        out = softmax_over([decoded(documents[module.layer_idx]), own], query, scaling)
        return out.to(query.dtype).transpose(1, 2), None

    def run(model: Any, document: CompressedCache, ids: Tensor) -> Tensor:
        documents[:] = [layer.table for layer in document.slot_layers]
        before = model.config._attn_implementation
        model.set_attn_implementation("document_oracle")
        try:
            at = torch.arange(ids.shape[1]) + document.tokens_seen
            return model(ids, position_ids=at.expand(ids.shape), use_cache=False).logits
        finally:
            model.set_attn_implementation(before)

    AttentionInterface.register("document_oracle", attend)
    AttentionMaskInterface.register("document_oracle", lambda *args, **kwargs: None)
    with torch.no_grad():
        yield run


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("length", [LENGTH, 40])
def test_logits_are_those_of_one_softmax_over_document_and_question(method: str, length: int, oracle: Any) -> None:
    """Whole, compressed, and too short for codes."""
    model = zoo.build("llama")
    document, ids = read(model, method, length), zoo.tokens(3, ASKED, seed=5)
    cache = document.continued()
    got = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, oracle(model, document, ids), **TOLERANCE)
    assert cache.tokens_seen == cache.get_seq_length() == length + ASKED and cache.tokens_before == length


@pytest.mark.parametrize("method", [f"{REHEARSE}:bits=16", "full", "expected:bits=16:wait=64"])
def test_steps_are_those_of_one_softmax_too(method: str, oracle: Any) -> None:
    model = zoo.build("llama")
    document, ids = read(model, method), zoo.tokens(2, ASKED, seed=5)
    cache = document.continued()
    got = [model(token, past_key_values=cache).logits for token in ids.split(1, 1)]
    torch.testing.assert_close(torch.cat(got, 1), oracle(model, document, ids), **TOLERANCE)


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_queries_read_codes_where_they_lie(method: str, dtype: torch.dtype) -> None:
    """The document and a tail that is held as its method holds it, in one softmax of decoded slots; keys with a large
    common part, as many models have.
    """
    model = copy.deepcopy(zoo.build("llama")).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.full((16,), 4.0, dtype=dtype))
    document = read(model, method)
    cache = document.continued()
    kvsketch.prefill(model, zoo.tokens(20, ASKED, seed=5), cache)
    for layer in cache.slot_layers:
        table = layer.table
        assert table.exact == (method == "full" or method.endswith("bits=16")) and table.document is not None
        query = torch.randn(20, 4, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        own = softmax_over([decoded(table)], query, 0.3)
        keys, _, weights = decoded(table)
        logits = 0.3 * query.double() @ keys.repeat_interleave(2, 1).mT + weights.repeat_interleave(2, 1).unsqueeze(2)
        got = joined(table, query, own.to(dtype), logits.logsumexp(-1).float(), 0.3)
        expected = softmax_over([decoded(table.document), decoded(table)], query, 0.3)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_many_queries_read_as_single_ones_do() -> None:
    model = zoo.build("llama")
    for method in FORMS:
        table = read(model, method).slot_layers[1].table
        query = torch.randn(3, 4, 5, 8, generator=torch.Generator().manual_seed(1))
        many = attention_to(table, query, 0.3, None)
        for n in range(5):
            one = attention_to(table, query[:, :, n : n + 1], 0.3, None)
            torch.testing.assert_close(many.out[:, :, n : n + 1], one.out, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(many.log_sum[:, :, n : n + 1], one.log_sum, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", [f"{REHEARSE}:bits=16", "full", "expected:bits=16:wait=64"])
@pytest.mark.parametrize("prefill", ["exact", "stream"])
def test_it_goes_on_as_a_copy_does_while_nothing_is_dropped(method: str, prefill: str) -> None:
    """Through generate with the whole text, and a second turn."""
    model = zoo.build("llama")
    document = read(model, method, prefill=prefill, chunk=64)
    plain, cache = copy.deepcopy(document), document.continued()
    text = torch.cat([zoo.tokens(1, LENGTH), zoo.tokens(1, ASKED, seed=5)], 1)
    for seed in (7, 8):
        one, other = generate(model, text, plain, max_new_tokens=5), generate(model, text, cache, max_new_tokens=5)
        assert one.sequences.tolist() == other.sequences.tolist()
        for a, b in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)
        text = torch.cat([one.sequences, zoo.tokens(1, 9, seed=seed)], 1)
    assert cache.tokens_seen == plain.tokens_seen
    assert cache.slot_layers[0].table.seen == plain.tokens_seen - LENGTH


@pytest.mark.parametrize("method", ["rehearse:bits=16:wait=512", "full"])
def test_token_by_token_is_at_once(method: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, ASKED, seed=5)
    document = read(model, method)
    one, other = document.continued(), document.continued()
    logits = kvsketch.prefill(model, ids, one)
    for token in ids.split(1, 1):
        last = kvsketch.prefill(model, token, other)
    torch.testing.assert_close(logits, last, **TOLERANCE)
    torch.testing.assert_close(one.slot_layers[1].keys[:, :, :ASKED], other.slot_layers[1].keys[:, :, :ASKED])


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("prefill", ["exact", *also("stream")])
def test_a_row_alone_is_that_row_of_a_padded_batch(method: str, prefill: str) -> None:
    model, pads = zoo.build("llama"), [0, 4, 15]
    document = read(model, method, prefill=prefill, chunk=64)
    ids, mask = zoo.tokens(3, ASKED, seed=5), torch.ones(3, ASKED, dtype=torch.long)
    for row, count in enumerate(pads):
        ids[row, :count], mask[row, :count] = 0, 0
    text = torch.cat([zoo.tokens(1, LENGTH).expand(3, -1), ids], 1)
    whole = torch.cat([torch.ones(3, LENGTH, dtype=torch.long), mask], 1)
    together = generate(model, text, document.continued(), attention_mask=whole, max_new_tokens=6)
    by_hand = document.continued()
    first = kvsketch.prefill(model, ids, by_hand, mask)
    torch.testing.assert_close(first, together.logits[0], **TOLERANCE)
    for row, count in enumerate(pads):
        alone = torch.cat([text[row : row + 1, :LENGTH], ids[row : row + 1, count:]], 1)
        expected = generate(model, alone, document.continued(), max_new_tokens=6)
        assert expected.sequences[0, -6:].tolist() == together.sequences[row, -6:].tolist()
        for a, b in zip(expected.logits, together.logits, strict=True):
            torch.testing.assert_close(a[0], b[row], atol=2e-4, rtol=2e-3)


def tensors_of(cache: CompressedCache) -> list[Tensor]:
    return [tensor.clone() for layer in cache.slot_layers for tensor in layer.table.tensors()]


@pytest.mark.parametrize("method", [*FORMS[1::2], *also(*FORMS[::2])])
def test_a_long_tail_is_compressed_and_the_document_stays_as_it_is(method: str) -> None:
    model = zoo.build("llama", max_position_embeddings=2048)
    document = read(model, method)
    before = tensors_of(document)
    one, other = document.continued(), document.continued()
    kvsketch.prefill(model, zoo.tokens(1, ASKED, seed=5), other)
    expected = tensors_of(other)
    kvsketch.prefill(model, zoo.tokens(1, 100, seed=6), one)
    for token in zoo.tokens(1, 76, seed=7).split(1, 1):
        kvsketch.prefill(model, token, one)
    for after, held in ((tensors_of(document), before), (tensors_of(other), expected)):
        assert all(torch.equal(a, b) for a, b in zip(after, held, strict=True))
    tables = [layer.table for layer in one.slot_layers]
    assert tables[0].seen == 176 and one.tokens_seen == LENGTH + 176
    if method.startswith("full"):
        assert one.tokens_stored == 176
        return
    # Half of what it has read and what waits; a budget of its own, in which the document has no part.
    used = torch.stack([table.used_slots() for table in tables]).double().mean()
    waiting = one.method.queue(tables[0]).count
    assert 0 < waiting < 64 and tables[0].settled == 176 - waiting
    prompt = max(100, min(tables[0].settled, getattr(one.method, "chunk", 176)))
    assert float(used) <= prompt // 2 + waiting + 1
    assert one.device_bytes == sum(tensor.nbytes for tensor in tensors_of(one))


@pytest.mark.parametrize("bits", [16, 4])
def test_a_tail_of_few_tokens_has_the_center_of_its_document(bits: int) -> None:
    model = zoo.build("llama")
    cache = read(model, f"{REHEARSE}:bits={bits}").continued()
    kvsketch.prefill(model, zoo.tokens(2, 3, seed=5), cache)
    for layer in cache.slot_layers:
        table, text = layer.table, layer.table.document
        assert text is not None and not coding.waits(table)
        if bits == 4:
            assert not table.exact and (table.keys.exact_at == -1).all()
            assert torch.equal(table.keys.center, text.keys.center.expand(2, -1, -1))
            assert table.keys.center.data_ptr() != text.keys.center.data_ptr()


def test_the_first_tokens_of_a_tail_may_go() -> None:
    """They are no sinks, and all tokens of a tail but the last `recent` compete."""
    model = zoo.build("llama")
    cache = read(model, "rehearse:budget=25%:chunk=64:wait=64:recent=8:sinks=32:bits=16").continued()
    kvsketch.prefill(model, zoo.tokens(1, 100, seed=6), cache)
    index = torch.cat([layer.table.index_slots().flatten() for layer in cache.slot_layers])
    held = torch.bincount(index[index >= 0], minlength=100)
    assert (held[-8:] == 4).all() and (held[:32] < 4).any()
    assert held.sum() / 4 <= 25


def test_a_tail_is_rehearsed_behind_the_first_tokens_of_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of it sees them, the first one too."""
    model, scores, result = zoo.build("llama"), ops.replay_scores, []

    def noted(again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, **options: Any) -> Tensor:
        result.append((sinks, options["bare"]))
        return scores(again, q, k, sinks, scale, **options)

    document = read(model, f"{REHEARSE}:sinks=3:bits=16")
    monkeypatch.setattr(ops, "replay_scores", noted)
    kvsketch.prefill(model, zoo.tokens(2, 130, seed=6), document.continued())
    assert len(result) >= 2
    for number, (sinks, bare) in enumerate(result):
        table = document.slot_layers[number * 2 // len(result)].table
        first = (table.index_slots()[0] < 3) & (table.index_slots()[0] >= 0)
        expected = torch.stack([keys[held] for keys, held in zip(table.key_slots()[0], first, strict=True)])
        assert torch.equal(sinks, expected.expand(2, -1, -1, -1)) and bare == 0


def test_crop_reset_and_copies() -> None:
    model = zoo.build("llama")
    document = read(model, REHEARSE)
    cache, ids = document.continued(), zoo.tokens(1, ASKED, seed=5)
    first = kvsketch.prefill(model, ids, cache)
    other = copy.deepcopy(cache)
    assert other.slot_layers[0].table.document is document.slot_layers[0].table
    assert other.slot_layers[0].table.index.data_ptr() != cache.slot_layers[0].table.index.data_ptr()
    step = kvsketch.prefill(model, ids[:, :1], cache)
    cache.crop(-1)
    assert cache.tokens_seen == LENGTH + ASKED
    torch.testing.assert_close(kvsketch.prefill(model, ids[:, :1], cache), step)
    with pytest.raises(ValueError, match=rf"crop\(-{ASKED + 2}\) removes tokens of the document .* {ASKED + 1} of its"):
        cache.crop(-ASKED - 2)
    cache.crop(-ASKED - 1)
    assert cache.tokens_seen == LENGTH
    torch.testing.assert_close(kvsketch.prefill(model, ids, cache), first)
    cache.reset()
    assert cache.tokens_seen == LENGTH and cache.tokens_stored == 0
    text = torch.cat([zoo.tokens(1, LENGTH), ids], 1)
    torch.testing.assert_close(generate(model, text, cache, max_new_tokens=1).logits[0], first)
    assert kvsketch.prefill(model, ids[:, :1], other).equal(step)


def test_beams_are_those_of_a_copy() -> None:
    model = zoo.build("llama")
    document = read(model, f"{REHEARSE}:bits=16")
    text = torch.cat([zoo.tokens(1, LENGTH), zoo.tokens(1, ASKED, seed=5)], 1).repeat(2, 1)
    text[1, -1] += 1
    copied = copy.deepcopy(document)
    copied.reorder_cache(torch.zeros(6, dtype=torch.long))
    one = generate(model, text, copied, num_beams=3, num_return_sequences=3)
    other = generate(model, text, document.continued(), num_beams=3, num_return_sequences=3)
    assert one.sequences.tolist() == other.sequences.tolist()


def test_a_document_takes_nothing_while_others_continue_it() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 5, seed=5)
    document = read(model, REHEARSE)
    cache = document.continued()
    for change in (
        lambda: kvsketch.prefill(model, ids, document),
        lambda: document.crop(-1),
        lambda: document.reorder_cache(torch.tensor([0, 0])),
    ):
        with pytest.raises(
            RuntimeError, match=r"other caches continue the 150 tokens of this cache.*cache\.continued\(\)"
        ):
            change()
    expected = kvsketch.prefill(model, ids, document.continued())
    kvsketch.prefill(model, ids, copy.deepcopy(document))
    document.reset()
    kvsketch.prefill(model, ids, document)
    assert document.tokens_seen == 5
    torch.testing.assert_close(kvsketch.prefill(model, ids, cache), expected)


def test_a_forward_that_breaks_off_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, ASKED, seed=5)
    document = read(model, REHEARSE)
    cache, other = document.continued(), document.continued()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kvsketch.prefill(model, ids, cache)
    with pytest.raises(RuntimeError, match="interrupted"):
        kvsketch.prefill(model, ids, cache)
    expected = kvsketch.prefill(model, ids, other)
    cache.reset()
    torch.testing.assert_close(kvsketch.prefill(model, ids, cache), expected)


def test_what_is_refused(tmp_path: Path) -> None:
    model = zoo.build("llama")
    document = read(model, REHEARSE)
    cache = document.continued()
    with pytest.raises(ValueError, match="continues a document itself"):
        cache.continued()
    with pytest.raises(ValueError, match="a cache that continues a document cannot be saved"):
        cache.save(tmp_path / "cache.kvs")
    with pytest.raises(ValueError, match="the cache has read nothing yet"):
        CompressedCache(model, REHEARSE).continued()
    with pytest.raises(ValueError, match=r"snapkv:budget=32.* use one of full, expected, rehearse"):
        read(model, "snapkv:budget=32:window=8").continued()
    with pytest.raises(ValueError, match="cannot be continued by several texts"):
        read(model, "rehearse:replay=exact").continued()
    pair = CompressedCache(model, REHEARSE)
    kvsketch.prefill(model, zoo.tokens(2, 70), pair)
    with pytest.raises(ValueError, match=r"a document is one text without padding, and this cache has 2 row"):
        pair.continued()
    with pytest.raises(ValueError, match="sliding-window or linear layers"):
        read(zoo.build("gemma3"), "full").continued()
    with pytest.raises(ValueError, match="deepseek_v3 has latent attention, whose slots are not shared"):
        read(zoo.build("deepseek_v3"), "full").continued()
    mask = torch.ones(1, LENGTH + 4, dtype=torch.long)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="hides token 3 of the document from batch row 0"):
        kvsketch.prefill(model, zoo.tokens(1, 4), cache, mask)
    with pytest.raises(ValueError, match="mpt adds a bias"):
        read(zoo.build("mpt"), "full").continued()


def test_another_text_is_refused() -> None:
    model = zoo.build("llama")
    document = read(model, REHEARSE)
    text = torch.cat([zoo.tokens(1, LENGTH), zoo.tokens(1, ASKED, seed=5)], 1).repeat(2, 1)
    text[1, 7] += 1
    with pytest.raises(ValueError, match="are not the text that this cache has read"):
        generate(model, text, document.continued())


def test_questions_are_those_about_a_copy(tmp_path: Path) -> None:
    """`ask` goes on in the user's turn that the text has opened, and a second question in a turn of its own."""
    folder = save_tiny_model(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    document = CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, document, "The harbour was rebuilt in 1921. " * 4)
    caches = copy.deepcopy(document), document.continued(), document.continued()
    for question in ("When was it rebuilt?", "And before?"):
        answers = [kvsketch.ask(model, tokenizer, cache, question, max_new_tokens=8) for cache in caches]
        assert answers[0] == answers[1] == answers[2]
    assert caches[0].tokens_seen == caches[1].tokens_seen > document.tokens_seen


def test_what_it_takes_and_what_it_shares() -> None:
    model = zoo.build("llama")
    document = read(model, REHEARSE)
    cache = document.continued()
    kvsketch.prefill(model, zoo.tokens(1, ASKED, seed=5), cache)
    assert cache.device_bytes < document.device_bytes
    shared = sum(tensor.nbytes for tensor in tensors_of(document))
    last = cache.describe().splitlines()[-1]
    assert last == f"document: 150 tokens, {shared:,} bytes that others may share"


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "gpt2", "opt", "gptj", "stablelm"])
def test_other_families(family: str) -> None:
    model = zoo.build(family)
    document = read(model, "full")
    text = torch.cat([zoo.tokens(1, LENGTH), zoo.tokens(1, ASKED, seed=5)], 1)
    one = generate(model, text, copy.deepcopy(document))
    other = generate(model, text, document.continued())
    for a, b in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
