"""Choice of pages and their bounds, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.select_pages import Bounds, Limits, Text, reference
from tests.ops.formula import needs_triton, poison
from tests.ops.recall_inputs import normal

INF = float("inf")


def make_text(seen: int, page: int, device: torch.device, padding: list[int] | None = None) -> Text:
    pads = None if padding is None else torch.tensor(padding, device=device)
    return Text(torch.tensor([seen], device=device), pads, page)


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: sums of their products are exact in any order, so that results can be compared."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def make_bounds(keys: Tensor, text: Text, room: int = 0) -> Bounds:
    """Bounds of the pages of keys [B, H, n, D], page by page, with `room` further pages that hold nothing."""
    batch, heads, seen, size = keys.shape
    pages = -(-seen // text.page) + room
    low, high = (keys.new_full((batch, heads, pages, size), inf) for inf in (INF, -INF))
    for b in range(batch):
        pad = 0 if text.padding is None else int(text.padding[b])
        for p, start in enumerate(range(pad, seen, text.page)):
            tokens = keys[b, :, start : min(start + text.page, seen)]
            low[b, :, p], high[b, :, p] = tokens.amin(1), tokens.amax(1)
    return Bounds(low, high)


def brute_force(scores: list[float], real: int, pad: int, page: int, count: int) -> list[int]:
    """The newest page and the best of those before it, its tokens in order."""
    newest = -(-real // page) - 1
    before = sorted(range(max(newest, 0)), key=lambda p: (-scores[p], p))[: count - 1]
    pages = sorted([*before, newest]) if newest >= 0 else []
    return [pad + t for p in pages for t in range(p * page, min((p + 1) * page, real))]


def agrees(rows: Tensor, scores: Tensor, text: Text, limits: Limits) -> bool:
    """True when every list is the brute-force choice, -1 behind the last."""
    for b in range(rows.shape[0]):
        pad = 0 if text.padding is None else int(text.padding[b])
        count = limits.most
        budget = limits.budget if limits.budgets is None else int(limits.budgets[b])
        if budget is not None and int(text.seen) - pad - 1 > budget:
            count = min(count, max(budget // text.page, limits.least))
        for h in range(rows.shape[1]):
            expected = brute_force(scores[b, h].tolist(), int(text.seen) - pad, pad, text.page, count)
            listed = rows[b, h].tolist()
            if listed != expected + [-1] * (len(listed) - len(expected)):
                return False
    return True


@pytest.mark.parametrize(
    ("pages", "count", "group", "page"),
    [
        (1, 1, 1, 16),
        (1, 3, 2, 4),
        (63, 5, 2, 3),
        (100, 33, 4, 2),
        (1000, 128, 7, 1),
        (1000, 3, 8, 16),
        (100, 200, 1, 5),
    ],
)
def test_lists_equal_brute_force(
    implementation: ModuleType, device: torch.device, pages: int, count: int, group: int, page: int
) -> None:
    text, limits = make_text(pages * page - page // 3, page, device), Limits(count, None, 1)
    scores = normal(1, 2 * group, pages + 9).to(device)
    scores[..., pages:] = float("nan")
    rows = implementation.choose_pages(scores, text, limits)
    assert rows.shape == (1, 2 * group, count * page) and rows.dtype == torch.int32
    assert agrees(rows, scores, text, limits)


def test_the_comparison_notices_a_wrong_choice(device: torch.device) -> None:
    text, limits = make_text(70, 4, device), Limits(5, None, 1)
    scores = normal(1, 4, 20).to(device)
    assert agrees(reference.choose_pages(scores, text, limits), scores, text, limits)
    for wrong in (Limits(6, None, 1), Limits(4, None, 1)):
        assert not agrees(reference.choose_pages(scores, text, wrong), scores, text, limits)
    assert not agrees(reference.choose_pages(-scores, text, limits), scores, text, limits)
    assert not agrees(reference.choose_pages(scores, text, limits) + 1, scores, text, limits)


def test_equal_and_extreme_scores(implementation: ModuleType, device: torch.device) -> None:
    text = make_text(80, 2, device)
    scores = (normal(1, 6, 40) * 1.5).round().to(device)
    scores[:, 1] = torch.where(scores[:, 1] == 0, -0.0, scores[:, 1])
    scores[:, 2] = -3.5
    scores[:, 3, ::2], scores[:, 3, 1::4], scores[:, 3, 3], scores[:, 3, 7] = INF, -INF, 1e-42, -3e38
    scores[:, 4] = -INF
    for count in (1, 7, 39, 41):
        limits = Limits(count, None, 1)
        assert agrees(implementation.choose_pages(scores, text, limits), scores, text, limits)
    unknown = torch.where(scores == -INF, float("nan"), scores)
    limits = Limits(35, None, 1)
    assert torch.equal(
        implementation.choose_pages(unknown, text, limits), implementation.choose_pages(scores, text, limits)
    )


def test_rows_have_their_own_text_and_budget(implementation: ModuleType, device: torch.device) -> None:
    """Padding, a row of which nothing is there yet, and budgets below, between and above `least` and the count."""
    text = make_text(50, 4, device, [0, 7, 48, 50, 3])
    budgets = torch.tensor([99, 20, 4, 40, 1], dtype=torch.int32, device=device)
    scores = normal(5, 2, 15).to(device)
    for limits in (
        Limits(6, None, 3), Limits(6, budgets, 3), Limits(2, budgets, 3),
        Limits(12, None, 3, 42), Limits(12, None, 3, 41),
    ):  # fmt: skip
        rows = implementation.choose_pages(scores, text, limits)
        assert agrees(rows, scores, text, limits)
        assert (rows[3] == -1).all()


@pytest.mark.parametrize("budgets", [False, True])
def test_a_row_that_fits_its_budget_is_read_whole(
    implementation: ModuleType, device: torch.device, budgets: bool
) -> None:
    """Rows of 24, 23 and 22 real tokens, pages of 5, a budget of 22: the last two have no more before the newest."""
    text = make_text(30, 5, device, [6, 7, 8])
    each = torch.full((3,), 22, dtype=torch.int32, device=device) if budgets else None
    rows = implementation.choose_pages(normal(3, 2, 9).to(device), text, Limits(5, each, 3, None if budgets else 22))
    assert [(row >= 0).sum(-1).tolist() for row in rows] == [[19, 19], [23, 23], [22, 22]]


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32), (7, torch.bfloat16), (8, torch.float32)],
)
def test_scores_bound_and_equal_the_formula(
    implementation: ModuleType, device: torch.device, group: int, dtype: torch.dtype
) -> None:
    text = make_text(150, 4, device, [0, 11])
    keys = normal(2, 2, 150, 24, dtype=dtype).to(device)
    bounds = make_bounds(keys, text, room=20)
    q = normal(2, 1, 2 * group, 24, seed=1, dtype=dtype).to(device).transpose(1, 2)
    scores = implementation.page_scores(q, bounds, text)
    assert scores.shape == (2, 2 * group, 58) and scores.dtype == torch.float32
    low, high = (bound.double().repeat_interleave(group, 1)[:, :, :34] for bound in bounds)
    expected = torch.maximum(q.double() * low, q.double() * high).sum(-1)
    torch.testing.assert_close(scores[..., :34].double(), expected, atol=1e-4, rtol=1e-5)
    products = q.double() @ keys.double().repeat_interleave(group, 1).mT  # [2, Hq, 1, 150]
    assert (scores[0, :, :37].double().repeat_interleave(4, -1) >= products[0, :, 0, :148] - 1e-4).all()


@needs_triton
@pytest.mark.parametrize(("seen", "group", "page"), [(1, 1, 1), (16, 2, 16), (63, 3, 5), (100, 1, 1), (1000, 1, 16)])
def test_kernel_equals_reference_to_the_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, seen: int, group: int, page: int
) -> None:
    from kvsketch.ops.select_pages import kernel

    poison(monkeypatch)
    text = make_text(seen, page, device, [0, seen // 3])
    bounds = make_bounds(whole(2, 2, seen, 8).to(device), text, room=5)
    q = whole(2, 2 * group, 1, 8, seed=1).to(device)
    each = torch.tensor([seen, seen // 8], dtype=torch.int32, device=device)
    for budgets, budget in ((each, None), (None, max(1, seen // 8))):
        limits = Limits(max(3, seen // page // 4), budgets, 3, budget)
        actual, expected = (module.select_pages(q, bounds, text, limits) for module in (kernel, reference))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("page", "size", "dtype", "padding"),
    [
        (2, 8, torch.float32, [29, 3]),
        (4, 24, torch.bfloat16, None),
        (4, 24, torch.float32, [0, 5]),
        (16, 8, torch.float32, [29, 3]),
        (16, 8, torch.float32, None),
        (50, 8, torch.bfloat16, [29, 3]),
    ],
)
def test_bounds_follow_the_tokens(
    implementation: ModuleType,
    device: torch.device,
    page: int,
    size: int,
    dtype: torch.dtype,
    padding: list[int] | None,
) -> None:
    """A prompt, a chunk and single tokens, of which one lies anywhere in a store, give the bounds of all at once."""
    keys = normal(2, 2, 64, size, dtype=dtype).to(device)
    expected = make_bounds(keys, make_text(64, page, device, padding), room=2)
    low, high = (torch.full_like(expected.low, inf) for inf in (INF, -INF))
    for start, end in ((0, 37), (37, 60), (60, 61), (61, 62)):
        implementation.widen_pages(
            Bounds(low, high), keys[:, :, start:end], make_text(end, page, device, padding), None
        )
    for token in (62, 63):
        slot = torch.tensor([[8, 2], [0, 11]], device=device).unsqueeze(-1)
        store = torch.full((2, 2, 12, size), 99.0, dtype=dtype, device=device)
        store.scatter_(2, slot.unsqueeze(-1).expand(-1, -1, 1, size), keys[:, :, token : token + 1])
        implementation.widen_pages(Bounds(low, high), store, make_text(token + 1, page, device, padding), slot)
    assert torch.equal(low, expected.low) and torch.equal(high, expected.high)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 3, 1, 8)}, "q has 3 heads, which is not a multiple of the 2 heads"),
        ({"q": torch.zeros(1, 4, 2, 8)}, "q must be"),
        ({"page_max": torch.zeros(1, 2, 4, 8)}, r"page_max must be float32 \[1, 2, 5, 8\]"),
        ({"seen": torch.tensor(5)}, "seen must be int64"),
        ({"padding": torch.zeros(2).long()}, r"padding must be int64 \[1\]"),
        ({"page": 0}, "page=0"),
        ({"count": 0}, "count=0"),
        ({"budgets": torch.zeros(1)}, "budgets must be int32"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    bounds = torch.zeros(1, 2, 5, 8)
    arguments: dict[str, Any] = {"q": torch.zeros(1, 4, 1, 8), "page_min": bounds, "page_max": bounds}
    arguments |= {"seen": torch.tensor([20]), "count": 3, "page": 4}
    with pytest.raises(ValueError, match=message):
        ops.select_pages(**(arguments | change))


def test_bad_keys_are_named() -> None:
    bounds, seen = torch.zeros(1, 2, 5, 8), torch.tensor([20])
    with pytest.raises(ValueError, match="keys must be"):
        ops.widen_pages(bounds, bounds.clone(), torch.zeros(1, 2, 3, 9), seen, 4)
    with pytest.raises(ValueError, match="slot must be"):
        ops.widen_pages(bounds, bounds.clone(), torch.zeros(1, 2, 3, 8), seen, 4, slot=torch.zeros(1, 2).long())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(("tokens", "count"), [(32768, 128), (131072, 64), (4099, 256)])
    def test_large_choice(self, device: torch.device, tokens: int, count: int) -> None:
        text = make_text(tokens, 16, device, [0, 1000])
        bounds = Bounds(
            *(torch.full((2, 8, tokens // 16 + 40, 128), inf, device=device).bfloat16() for inf in (INF, -INF))
        )
        keys, q = normal(2, 8, tokens, 128).to(device).bfloat16(), whole(2, 32, 1, 128, seed=1).to(device).bfloat16()
        ops.widen_pages(*bounds, keys, text.seen, 16, padding=text.padding)
        exact = Bounds(torch.full_like(bounds.low, INF), torch.full_like(bounds.high, -INF))
        reference.widen_pages(exact, keys, text, None)
        assert torch.equal(bounds.low, exact.low) and torch.equal(bounds.high, exact.high)
        bounds = Bounds(*(bound.float().mul(2).round().bfloat16() for bound in bounds))
        limits = Limits(count, None, 1)
        actual = ops.select_pages(q, *bounds, text.seen, count, 16, padding=text.padding)
        assert torch.equal(actual, reference.select_pages(q, bounds, text, limits))

    def test_graph_replay_follows_queries_and_tokens(self, device: torch.device) -> None:
        text, keys = make_text(4001, 16, device), whole(1, 8, 4100, 64).to(device)
        bounds = make_bounds(keys[:, :, :4000], make_text(4000, 16, device), room=10)
        exact = Bounds(*(bound.clone() for bound in bounds))
        q, slot = whole(1, 32, 1, 64, seed=1).to(device), torch.full((1, 8, 1), 4000, device=device)

        def step() -> Tensor:
            rows = ops.select_pages(q, *bounds, text.seen, 32, 16)
            ops.widen_pages(*bounds, keys, text.seen, 16, slot=slot)
            return rows

        step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = step()
        reference.widen_pages(exact, keys, text, slot)
        for seed in range(40):
            text.seen.add_(1)
            slot.add_(1)
            q.copy_(whole(1, 32, 1, 64, seed=seed))
            expected = reference.select_pages(q, exact, text, Limits(32, None, 1))
            graph.replay()
            assert torch.equal(captured, expected)
            reference.widen_pages(exact, keys, text, slot)
            assert torch.equal(bounds.low, exact.low) and torch.equal(bounds.high, exact.high)
