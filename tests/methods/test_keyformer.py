"""Keyformer: counts, equality with H2O, the temperature, and what the released code does differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsketch import CompressedCache
from kvsketch.methods import H2O, Keyformer
from kvsketch.ops.attention_mass import reference
from kvsketch.slots import LayerContext, SlotTable, rollback
from tests.helpers import zoo
from tests.helpers.common import generate
from tests.methods.heavy_hitters import Stream, kept, random_stream, simulate, tables

PROMPT, STEPS = 40, 30
KEPT, WINDOW = 24, 7  # 60% of the prompt, 30% of that


@pytest.mark.parametrize("compat", ["intended", "official"])
def test_counts_and_recent_window(compat: str) -> None:
    incoming = int(compat == "official")
    stream = random_stream([PROMPT, *[1] * STEPS])
    for table, end in zip(tables(Keyformer(compat=compat), stream), stream.ends, strict=True):
        for head in kept(table):
            assert len(head) == KEPT - incoming
            assert set(range(end - WINDOW + incoming, end)) <= head.keys()


@pytest.mark.parametrize("compat", ["intended", "official"])
@pytest.mark.parametrize("options", [{}, {"noise": False}, {"horizon": 9}, {"tau_init": 3.0, "tau_end": 0.5}])
def test_keeps_what_the_definition_keeps(compat: str, options: dict[str, Any]) -> None:
    method, stream = Keyformer(compat=compat, **options), random_stream([PROMPT, *[1] * STEPS])
    for table, expected in zip(tables(method, stream, seed=4), simulate(method, stream, seed=4), strict=True):
        for ours, theirs in zip(kept(table), expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[j] - theirs[j]) < 1e-4 for j in theirs)


@pytest.mark.parametrize("chunks", [[PROMPT, *[1] * STEPS], [9, 14, 1, 1, 12, 1, 1]], ids=["prompt", "chunks"])
def test_without_noise_and_temperature_it_is_h2o(chunks: list[int]) -> None:
    stream = random_stream(chunks, batch=2)
    settings = {"budget": "60%", "recent": "30%"}
    plain = Keyformer(noise=False, tau_init=1.0, tau_end=1.0)
    pairs = [(plain, True), (Keyformer(noise=False), False), (Keyformer(tau_end=1.0), False)]
    for method, same in pairs:
        for ours, theirs in zip(tables(method, stream, [0, 6]), tables(H2O(**settings), stream, [0, 6]), strict=True):
            equal = torch.equal(ours.state.score, theirs.state.score)
            if same:
                assert equal
                assert torch.equal(ours.position_slots(), theirs.position_slots())
        assert equal == same


def test_temperature_schedule() -> None:
    stream = random_stream([20, *[1] * 10])
    method = Keyformer(budget=64, tau_init=1.0, tau_end=2.0, horizon=8)
    for table, generated in zip(tables(method, stream), range(11), strict=True):
        tau = reference.temperature_at(method.temperature(table), table.seen, torch.device("cpu"))
        assert float(tau) == pytest.approx(1.0 + min(generated, 8) / 8)


def test_rows_that_share_a_table_count_from_their_own_prompts() -> None:
    table = SlotTable(LayerContext(0, 1))
    table.append(*torch.randn(2, 2, 1, 20, 4))
    table.prompts = torch.tensor([12, 18])
    temperature = Keyformer(budget=64, tau_init=1.0, tau_end=2.0, horizon=16).temperature(table)
    assert reference.temperature_at(temperature, table.seen, torch.device("cpu")).tolist() == [1.5, 1.125]
    assert Keyformer.counts_prompt, "so a page holds the length of its prompt"


def test_a_draft_goes_on_and_a_turn_starts_again() -> None:
    """The temperature counts generated tokens, those of a draft that are kept among them, from the last prompt."""
    method, table = Keyformer(budget=64, tau_init=1.0, tau_end=2.0, horizon=8), SlotTable(LayerContext(0, 1))

    def tau() -> float:
        return float(reference.temperature_at(method.temperature(table), table.seen, torch.device("cpu")))

    def append(count: int) -> None:
        table.append(*torch.randn(2, 1, 1, count, 4))

    append(12)
    append(8)
    assert tau() == 1.0, "a prompt in two forwards"
    append(1)
    before = table.prompt_tokens
    append(4)
    # As a layer does when a part of a draft is rolled back.
    rollback.drop_newest(table, 2)
    table.prompt_tokens = before
    assert tau() == 1.0 + 3 / 8
    append(5)
    assert tau() == 1.0, "a new turn"


@pytest.mark.parametrize("read_before", [0, 16])
def test_drafts_of_the_first_recorded_forward_belong_to_its_prompt(read_before: int) -> None:
    """20 tokens and 4 drafts, of which 2 are accepted, are a prompt of 22; later drafts count from there."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    cache = CompressedCache(model, "keyformer:budget=16:recent=4:horizon=10")
    assert isinstance(cache.method, Keyformer)
    method, taus = cache.method, []
    if read_before:
        model(ids[:, :read_before], past_key_values=cache)
    cache.activate_past_recording()
    for new, rejected in ((24 - read_before, 2), (4, 1), (4, 2)):
        model(ids[:, cache.tokens_seen : cache.tokens_seen + new], past_key_values=cache)
        cache.crop(-rejected)
        table = cache.slot_layers[0].table
        assert table.prompt_tokens == 22
        taus.append(float(reference.temperature_at(method.temperature(table), table.seen, torch.device("cpu"))))
    assert taus == pytest.approx([1.0, 1.3, 1.5])


