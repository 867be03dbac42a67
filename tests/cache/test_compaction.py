"""Spans that are rehearsed where they lie: the rest stays bit for bit, shares are kept, turns go on behind them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch.cache.replay.compaction import Span
from kvsketch.methods import parse_method
from kvsketch.methods.waiting import Waiting
from kvsketch.slots import packing
from tests.helpers import zoo
from tests.helpers.common import padded, read_pieces

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SPANS = [Span("system", 0, 60), Span("tool", 70, 230)]
EIGHTH = {"tool": "1/8"}
PLAIN = "rehearse:wait=compact:bits=16"
EXACT, WHOLE = f"{PLAIN}:replay=exact", "rehearse:replay=exact:bits=16:recent=0:budget=1/4"
BOTH = pytest.mark.parametrize("method", [PLAIN, EXACT], ids=["virtual", "exact"])


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", **BIG)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return zoo.tokens(1, 340)


def read(model: Any, cache: Any, ids: Tensor, *pieces: tuple[int, int], mask: Tensor | None = None) -> Tensor:
    return read_pieces(model, cache, ids, torch.ones_like(ids) if mask is None else mask, list(pieces))


def compacted(model: Any, ids: Tensor, method: str = PLAIN, spans: Any = SPANS, shares: Any = EIGHTH) -> Any:
    cache = CompressedCache(model, method)
    read(model, cache, ids, (0, 250))
    cache.compact(spans, shares, model, ids[:, :250])
    return cache


def contents(cache: Any, row: int = 0) -> list[dict[int, tuple[Tensor, Tensor, float]]]:
    """Key, value and weight of each token, for every head of every layer."""
    result = []
    for table in (copy.deepcopy(layer.table) for layer in cache.slot_layers):
        packing.unpack(table)
        index, keys, values = table.index_slots()[row], table.key_slots()[row], table.value_slots()[row]
        weights = table.log_weights()[1]
        for head in range(len(index)):
            here = [(int(at), slot) for slot, at in enumerate(index[head].tolist()) if at >= 0]
            result.append(
                {
                    at: (
                        keys[head, slot],
                        values[head, slot],
                        0.0 if weights is None else float(weights[row, head, slot]),
                    )
                    for at, slot in here
                }
            )
    return result


@BOTH
def test_compacting_nothing_changes_nothing(model: Any, ids: Tensor, method: str) -> None:
    full, cache = CompressedCache(model, "full"), CompressedCache(model, method)
    for each in (full, cache):
        read(model, each, ids, (0, 250))
    before = cache.device_bytes
    cache.compact([Span("system", 0, 200), Span("tool", 210, 240)], {"tool": "1/1"})
    # The queries of what is decided go.
    assert (cache.device_bytes < before) if method == PLAIN else (before == cache.device_bytes == full.device_bytes)
    later = [(250, 251), (251, 300), (300, 301)]
    assert torch.equal(read(model, cache, ids, *later), read(model, full, ids, *later))


@BOTH
def test_what_lies_outside_stays_bit_for_bit(model: Any, ids: Tensor, method: str) -> None:
    full = CompressedCache(model, "full")
    read(model, full, ids, (0, 250))
    for kept, whole in zip(contents(compacted(model, ids, method)), contents(full), strict=True):
        outside = set(range(250)) - set(range(70, 230))
        assert outside <= set(kept)
        for at in outside:
            assert all(map(torch.equal, kept[at][:2], whole[at][:2])) and kept[at][2] == 0


@BOTH
@pytest.mark.parametrize("share", ["head", "model"])
def test_a_span_keeps_its_share(model: Any, ids: Tensor, share: str, method: str) -> None:
    cache = compacted(model, ids, f"{method}:share={share}")
    counts = torch.tensor([sum(70 <= at < 230 for at in head) for head in contents(cache)])
    assert counts.float().mean() == 160 // 8 and ((counts == 20).all() or share == "model")
    small, large = (compacted(model, ids, method, shares={"tool": each}).device_bytes for each in ("1/8", "1/2"))
    slot = 2 * 16 * 4  # bytes of a key and a value
    assert large - small >= 60 * len(counts) * slot


def test_the_best_of_a_span_are_those_of_the_formula(model: Any, ids: Tensor) -> None:
    """score(j) = max over repeated queries i of softmax over the span, the sinks and the repetition up to i."""
    cache = CompressedCache(model, f"{PLAIN}:share=head:refit=none")
    read(model, cache, ids, (0, 250))
    before = copy.deepcopy(cache)
    cache.compact([SPANS[1]], EIGHTH)
    held = contents(cache)
    for number, layer in enumerate(before.slot_layers):
        table = layer.table
        # The stretch before the span is decided too; queries are those that waited.
        q = before.method.queue(table).kept_queries(230)[0, :, 70:]  # type: ignore[attr-defined]
        keys, sinks = table.key_slots()[0, :, 70:230], table.key_slots()[0, :, : before.method.sinks]  # type: ignore[attr-defined]
        shift = 24 + 250 - 70
        angle = shift * torch.tensor(table.context.rotary)
        cos, sin = angle.cos(), angle.sin()
        a, b = q.float().chunk(2, -1)
        far = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        group = q.shape[0] // keys.shape[0]
        for head in range(keys.shape[0]):
            own = slice(head * group, (head + 1) * group)
            first, sunk = far[own] @ keys[head].T * table.forward.scale, far[own] @ sinks[head].T * table.forward.scale
            again = (q[own].float() @ keys[head].T * table.forward.scale).masked_fill(
                torch.ones(160, 160, dtype=torch.bool).triu(1), float("-inf")
            )
            score = torch.cat([first, sunk, again], -1).softmax(-1)[..., :160].amax((0, 1))
            best = {70 + int(at) for at in score.topk(20).indices}
            kept = {at for at in held[number * keys.shape[0] + head] if 70 <= at < 230}
            assert len(best & kept) >= 19 and len(kept) == 20  # of equal scores either may stay


@BOTH
def test_more_slots_and_a_refit_lose_less(model: Any, ids: Tensor, method: str) -> None:
    full = CompressedCache(model, "full")
    read(model, full, ids, (0, 250))
    exact = read(model, full, ids, (250, 300))

    def error(method: str, share: str) -> float:
        result = read(model, compacted(model, ids, method, shares={"tool": share}), ids, (250, 300))
        return float((result - exact).norm() / exact.norm())

    assert error(method, "1/2") < error(method, "1/8") < error(f"{method}:refit=none", "1/8") < 1
    assert error(method.replace("16", "4"), "1/8") < 1.5 * error(method, "1/8") + 0.05


@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_alone_equals_that_row_in_a_padded_batch(model: Any, bits: int) -> None:
    text, mask = padded(zoo.tokens(2, 300), [0, 30])
    together, alone = (CompressedCache(model, f"rehearse:wait=compact:bits={bits}") for _ in range(2))
    for cache, rows, skip in ((together, slice(0, 2), 0), (alone, slice(1, 2), 30)):
        own, seen = text[rows, skip:], mask[rows, skip:]
        read(model, cache, own, (0, 250 - skip), mask=seen)
        cache.compact([Span("tool", 70 - skip, 230 - skip)], EIGHTH)
    for pieces in ([(250, 251)], [(251, 290)], [(290, 291)]):
        batched = read(model, together, text, *pieces, mask=mask)[:, 1:]
        one = read(model, alone, text[1:, 30:], *[(a - 30, b - 30) for a, b in pieces], mask=mask[1:, 30:])
        torch.testing.assert_close(batched, one, atol=2e-3, rtol=2e-3)


@BOTH
def test_a_text_read_token_by_token_is_compacted_as_one_read_at_once(model: Any, ids: Tensor, method: str) -> None:
    once, slowly = CompressedCache(model, method), CompressedCache(model, method)
    read(model, once, ids, (0, 250))
    read(model, slowly, ids, (0, 40), *((at, at + 1) for at in range(40, 100)), (100, 220), (220, 250))
    for cache in (once, slowly):
        cache.compact(SPANS, EIGHTH, model, ids[:, :250])
    torch.testing.assert_close(
        read(model, slowly, ids, (250, 300)), read(model, once, ids, (250, 300)), atol=2e-3, rtol=2e-3
    )


@BOTH
def test_a_second_span_leaves_the_first_as_it_is(model: Any, ids: Tensor, method: str) -> None:
    cache = compacted(model, ids, method)
    first = contents(cache)
    read(model, cache, ids, (250, 251), (251, 330), (330, 331))
    repeated = cache.compact([*SPANS, Span("tool", 255, 319)], EIGHTH, model, ids[:, :331])
    assert repeated == (64 if method == EXACT else 0)
    for before, now in zip(first, contents(cache), strict=True):
        assert set(range(230, 255)) | set(range(319, 331)) <= set(now)
        for at, (key, value, weight) in before.items():
            assert torch.equal(now[at][0], key) and torch.equal(now[at][1], value) and now[at][2] == weight
    assert sum(sum(255 <= at < 319 for at in head) for head in contents(cache)) == 8 * len(first)
    assert torch.isfinite(read(model, cache, ids, (331, 340))).all()


@BOTH
def test_tokens_behind_a_span_can_be_taken_back_and_those_before_its_end_cannot(
    model: Any, ids: Tensor, method: str
) -> None:
    cache, other = (compacted(model, ids, method) for _ in range(2))
    read(model, cache, ids, (250, 300), (300, 301))
    cache.crop(-51)
    torch.testing.assert_close(read(model, cache, ids, (250, 260)), read(model, other, ids, (250, 260)))
    with pytest.raises(RuntimeError, match="compressed them already"):
        cache.crop(-40)
    assert cache.tokens_seen == 260


def test_rows_are_reordered_with_what_waits(model: Any) -> None:
    text, mask = padded(zoo.tokens(2, 300), [0, 0])
    cache = CompressedCache(model, PLAIN)
    read(model, cache, text, (0, 250), mask=mask)
    cache.compact([Span("tool", 70, 150)], EIGHTH)
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    for each in (cache, other):
        each.compact([Span("tool", 160, 240)], EIGHTH)
    result = read(model, other, text.flip(0), (250, 280), mask=mask)
    torch.testing.assert_close(result.flip(1), read(model, cache, text, (250, 280), mask=mask), atol=1e-4, rtol=1e-4)


def test_bfloat16_with_a_large_common_part_of_keys(ids: Tensor) -> None:
    model = zoo.build("qwen2", **BIG).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.fill_(8.0)
    full = CompressedCache(model, "full")
    read(model, full, ids, (0, 250))
    exact = read(model, full, ids, (250, 300)).float()
    for bits in (16, 4):
        cache = compacted(model, ids, f"rehearse:wait=compact:bits={bits}", shares={"tool": "1/2"})
        result = read(model, cache, ids, (250, 300)).float()
        assert float((result - exact).norm() / exact.norm()) < 0.3


@BOTH
def test_a_saved_cache_goes_on(model: Any, ids: Tensor, tmp_path: Any, method: str) -> None:
    cache = compacted(model, ids, method)
    cache.save(tmp_path / "chat.kvs")
    loaded = CompressedCache.load(tmp_path / "chat.kvs", model)
    for each in (cache, loaded):
        read(model, each, ids, (250, 330))
        each.compact([Span("tool", 240, 320)], EIGHTH, model, ids[:, :330])
    assert torch.equal(read(model, cache, ids, (330, 340)), read(model, loaded, ids, (330, 340)))


def test_queries_wait_only_with_tokens_that_are_not_decided(model: Any, ids: Tensor) -> None:
    cache = compacted(model, ids)
    for layer in cache.slot_layers:
        state = layer.table.state_of(Waiting)
        assert layer.table.settled == 230 and state.queries is not None and 20 <= state.room < 20 + 64


@pytest.mark.parametrize(
    ("method", "spans", "shares", "told"),
    [
        ("full", SPANS, EIGHTH, "full compacts no spans; use rehearse:wait=compact"),
        ("rehearse", SPANS, EIGHTH, "compacts no spans"),
        (PLAIN, SPANS, {"tool": "5"}, None),
        (PLAIN, SPANS, {"tool": "a lot"}, "share of tool='a lot'"),
        (PLAIN, [Span("tool", 0, 251)], EIGHTH, "must lie in the tokens from 0 to 250"),
        (PLAIN, [Span("tool", 0, 90), Span("tool", 80, 100)], EIGHTH, "overlap"),
    ],
)
def test_what_cannot_be_compacted_is_refused(
    model: Any, ids: Tensor, method: str, spans: Any, shares: Any, told: str | None
) -> None:
    cache = CompressedCache(model, method)
    read(model, cache, ids, (0, 250))
    if told is None:
        cache.compact(spans, shares)
        return
    with pytest.raises(ValueError, match=told):
        cache.compact(spans, shares)
    read(model, cache, ids, (250, 260))


def test_a_repetition_of_spans_is_that_of_the_whole_text(model: Any, ids: Tensor) -> None:
    """One span that is the whole text, all of it in one chunk, keeps what `replay=exact` keeps of a prompt."""
    cache, other = CompressedCache(model, EXACT), CompressedCache(model, WHOLE)
    read(model, cache, ids, (0, 250))
    assert cache.compact([Span("tool", 0, 250)], {"tool": "1/4"}, model, ids[:, :250]) == 250
    prefill(model, ids[:, :250], other)
    for one, two in zip(contents(cache), contents(other), strict=True):
        assert set(one) == set(two)
        assert all(torch.equal(one[at][1], two[at][1]) and one[at][2] == two[at][2] for at in one)


@pytest.mark.parametrize("chunk", [2048, 64])
def test_the_model_repeats_the_span_and_the_tokens_before_it(model: Any, ids: Tensor, chunk: int) -> None:
    """Piece by piece, each behind the eight tokens before it, wherever in the text it lies."""
    cache, heard = CompressedCache(model, f"{EXACT}:chunk={chunk}"), []
    read(model, cache, ids, (0, 250))
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    try:
        cache.compact([SPANS[1]], EIGHTH, model, ids[:, :250])
    finally:
        hook.remove()
    assert len(heard) == (1 if chunk > 160 else 2)
    assert torch.equal(heard[0][:, :8], ids[:, 62:70])
    assert torch.equal(torch.cat([said[:, 8:] for said in heard], 1), ids[:, 70:230])
    assert all(torch.equal(after[:, :8], before[:, -8:]) for before, after in itertools.pairwise(heard))


def test_spans_behind_a_document_are_counted_from_its_beginning(model: Any, ids: Tensor) -> None:
    document = CompressedCache(model, PLAIN)
    read(model, document, zoo.tokens(1, 90, seed=3), (0, 90))
    cache = document.continued()
    prefill(model, ids[:, :250], cache)
    for begin, end in ((80, 200), (100, 341)):
        with pytest.raises(ValueError, match="must lie in the tokens from 90 to 340"):
            cache.compact([Span("tool", begin, end)], EIGHTH)
    cache.compact([Span("tool", 160, 220), Span("tool", 240, 320)], EIGHTH)
    for head in contents(cache):
        assert set(head) >= set(range(70)) | set(range(130, 150)) | set(range(230, 250))
    counts = [
        sum(begin <= at < end for head in contents(cache) for at in head) for begin, end in ((70, 130), (150, 230))
    ]
    assert counts == [len(contents(cache)) * kept for kept in (60 // 8, 80 // 8)]


@pytest.mark.parametrize("share", ["head", "model"])
def test_padding_is_no_part_of_a_span(model: Any, share: str) -> None:
    text, mask = padded(zoo.tokens(2, 300), [0, 40])
    cache = CompressedCache(model, f"{PLAIN}:share={share}")
    read(model, cache, text, (0, 250), mask=mask)
    cache.compact([Span("tool", 0, 200)], EIGHTH)
    for row, tokens in enumerate((200, 160)):
        counts = [sum(at < 200 for at in head) for head in contents(cache, row)]
        assert sum(counts) == len(counts) * tokens // 8 and (share == "model" or set(counts) == {tokens // 8})


def test_a_repetition_needs_the_model_its_tokens_and_positions(model: Any, ids: Tensor) -> None:
    cache = CompressedCache(model, EXACT)
    read(model, cache, ids, (0, 250))
    for given in ((), (model,), (model, ids[:, :100])):
        with pytest.raises(ValueError, match=r"cache\.compact\(spans, shares, model, input_ids\)|whole prompt"):
            cache.compact(SPANS, EIGHTH, *given)
    before = cache.device_bytes
    few = zoo.build("gpt2", n_positions=300)  # in a table; rotary embeddings go on
    short = CompressedCache(few, EXACT)
    read(few, short, ids, (0, 250))
    held = short.device_bytes
    assert short.compact(SPANS, EIGHTH, few, ids[:, :250]) == 0 and short.device_bytes == held
    assert short.compact([Span("tool", 200, 240)], EIGHTH, few, ids[:, :250]) == 40
    assert cache.compact(SPANS, EIGHTH, model, ids[:, :250]) == 160 and cache.device_bytes < before


def test_a_promise_and_compaction_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="wait=compact"):
        parse_method("rehearse:wait=compact:loss=2%")
