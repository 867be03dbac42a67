"""SnapKV on plain keys and queries, against its formula written out token by token in float64."""

from __future__ import annotations

import pytest
import torch

import kvsketch
from kvsketch.methods import SnapKV
from kvsketch.slots import LayerContext, SlotTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUP, SIZE, SCALE = 2, 3, 8, 0.6


class Text:
    """A row of random keys and queries, long enough for every test."""

    def __init__(self, length: int = 80, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(1, HEADS, length, SIZE, generator=generator).to(DEVICE)
        self.values = torch.randn(1, HEADS, length, SIZE, generator=generator).to(DEVICE)
        self.queries = 2 * torch.randn(1, HEADS * GROUP, length, SIZE, generator=generator).to(DEVICE)

    def feed(self, table: SlotTable, method: SnapKV, start: int, end: int) -> None:
        table.append(self.keys[:, :, start:end], self.values[:, :, start:end])
        table.forward.scale = SCALE
        method.compress(table, self.queries[:, :, start:end])

    def votes(self, query: int, tokens: list[int], head: int, causal: bool = True) -> dict[int, list[float]]:
        """What each query head of a KV head gives each of `tokens`, zero to later ones."""
        seen = [t for t in tokens if t <= query or not causal]
        keys = self.keys[0, head, seen].double()
        rows = []
        for member in range(GROUP):
            rows.append(
                torch.softmax(SCALE * keys @ self.queries[0, head * GROUP + member, query].double(), 0).tolist()
            )
        given = {t: [row[i] for row in rows] for i, t in enumerate(seen)}
        return {t: given.get(t, [0.0] * GROUP) for t in tokens}

    def observed(
        self, queries: list[int], tokens: list[int], head: int, reduce: str = "sum", causal: bool = True
    ) -> list[float]:
        """Sum over the queries, then one number for the group."""
        summed = [[0.0] * GROUP for _ in tokens]
        for query in queries:
            votes = self.votes(query, tokens, head, causal)
            summed = [[a + b for a, b in zip(s, votes[t], strict=True)] for s, t in zip(summed, tokens, strict=True)]
        reductions = {"sum": sum, "max": max, "mean": lambda x: sum(x) / len(x)}
        return [reductions[reduce](s) for s in summed]


def pooled(scores: list[float], kernel: int, window: int) -> list[float]:
    """Pools what lies before the window; beyond its ends there is nothing."""
    old = scores[: len(scores) - window]
    half, out = kernel // 2, []
    for i in range(len(old)):
        near = old[max(0, i - half) : i + half + 1]
        out.append(sum(near) / kernel)
    return out + scores[len(old) :]


def scores_by_token(table: SlotTable, head: int, row: int = 0) -> dict[int, float]:
    position, score = table.position_slots()[row, head].tolist(), table.state.score[row, head].tolist()
    return {p: s for p, s in zip(position, score, strict=True) if p >= 0}


@pytest.mark.parametrize(("window", "kernel"), [(6, 5), (1, 3), (6, 1)])
def test_scores_are_the_formula(window: int, kernel: int) -> None:
    text, table = Text(), SlotTable(LayerContext(0, 1))
    method = SnapKV(budget=50, window=window, kernel=kernel)
    text.feed(table, method, 0, 40)
    for head in range(HEADS):
        raw = text.observed(list(range(40 - window, 40)), list(range(40)), head, "sum")
        expected = torch.tensor(pooled(raw, kernel, window))
        result = table.state.score[0, head].cpu()
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
        if window > 1:
            acausal = text.observed(list(range(40 - window, 40)), list(range(40)), head, "sum", causal=False)
            wrong = torch.tensor(pooled(acausal, kernel, window))
            assert not torch.allclose(result, wrong, atol=1e-3), "without the causal mask the scores must differ"


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_best_scores_and_the_window_stay(sinks: int) -> None:
    text, table = Text(), SlotTable(LayerContext(0, 1))
    method = SnapKV(budget=20, window=6, kernel=3, sinks=sinks)
    text.feed(table, method, 0, 60)
    for head in range(HEADS):
        raw = text.observed(list(range(54, 60)), list(range(60)), head)
        scores = pooled(raw, 3, 6)
        best = sorted(range(sinks, 54), key=lambda i: -scores[i])[: 20 - 6 - sinks]
        kept = table.index_slots()[0, head, :-1].tolist()
        assert kept == sorted([*range(sinks), *best, *range(54, 60)])
        chosen = scores_by_token(table, head)
        assert all(chosen[i] == pytest.approx(scores[i], rel=1e-3) for i in best), "scores travel with their tokens"
    assert table.keys is not None and table.keys.shape == (1, HEADS, 21, SIZE), "slots are per KV head"


def test_generated_queries_replace_old_votes_a_little_at_a_time() -> None:
    """score <- (1 - 1/window) score + votes of the new query over what is stored, in place."""
    text, table = Text(), SlotTable(LayerContext(0, 1))
    method = SnapKV(budget=20, window=4, kernel=3)
    text.feed(table, method, 0, 40)
    addresses = [t.data_ptr() for t in table.tensors()]
    for now in range(40, 60):
        before = [scores_by_token(table, head) for head in range(HEADS)]
        text.feed(table, method, now, now + 1)
        for head in range(HEADS):
            stored = sorted([*before[head], now])
            votes = text.observed([now], stored, head)
            expected = {t: 0.75 * before[head].get(t, 0.0) + v for t, v in zip(stored, votes, strict=True)}
            after = scores_by_token(table, head)
            middle = {t: s for t, s in expected.items() if t <= now - 4}
            worst = min(middle, key=lambda t: middle[t])
            assert set(after) == set(expected) - {worst}
            assert all(s == pytest.approx(expected[t], rel=1e-3, abs=1e-6) for t, s in after.items())
    assert [t.data_ptr() for t in table.tensors()] == addresses
    assert table.stored() == 20


def test_a_long_second_turn_forgets_old_votes_and_a_short_one_does_not() -> None:
    text = Text()
    method = SnapKV(budget=30, window=8, kernel=1)
    for turn, fade in ((8, 0.0), (2, 0.75)):
        table = SlotTable(LayerContext(0, 1))
        text.feed(table, method, 0, 40)
        before = [scores_by_token(table, head) for head in range(HEADS)]
        text.feed(table, method, 40, 40 + turn)
        for head in range(HEADS):
            stored = sorted([*before[head], *range(40, 40 + turn)])
            votes = text.observed(list(range(40, 40 + turn)), stored, head)
            expected = {t: fade * before[head].get(t, 0.0) + v for t, v in zip(stored, votes, strict=True)}
            after = scores_by_token(table, head)
            assert len(after) == 30
            assert all(s == pytest.approx(expected[t], rel=1e-3, abs=1e-6) for t, s in after.items())


def test_a_second_turn_pools_over_stored_neighbours() -> None:
    text, table = Text(), SlotTable(LayerContext(0, 1))
    method = SnapKV(budget=30, window=4, kernel=3)
    text.feed(table, method, 0, 40)
    for now in range(40, 46):
        text.feed(table, method, now, now + 1)
    kept = [sorted(scores_by_token(table, head)) for head in range(HEADS)]
    text.feed(table, method, 46, 52)
    for head in range(HEADS):
        stored = [*kept[head], *range(46, 52)]
        raw = text.observed(list(range(48, 52)), stored, head)
        expected = dict(zip(stored, pooled(raw, 3, 4), strict=True))
        after = scores_by_token(table, head)
        assert all(s == pytest.approx(expected[t], rel=1e-3, abs=1e-6) for t, s in after.items())


@pytest.mark.parametrize("length", [1, 3, 9])
def test_contexts_shorter_than_the_window(length: int) -> None:
    text, table = Text(), SlotTable(LayerContext(0, 1))
    method = SnapKV(budget=16, window=32)
    text.feed(table, method, 0, length)
    for now in range(length, 40):
        text.feed(table, method, now, now + 1)
        assert table.stored() == min(16, now + 1)
    recent = set(range(40 - 8, 40))
    assert all(recent <= set(scores_by_token(table, head)) for head in range(HEADS)), "half of the budget is the window"


@pytest.mark.parametrize("length", [2, 5, 20, 33])
def test_left_padding_neither_votes_nor_is_voted_for(length: int) -> None:
    """A padded row scores and keeps what it does alone, also when it is shorter than window or pooling."""
    long, short = Text(60), Text(60, seed=1)
    method = SnapKV(budget=12, window=6, kernel=5)
    pad = 40 - length
    alone, together = SlotTable(LayerContext(0, 1)), SlotTable(LayerContext(0, 1))
    together.padding = torch.tensor([0, pad], device=DEVICE)
    short.feed(alone, method, 0, length)
    steps = [(0, 40), *((i, i + 1) for i in range(40, 55))]
    for start, end in steps:
        shift = slice(max(0, start - pad), end - pad)
        first = torch.full((1, HEADS, end - start, SIZE), 50.0, device=DEVICE)
        keys, queries = first.clone(), first.repeat(1, GROUP, 1, 1)
        real = shift.stop - shift.start
        keys[:, :, -real:], queries[:, :, -real:] = short.keys[:, :, shift], short.queries[:, :, shift]
        both_keys = torch.cat([long.keys[:, :, start:end], keys])
        together.append(both_keys, both_keys)
        together.forward.scale = SCALE
        method.compress(together, torch.cat([long.queries[:, :, start:end], queries]))
        if start >= 40:
            short.feed(alone, method, shift.start, shift.stop)
        for head in range(HEADS):
            expected, result = scores_by_token(alone, head), scores_by_token(together, head, row=1)
            assert set(result) == set(expected)
            assert all(result[t] == pytest.approx(s, rel=1e-3, abs=1e-6) for t, s in expected.items())


def test_pooling_keeps_the_neighbours_of_a_needle() -> None:
    """A token that the last queries look for stays, and its neighbours stay with it when scores are pooled."""
    text, needle = Text(), 25
    text.queries[:, :, -8:] = text.keys[:, :, needle : needle + 1].repeat_interleave(GROUP, 1) * 4
    for kernel, neighbours in ((5, {23, 24, 25, 26, 27}), (1, {25})):
        table = SlotTable(LayerContext(0, 1))
        text.feed(table, SnapKV(budget=14, window=8, kernel=kernel), 0, 80)
        for head in table.index_slots()[0].tolist():
            assert neighbours <= set(head)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv:window=0", "window=0 is not valid; use a whole number of queries"),
        ("snapkv:kernel=4", "kernel=4 is not valid; use an odd number"),
        ("snapkv:pool=max", "pool=max is refused, it always means avg"),
        ("snapkv:gqa_reduce=max", "gqa_reduce=max is refused, it always means sum"),
        ("snapkv:recent=8", "unknown parameter 'recent'"),
        ("snapkv:budget=2:sinks=2", "cannot hold 2 sinks"),
    ],
)
def test_wrong_parameters_say_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvsketch.parse_method(text)