def test_noise_changes_what_is_kept_and_nothing_else() -> None:
    """With room for every token the model says the same for every seed; with less room the seeds part ways."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    roomy, tight = [
        [generate(model, ids, CompressedCache(model, f"keyformer:budget={budget}:seed={s}")).logits for s in (0, 1)]
        for budget in (64, 10)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*roomy, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*tight, strict=True))


def test_a_process_that_holds_some_heads_draws_what_one_with_all_of_them_does() -> None:
    stream, scores = random_stream([PROMPT]), []
    for first in (0, 1):
        table = SlotTable(LayerContext(0, 1, first_head=first))
        table.append(stream.keys[:, first:], stream.keys[:, first:])
        Keyformer().observe(table, stream.queries[:, 2 * first :])
        scores.append(table.state.score[:, -1])
    torch.testing.assert_close(*scores)


def hot_token_stream(hot: int) -> Stream:
    """Every query looks for the generated token `hot` as soon as it exists; all other keys are alike."""
    stream = random_stream([PROMPT, *[1] * STEPS], heads=1, group=1)
    direction = torch.zeros(8)
    direction[0] = 6.0
    stream.keys *= 0.1
    stream.queries[:] = direction
    stream.keys[0, 0, hot] = direction
    return stream


@pytest.mark.parametrize(("compat", "stays"), [("intended", True), ("official", False)])
def test_a_hot_generated_token_becomes_a_key_token(compat: str, stays: bool) -> None:
    hot = PROMPT + 3
    stream = hot_token_stream(hot)
    seen_by_next = {
        end: hot in kept(table)[0]
        for table, end in zip(tables(Keyformer(compat=compat), stream), stream.ends, strict=True)
    }
    last = hot + WINDOW
    assert all(seen_by_next[end] for end in range(hot + 1, last))
    assert all(seen_by_next[end] == stays for end in range(last, PROMPT + STEPS + 1))


def test_official_windows_are_one_token_wider() -> None:
    """The oldest token of the prompt's window goes with the first generated one, whatever its attention."""
    hot = PROMPT - WINDOW
    stream = hot_token_stream(hot)
    for compat, stays in (("intended", True), ("official", False)):
        held = [hot in kept(table)[0] for table in tables(Keyformer(compat=compat), stream)]
        assert held == [stays] * (STEPS + 1)


def test_official_tokens_behind_a_short_prompt_go_by_their_age() -> None:
    """With room beside the key tokens the newest of those that have left the window fill it."""
    stream = random_stream([10, *[1] * STEPS])
    method = Keyformer(compat="official", budget=16, recent=4)
    for table, end in zip(tables(method, stream), stream.ends, strict=True):
        for head in kept(table):
            assert sorted(head) == (list(range(end)) if end <= 15 else [*range(6), *range(end - 9, end)])


def test_official_key_tokens_never_change() -> None:
    stream = hot_token_stream(PROMPT + 3)
    sets = {}
    for compat in ("official", "intended"):
        sets[compat] = [
            {p for p in kept(table)[0] if p < PROMPT - WINDOW} for table in tables(Keyformer(compat=compat), stream)
        ]
    assert all(s == sets["official"][0] for s in sets["official"])
    assert sets["intended"][-1] != sets["intended"][0]
    assert len(sets["official"][0]) == KEPT - WINDOW
    assert PROMPT - WINDOW not in kept(next(tables(Keyformer(compat="official"), stream)))[0]


def test_the_whole_prompt_as_budget_keeps_the_prompt() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 30)
    with torch.no_grad():
        ours, full = CompressedCache(model, "keyformer:budget=100%"), CompressedCache(model, "full")
        for cache in (ours, full):
            model(ids, past_key_values=cache)
        first = [model(ids[:, :1], past_key_values=cache).logits for cache in (ours, full)]
        assert torch.equal(*first)
        second = [model(ids[:, 1:2], past_key_values=cache).logits for cache in (ours, full)]
        assert not torch.equal(*second)
    assert ours.tokens_stored == 30


@pytest.mark.parametrize("compat", ["intended", "official"])
def test_a_row_does_not_depend_on_its_batch(compat: str) -> None:
    stream, method = random_stream([PROMPT, *[1] * 12], batch=3), Keyformer(compat=compat)
    padding = [0, 13, 30]
    *_, together = tables(method, stream, padding)
    for row, pad in enumerate(padding):
        alone = Stream(
            stream.keys[row : row + 1, :, pad:], stream.queries[row : row + 1, :, pad:], [PROMPT - pad, *[1] * 12]
        )
        *_, table = tables(method, alone)
        for ours, theirs in zip(kept(together, row), kept(table), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[j] - theirs[j]) < 1e-4 for j in theirs)


def test_a_group_adds_the_scores_of_its_query_heads() -> None:
    grouped, method = random_stream([PROMPT], heads=2, group=3), Keyformer(budget="100%")
    copies = Stream(grouped.keys.repeat_interleave(3, 1), grouped.queries, grouped.chunks)
    ours, theirs = next(tables(method, grouped)), next(tables(method, copies))
    torch.testing.assert_close(ours.state.score, theirs.state.score.unflatten(1, (2, 3)).sum(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"tau_end": 0.0}, r"keyformer: tau_end=0.0 is not valid; use a temperature above 0"),
        ({"horizon": 0}, r"keyformer: horizon=0 is not valid; use a whole number of tokens, 1 or more"),
        ({"compat": "released"}, r"keyformer: compat=released is not valid; use intended or official"),
    ],
)
def test_wrong_parameters_are_named(text: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keyformer(**text)
