"""`cache.crop`: afterwards the tokens have never come, or the cache says why not and is as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import rollback
from kvsketch.slots.bytes import host_tensors
from tests.helpers import zoo
from tests.helpers.common import FED, bounded, generate, padded, thinned, with_budget

METHODS = list(FED)
BOUNDED = bounded()
RECALL = [n for n, m in FED.items() if m.family == "recall"]
SCORED = [name for name, method in FED.items() if method.wants_logits]  # by the attention they receive
REFUSED = "cannot remove its last {count} tokens.*activate_past_recording"


def read(model: Any, cache: Any, ids: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
    """Feeds the next tokens of `ids` in pieces; the logits after each piece."""
    logits = []
    with torch.no_grad():
        for piece in pieces:
            start, end = cache.get_seq_length(), cache.get_seq_length() + piece
            given = {}
            if mask is not None:
                positions = (mask[:, :end].cumsum(-1) - 1).clamp_min(0)[:, start:]
                given = {"attention_mask": mask[:, :end], "position_ids": positions}
            logits.append(model(ids[:, start:end], past_key_values=cache, **given).logits[:, -1])
    return torch.stack(logits)


def without(pieces: list[int], count: int) -> list[int]:
    """The pieces without their last `count` tokens."""
    left = sum(pieces) - count
    cut = []
    for piece in pieces:
        cut.append(min(piece, left - sum(cut)))
    return [piece for piece in cut if piece > 0]


def state(cache: CompressedCache) -> list[Any]:
    """Everything a cache holds, to be compared later."""
    result: list[Any] = []
    for layer in cache.layers:
        if layer in cache.slot_layers:
            table = layer.table
            counters = [table.seen, table.length, table.forward.appended, table.new_tokens, table.prompt_tokens]
            held = [table.state.numbers(), table.hot.numbers(), table.tensors(), host_tensors(table), layer.pending]
            result += copy.deepcopy([*counters, *held])
        else:
            result += copy.deepcopy([layer.keys, layer.values, layer.get_seq_length()])
    return result


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        # Slots that no token was written to may hold anything, a nan too.
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in [*BOUNDED, *(f"{name}:offload=host" for name in RECALL)]), ("h2o", "gemma3")],
)
def test_what_was_compressed_cannot_be_taken_back(name: str, family: str) -> None:
    model, ids = zoo.build(family), zoo.tokens(1, 70)
    method, _, offload = name.partition(":")
    cache = CompressedCache(model, ":".join([with_budget(method, 16), *([offload] if offload else [])]))
    for pieces, count in (([50], 3), ([1], 1), ([1], 2), ([4], 2)):
        read(model, cache, ids, pieces)
        before, untouched = state(cache), copy.deepcopy(cache)
        with pytest.raises(RuntimeError, match=REFUSED.format(count=count)):
            cache.crop(-count)
        assert_same(state(cache), before)
        assert torch.equal(read(model, cache, ids, [1]), read(model, untouched, ids, [1]))


@pytest.mark.parametrize("name", thinned(METHODS))
def test_a_row_that_is_cropped_to_padding_alone_begins_with_the_next_token(name: str) -> None:
    """The crop takes back the padding behind it too: what comes next is real."""
    model, (ids, mask) = zoo.build("llama"), padded(zoo.tokens(2, 90), [0, 45])
    cache, never = (CompressedCache(model, with_budget(name, 62)) for _ in range(2))
    cache.activate_past_recording()
    never.activate_past_recording()
    read(model, cache, ids, [60], mask)
    cache.crop(-30)
    mask[1, 30:] = 1
    read(model, never, ids, [30], mask)
    result, expected = (read(model, each, ids, [20, 1, 30, 1], mask) for each in (cache, never))
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


# pieces, tokens taken back; the last two reach behind the last forward
TALKS = [([50], 3), ([50, 1, 1, 1], 2), ([30, 20], 7), ([30, 20, 1], 1), ([50, 1, 1, 1], 5), ([50, 1, 1, 6], 7)]


@pytest.mark.parametrize(
    ("name", "budget", "padding"),
    thinned([*((name, "16", [0, 11]) for name in METHODS), *((name, "96", [0]) for name in METHODS if name != "full"),
             *((name, "50%", [0, 11]) for name in ("h2o", *RECALL))]),
)  # fmt: skip
def test_tokens_taken_back_never_came_or_the_crop_is_refused(name: str, budget: str, padding: list[int]) -> None:
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(len(padding), 90), padding)
    method, refused = with_budget(name, 16).replace("budget=16", f"budget={budget}"), []
    for pieces, count in TALKS:
        cache, other = CompressedCache(model, method), CompressedCache(model, method)
        read(model, cache, ids, pieces, mask)
        try:
            cache.crop(-count)
        except RuntimeError:
            refused.append((pieces, count))
            continue
        read(model, other, ids, without(pieces, count), mask)
        assert cache.tokens_seen == other.tokens_seen == sum(pieces) - count
        for a, b in zip(cache.slot_layers, other.slot_layers, strict=True):
            assert a.table.prompt_tokens == b.table.prompt_tokens
        ours, theirs = (read(model, each, ids, [1, 6, 1, 12, 1], mask) for each in (cache, other))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    if name == "full":
        assert not refused
    elif name in BOUNDED:
        # A table that dropped nothing may lose tokens, unless they have voted already.
        assert len(refused) == len(TALKS) if budget != "96" or name in SCORED else not refused
    else:
        # Generated tokens can be taken back; of a prompt an index may have learned.
        assert ([50, 1, 1, 1], 2) not in refused and ([30, 20, 1], 1) not in refused
        assert (name != "quest") == bool(refused) or budget == "96"


@pytest.mark.parametrize("name", thinned(METHODS))
def test_all_tokens_can_always_go(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 60)
    cache, new = (CompressedCache(model, with_budget(name, 16)) for _ in range(2))
    read(model, cache, ids, [40, 1, 6])
    cache.crop(-47)
    assert cache.tokens_seen == cache.device_bytes == 0
    assert torch.equal(*(read(model, each, ids[:1], [40, 1, 6]) for each in (cache, new)))


@pytest.mark.parametrize(("name", "family"), [*thinned((name, "llama") for name in METHODS), ("h2o", "gemma3")])
def test_no_token_can_go_at_any_time(name: str, family: str) -> None:
    """transformers crops by 0, as an int or a tensor, after every forward of assisted decoding."""
    model, ids = zoo.build(family), zoo.tokens(1, 70)
    cache = CompressedCache(model, with_budget(name, 16))
    cache.crop(0)
    for piece in (50, 1, 4):
        read(model, cache, ids, [piece])
        before = state(cache)
        cache.crop(0)
        cache.crop(torch.tensor(0))
        assert_same(state(cache), before)


def test_all_layers_are_asked_before_one_is_cropped() -> None:
    """The window of the last layer has dropped tokens; the layer before it, which could crop, must not."""
    model, ids = zoo.build("gemma3"), zoo.tokens(1, 40)
    cache = CompressedCache(model, "full")
    read(model, cache, ids, [6])
    cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {4}
    read(model, cache, ids, [20])
    before = state(cache)
    with pytest.raises(RuntimeError, match="layer 0, a sliding window of 8 has dropped"):
        cache.crop(-2)
    assert_same(state(cache), before)
    cache.activate_past_recording()
    read(model, cache, ids, [4])
    cache.crop(torch.tensor(-3))
    rollback.end_recording(cache.layers)
    other = CompressedCache(model, "full")
    read(model, other, ids, [4, 20, 1])
    torch.testing.assert_close(*(read(model, each, ids, [1, 3]) for each in (cache, other)))


@pytest.mark.parametrize("count", [3, -51])
def test_numbers_that_make_no_sense(count: int) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 50)
    cache = CompressedCache(model, "full")
    read(model, cache, ids, [50])
    with pytest.raises(ValueError, match=r"negative number|more than the 50 tokens"):
        cache.crop(count)
    assert cache.tokens_seen == 50


@pytest.mark.parametrize("name", ["full", *RECALL])
def test_tables_of_fixed_shape_forget_too(name: str) -> None:
    """As captured decoding leaves them: all tokens in order, each in the slot of its number."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 70)
    caches = [CompressedCache(model, with_budget(name, 16)) for _ in range(2)]
    for cache, steps in zip(caches, (8, 5), strict=True):
        read(model, cache, ids, [40])
        for layer in cache.slot_layers:
            layer.method.bound(layer.table, 64)
        read(model, cache, ids, [1] * steps)
        assert not any(layer.table.exact for layer in cache.slot_layers)
    caches[0].crop(-3)
    torch.testing.assert_close(*(read(model, cache, ids, [1, 1, 9, 1]) for cache in caches))


