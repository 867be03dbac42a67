"""Quest on plain keys: the bound of a page, the pages that are read, pages that begin where a row's text begins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvsketch
from kvsketch.methods import Quest
from kvsketch.ops.select_pages import Bounds
from kvsketch.ops.select_pages.reference import page_scores
from kvsketch.slots import LayerContext, SlotTable, rollback

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUP, SIZE = 2, 3, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Run:
    """A table that Quest indexes, beside all its keys and values."""

    def __init__(self, method: Quest, tokens: int, padding: list[int] | None = None) -> None:
        self.method, self.table, self.padding = method, SlotTable(LayerContext(0, 1)), padding or [0]
        self.table.forward.scale = SIZE**-0.5
        self.keys = self.values = normal(len(self.padding), HEADS, 0, SIZE)
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        seed = self.table.seen
        keys, values = (normal(len(self.padding), HEADS, tokens, SIZE, seed=seed + s) for s in (1, 2))
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.method.prepare(self.table, keys, values)
        self.table.append(keys, values)
        if self.table.padding is None and any(self.padding):
            self.table.padding = torch.tensor(self.padding, device=DEVICE)
        self.method.compress(self.table, normal(len(self.padding), HEADS * GROUP, tokens, SIZE))

    def pages(self, row: int) -> list[list[int]]:
        """The tokens of each page of a row; a page starts at a multiple of `page` of the row's own text."""
        tokens = list(range(self.padding[row], self.table.seen))
        return [tokens[i : i + self.method.page] for i in range(0, len(tokens), self.method.page)]


def brute_force(run: Run, query: Tensor, row: int, head: int) -> set[int]:
    """Tokens of the best pages, by the largest inner product that a box around the keys of a page allows."""
    q, keys = query[row, head, 0].double(), run.keys[row, head // GROUP].double()
    pages = run.pages(row)

    def bound(page: list[int]) -> float:
        return float(torch.maximum(q * keys[page].amin(0), q * keys[page].amax(0)).sum())

    budget = run.method.budget_tokens(run.table)
    count = len(pages) if run.table.seen - run.padding[row] - 1 <= budget else max(3, budget // run.method.page)
    best = sorted(pages[:-1], key=bound, reverse=True)[: count - 1]
    return {token for page in [*best, pages[-1]] for token in page}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40))
def test_the_score_bounds_every_inner_product_of_the_page(seed: int, tokens: int) -> None:
    keys, query = normal(1, HEADS, tokens, SIZE, seed=seed), normal(1, HEADS * GROUP, 1, SIZE, seed=seed + 1)
    scores = page_scores(query, Bounds(keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)))
    products = query.view(1, HEADS, GROUP, SIZE) @ keys.transpose(-1, -2)
    assert (scores.view(1, HEADS, GROUP, 1) >= products - 1e-4).all()
    if tokens == 1:
        torch.testing.assert_close(scores.view(1, HEADS, GROUP, 1), products)


@pytest.mark.parametrize("padding", [[0, 0], [0, 5], [29, 3]], ids=str)
@pytest.mark.parametrize("generated", [0, 1, 6, 50])
def test_pages_read_equal_brute_force(padding: list[int], generated: int) -> None:
    run = Run(Quest(budget=20, page=4, skip_layers=0), 50, padding)
    for _ in range(generated):
        run.grow(1)
    query = normal(2, HEADS * GROUP, 1, SIZE, seed=9)
    chosen = run.method.rows_chosen(run.table, query)
    # With padding there is room for a row of 20 tokens and the newest one.
    assert chosen.shape == (2, HEADS * GROUP, 24 if any(padding) else 20)
    for row in range(2):
        for head in range(HEADS * GROUP):
            tokens = [t for t in chosen[row, head].tolist() if t >= 0]
            assert len(tokens) == len(set(tokens))
            assert set(tokens) == brute_force(run, query, row, head)


