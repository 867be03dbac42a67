"""Rows of a batch under compression: early ends, several samples, drafts of another model, talks of several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsketch import CompressedCache
from tests.helpers import zoo
from tests.helpers.common import FED, bounded, generate, padded, thinned, with_budget

METHODS = list(FED)
BOUNDED = bounded()


def fed(model: Any, cache: Any, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Feeds the pieces of a text one after another; the logits of all its tokens."""
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits[0] for piece in pieces])


@pytest.mark.parametrize("name", thinned(METHODS))
def test_a_row_that_ends_early_leaves_the_others_alone(name: str) -> None:
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(3, 40), [0, 12, 5])
    method = with_budget(name, 16)
    free = generate(model, ids, CompressedCache(model, method), attention_mask=mask, max_new_tokens=8).sequences[:, 40:]
    end = int(free[1, 3])
    stopped = model.generate(
        ids, attention_mask=mask, past_key_values=CompressedCache(model, method), max_new_tokens=8, do_sample=False,
        eos_token_id=end, pad_token_id=0,
    )[:, 40:]  # fmt: skip
    for row in range(3):
        kept = free[row].tolist()
        kept = kept[: kept.index(end) + 1] if end in kept else kept
        assert stopped[row].tolist() == (kept + [0] * 8)[: stopped.shape[1]]
    assert stopped[1, 4:].eq(0).all() and stopped.shape[1] > 5


@pytest.mark.parametrize("name", thinned(METHODS))
def test_each_of_several_samples_is_what_it_would_be_alone(name: str) -> None:
    """The probabilities a sample was drawn from are those of its own text replayed."""
    model, ids = zoo.build("llama"), zoo.tokens(2, 40)
    torch.manual_seed(0)
    method = with_budget(name, 16)
    out = generate(model, ids, CompressedCache(model, method), do_sample=True, num_return_sequences=3, max_new_tokens=6)
    assert len({tuple(row) for row in out.sequences.tolist()}) > 2
    for row in (1, 5):
        text = out.sequences[row : row + 1]
        pieces = [text[:, :40], *text[:, 40:-1].split(1, 1)]
        alone = fed(model, CompressedCache(model, method), pieces)[39:]
        torch.testing.assert_close(torch.stack([step[row] for step in out.logits]), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["full", "h2o", "subgen", "quest"])  # one of each kind of table
def test_a_model_that_drafts_changes_no_token_while_all_is_kept(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 20)
    draft = zoo.build("llama", num_hidden_layers=1)
    cache = CompressedCache(model, with_budget(name, 96))
    assisted = model.generate(ids, past_key_values=cache, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert assisted.tolist() == model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    assert cache.tokens_seen == 31


@pytest.mark.parametrize(
    ("name", "source"),
    [*thinned((name, "lookup") for name in METHODS), ("h2o", "assistant"), ("quest", "assistant")],
)
def test_drafted_tokens_are_those_of_the_pieces_that_were_read(name: str, source: str) -> None:
    """Under a budget, the pieces that were read give the same tokens again, whatever else was drafted and rejected."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 6).repeat(1, 6)
    drafts = {"lookup": {"prompt_lookup_num_tokens": 3}, "assistant": {"assistant_model": zoo.build("llama")}}
    cache, pieces = CompressedCache(model, with_budget(name, 16)), []
    crop = cache.crop

    def noting_crop(count: Any) -> None:
        pieces.append((cache.tokens_seen, -int(count)))
        crop(count)

    cache.crop = noting_crop
    out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **drafts[source])
    replayed, logits = CompressedCache(model, with_budget(name, 16)), []
    replayed.activate_past_recording()
    with torch.no_grad():
        for end, rejected in pieces:
            kept = end - rejected - replayed.tokens_seen
            piece = out[:, replayed.tokens_seen : end - rejected]
            piece = torch.cat([piece, torch.full((1, rejected), 3)], 1)
            logits.append(model(piece, past_key_values=replayed).logits[0, :kept])
            replayed.crop(-rejected)
    assert torch.cat(logits).argmax(-1)[35:].tolist() == out[0, 36:].tolist()
    if name in BOUNDED:
        assert cache.tokens_stored <= 16


@pytest.mark.parametrize("name", thinned(METHODS))
def test_a_talk_of_three_turns_with_one_cache(name: str) -> None:
    """Each turn reads only what is new, keeps the budget, and answers as one cache fed with the same pieces."""
    model, method = zoo.build("llama"), with_budget(name, 16)
    cache, text, pieces = CompressedCache(model, method), zoo.tokens(1, 30), []
    for turn, question in enumerate((0, 9, 4)):
        text = torch.cat([text, zoo.tokens(1, question, seed=turn)], 1)
        start = cache.tokens_seen
        answer = model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False)
        pieces += [text[:, start:], *answer[:, text.shape[1] : -1].split(1, 1)]
        text = answer
        assert cache.tokens_seen == text.shape[1] - 1
        if name in BOUNDED:
            assert cache.tokens_stored <= 16
    logits = fed(model, CompressedCache(model, method), pieces)
    answers = [*range(30, 36), *range(45, 51), *range(55, 61)]
    assert logits.argmax(-1)[[i - 1 for i in answers]].tolist() == text[0, answers].tolist()