# assisted decoding: what counts as a prompt


def assisted(model: Any, text: Tensor, cache: CompressedCache, source: str) -> tuple[Tensor, int]:
    """A turn with drafts; its text, and how many tokens the first forward left in the cache."""
    given = {"prompt_lookup_num_tokens": 3} if source == "lookup" else {"assistant_model": zoo.build("llama")}
    left: list[int] = []
    crop = cache.crop

    def noting(count: Any) -> None:
        crop(count)
        left.append(cache.tokens_seen)

    cache.crop = noting
    out = model.generate(text, past_key_values=cache, max_new_tokens=8, do_sample=False, **given)
    cache.crop = crop
    return out, left[0]


def shares(cache: CompressedCache) -> set[int]:
    return {layer.table.prompt_tokens for layer in cache.slot_layers}


@pytest.mark.parametrize(("name", "source"), [*thinned((name, "lookup") for name in BOUNDED), ("h2o", "assistant")])
def test_every_turn_has_its_own_share(name: str, source: str) -> None:
    """Half of the text up to the last prompt, whether drafts came with it or not; rejected ones never count."""
    model = zoo.build("llama")
    cache = CompressedCache(model, with_budget(name, 16).replace("budget=16", "budget=50%"))
    text, first = assisted(model, zoo.tokens(1, 17).repeat(1, 2), cache, source)
    assert shares(cache) == {first} and 34 <= first < 34 + 20
    assert cache.tokens_stored <= first // 2
    text = torch.cat([text, zoo.tokens(1, 300, seed=1)], 1)
    plain = generate(model, text, cache, max_new_tokens=3).sequences
    assert shares(cache) == {text.shape[1]}
    # Samples of one token share a slot, so subgen stores fewer than it may.
    assert 0.6 * (text.shape[1] // 2) < cache.tokens_stored <= text.shape[1] // 2
    # A third turn as assisted decoding would feed it: the prompt with four drafted tokens, of which one is accepted.
    cache.activate_past_recording()
    read(model, cache, torch.cat([plain, zoo.tokens(1, 60, seed=2)], 1), [41])
    cache.crop(-3)
    third = cache.tokens_seen
    assert shares(cache) == {third} and third == plain.shape[1] - 1 + 38
    assert 0.6 * (third // 2) < cache.tokens_stored <= third // 2


@pytest.mark.parametrize("name", thinned(BOUNDED))
def test_the_budget_holds_after_assisted_decoding(name: str) -> None:
    model, method = zoo.build("llama"), with_budget(name, 16)
    cache = CompressedCache(model, method)
    text, _ = assisted(model, zoo.tokens(1, 17).repeat(1, 2), cache, "lookup")
    for turn, prompt in enumerate((9, 1)):
        text = torch.cat([text, zoo.tokens(1, prompt, seed=turn)], 1)
        text = generate(model, text, cache, max_new_tokens=4).sequences
        assert cache.tokens_stored <= 16


@pytest.mark.parametrize("prefill", ["exact", "stream"])
@pytest.mark.parametrize("name", thinned(BOUNDED))
def test_a_prompt_that_is_fed_after_assisted_decoding_is_compressed_at_once(name: str, prefill: str) -> None:
    model = zoo.build("llama")
    cache = CompressedCache(model, with_budget(name, 16).replace("budget=16", "budget=50%"), prefill=prefill, chunk=16)
    assisted(model, zoo.tokens(1, 17).repeat(1, 2), cache, "lookup")
    kvsketch.prefill(model, zoo.tokens(1, 60), cache)
    assert shares(cache) == {cache.tokens_seen}
    assert cache.tokens_stored <= cache.tokens_seen // 2


def test_a_prompt_fed_chunk_by_chunk_can_end_in_a_draft() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    caches = [CompressedCache(model, "h2o:budget=16:recent=4", prefill="stream", chunk=16) for _ in range(2)]
    for cache, end in zip(caches, (43, 40), strict=True):
        cache.activate_past_recording()
        kvsketch.prefill(model, ids[:, :end], cache)
        cache.crop(40 - end)
    torch.testing.assert_close(*(read(model, cache, ids, [1, 1, 4]) for cache in caches))


def test_a_draft_is_what_was_cropped() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 200)
    cache = CompressedCache(model, "streamingllm:budget=50%")
    seen = []
    read(model, cache, ids, [40])
    cache.activate_past_recording()
    for pieces, count in (([20], 4), ([5], 5), ([5], 4), ([5], 0), ([1], 0), ([30, 1], 0), ([5], 3)):
        read(model, cache, ids, pieces)
        cache.crop(-count)
        seen.append((cache.tokens_seen, *shares(cache)))
    # The first forward is a prompt with drafts; the 30 tokens that were left as they were are one too.
    assert seen == [(56, 56), (56, 56), (57, 56), (62, 56), (63, 56), (94, 93), (96, 93)]
    assert cache.tokens_stored <= 93 // 2


def test_a_loop_that_crops_only_what_it_rejects() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 90)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    read(model, cache, ids, [40])
    cache.activate_past_recording()
    for piece, rejected in ((4, 2), (4, 0), (1, 0), (4, 3), (1, 0), (1, 0), (4, 4), (4, 0)):
        read(model, cache, ids, [piece])
        if rejected:
            cache.crop(-rejected)
    assert cache.tokens_seen == 54