def test_attention_is_exact_over_the_pages_read() -> None:
    run = Run(Quest(budget=20, page=4, skip_layers=0), 50)
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9)
    out = run.method.attend(run.table, query)
    assert out is not None
    for head in range(HEADS * GROUP):
        read = sorted(brute_force(run, query, 0, head))
        keys, values = run.keys[0, head // GROUP, read], run.values[0, head // GROUP, read]
        expected = (run.table.forward.scale * keys @ query[0, head, 0]).softmax(0) @ values
        torch.testing.assert_close(out[0, head, 0], expected, atol=1e-5, rtol=1e-4)


def test_pages_follow_the_text_of_a_row_not_its_padding() -> None:
    """Left padding would shift the pages of the padded row otherwise, and change what it reads."""
    padded, alone = (Run(Quest(budget=20, page=4, skip_layers=0), n, p) for n, p in ((53, [3]), (50, [0])))
    alone.keys = padded.keys[:, :, 3:]
    alone.table = SlotTable(LayerContext(0, 1))
    alone.table.append(padded.keys[:, :, 3:].clone(), padded.values[:, :, 3:].clone())
    alone.method.compress(alone.table, normal(1, HEADS * GROUP, 50, SIZE))
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9)
    shifted = alone.method.rows_chosen(alone.table, query)
    # The list of a padded batch has room for one page more.
    chosen = padded.method.rows_chosen(padded.table, query)
    assert torch.equal(chosen[..., :20], torch.where(shifted >= 0, shifted + 3, -1)) and (chosen[..., 20:] == -1).all()
    pages = 50 // 4
    assert torch.equal(padded.table.state.page_min[:, :, :pages], alone.table.state.page_min[:, :, :pages])


def test_tokens_one_by_one_give_the_bounds_of_all_at_once() -> None:
    one_by_one, at_once = (Run(Quest(budget=20, page=4, skip_layers=0), n) for n in (30, 30))
    for _ in range(45):
        one_by_one.grow(1)
    at_once.table.append(one_by_one.keys[:, :, 30:].clone(), one_by_one.values[:, :, 30:].clone())
    at_once.method.compress(at_once.table, normal(1, HEADS * GROUP, 45, SIZE))
    for name in ("page_min", "page_max"):
        assert torch.equal(
            getattr(one_by_one.table.state, name)[:, :, :19], getattr(at_once.table.state, name)[:, :, :19]
        )


def test_tokens_taken_back_leave_no_trace_in_the_bounds() -> None:
    """After a roll back the bounds are those of the tokens that are left and of the new ones."""
    method = Quest(budget=20, page=4, skip_layers=0)
    keys, values = normal(1, HEADS, 60, SIZE, seed=1), normal(1, HEADS, 60, SIZE, seed=2)
    keys[:, :, 41:50] *= 100

    def grow(table: SlotTable, start: int, end: int) -> None:
        table.append(keys[:, :, start:end], values[:, :, start:end])
        method.compress(table, normal(1, HEADS * GROUP, end - start, SIZE))

    for step in (1, 10):
        cropped, plain = SlotTable(LayerContext(0, 1)), SlotTable(LayerContext(0, 1))
        grow(cropped, 0, 50)
        rollback.drop_newest(cropped, 9)
        grow(plain, 0, 41)
        for start in range(50, 60, step):
            grow(cropped, start, start + step)
            grow(plain, start, start + step)
        pages = -(-plain.seen // 4)
        for name in ("page_min", "page_max"):
            assert torch.equal(getattr(cropped.state, name)[:, :, :pages], getattr(plain.state, name)[:, :, :pages]), (
                "no page remembers what was taken back"
            )


def test_at_least_three_pages_and_each_row_its_share() -> None:
    run = Run(Quest(budget="25%", page=4, skip_layers=0), 80, [0, 48])
    chosen = run.method.rows_chosen(run.table, normal(2, HEADS * GROUP, 1, SIZE, seed=9))
    assert [(rows >= 0).sum(-1).unique().tolist() for rows in chosen] == [[20], [12]]


def test_within_the_budget_everything_is_read() -> None:
    run = Run(Quest(budget=20, page=4, skip_layers=0), 20)
    assert run.method.attend(run.table, normal(1, HEADS * GROUP, 1, SIZE)) is None
    assert run.method.maintenance_due(run.table)
    run.grow(1)
    assert run.method.attend(run.table, normal(1, HEADS * GROUP, 1, SIZE)) is not None


@pytest.mark.parametrize("text", ["quest:page=0", "quest:budget=0", "quest:sinks=4"])
def test_bad_values_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(":")[1].split("=")[0]):
        kvsketch.parse_method(text)