def test_the_window_shrinks_with_a_small_budget() -> None:
    assert [SnapKV(budget=b).allot(SlotTable(LayerContext(0, 1)), 9000).recent for b in (1024, 64, 16, 2)] == [
        32,
        32,
        8,
        1,
    ]


def test_bytes_are_those_of_the_slots() -> None:
    """Keys, values, index, weight and score of budget + 1 slots per KV head; no part per query head."""
    text, table = Text(), SlotTable(LayerContext(0, 1))
    text.feed(table, SnapKV(budget=20, window=6), 0, 60)
    slots = HEADS * 21
    expected = slots * (2 * SIZE * 4 + 4 + 4 + 4) + HEADS * 8 + 8
    assert sum(t.numel() * t.element_size() for t in table.tensors()) == expected


def test_ties_are_broken_alike_alone_and_in_a_batch() -> None:
    """Pooling gives neighbours almost equal scores: which of them stays must not depend on the padding."""
    heads, length, pads = 30, 70, [0, 3, 11]
    generator = torch.Generator().manual_seed(1)
    keys, values, queries = (torch.randn(1, heads, length, SIZE, generator=generator).to(DEVICE) for _ in range(3))
    method = SnapKV(budget=20, window=4, kernel=7)
    kept = []
    for pad in pads:
        table = SlotTable(LayerContext(0, 1))
        for start, end in ((-pad, 60), *((i, i + 1) for i in range(60, length))):
            part = slice(max(start, 0), end)
            padded = [torch.nn.functional.pad(t[:, :, part], (0, 0, max(-start, 0), 0)) for t in (keys, values)]
            table.append(*padded)
            table.padding = torch.tensor([pad], device=DEVICE) if pad else None
            table.forward.scale = SCALE
            method.compress(table, torch.nn.functional.pad(queries[:, :, part], (0, 0, max(-start, 0), 0)))
        kept.append(table.position_slots().sort(-1).values)
    assert all(torch.equal(kept[0], other) for other in kept[1:])
