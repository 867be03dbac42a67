"""Ways to choose tokens that were tried (`scripts/choices_tried.py`): what each of them claims of itself."""

from __future__ import annotations

import pytest
import torch

from kvsketch import CompressedCache, prefill
from kvsketch.methods.rehearse import refit
from kvsketch.methods.waiting import ALWAYS, NEG_INF
from scripts.choices_tried import SEGMENT, Heads, least_sum, output_error, spread
from tests.helpers import zoo

FORM = "scripts.choices_tried:ChoicesTried:budget=1/4:bits=16"


def heads(count: int = 1, tokens: int = 40, size: int = 8) -> Heads:
    draw = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(count, n, size, generator=draw) for n in (256, tokens, tokens))
    return Heads(queries, keys + 1, values, size**-0.5)


def test_a_drop_costs_what_the_fit_of_the_others_lacks() -> None:
    own, stays = heads(), torch.arange(40) % 3 == 0
    costs = own.drop_costs(0, stays)
    slots = own.slots(0, stays)
    a, target, share = slots.seen_by(own.queries)
    w = refit.fitted_weights(a.mT @ a, a, share, refit.WEIGHT_STEPS)[0].double()
    a, target, plain = a[0].double(), target[0].double(), slots.plain()[0].double()
    ridge = refit.RIDGES[1] * (a.mT @ a).diagonal().mean()
    wanted, near = (a @ w).unsqueeze(1) * target, w.unsqueeze(1) * plain

    def least(without: int | None) -> torch.Tensor:
        """The least of |A B - wanted|^2 + r |B - near|^2, with row `without` of B zero."""
        there = torch.arange(len(w)) != (-1 if without is None else without)
        part, pulled = a[:, there], near[there]
        gram = part.mT @ part + ridge * torch.eye(int(there.sum()), dtype=torch.double)
        b = torch.linalg.solve(gram, part.mT @ wanted + ridge * pulled)
        lost = 0 if without is None else ridge * near[without].square().sum()
        return (part @ b - wanted).square().sum() + ridge * (b - pulled).square().sum() + lost

    whole = least(None)
    for slot in range(len(w)):
        assert float(costs[slot]) == pytest.approx(float((least(slot) - whole) / target.square().sum()), rel=1e-4)


def test_every_segment_keeps_its_part() -> None:
    worth = torch.rand(2, 3 * SEGMENT, generator=torch.Generator().manual_seed(0))
    worth[:, :4] = ALWAYS
    worth[0, SEGMENT : 2 * SEGMENT] *= 1e-3
    stays = spread(worth, 12) == ALWAYS
    assert stays[:, :4].all() and (stays.view(2, 3, SEGMENT).sum(-1) == torch.tensor([8, 4, 4])).all()
    assert (spread(worth.masked_fill(worth < 0.5, NEG_INF), 3000) > NEG_INF).equal(worth >= 0.5)


def test_prices_divide_a_total() -> None:
    size = torch.tensor([[10.0, 20, 40]] * 3)
    error = torch.tensor([[0.9, 0.1, 0.09], [0.9, 0.8, 0.1], [0.2, 0.19, 0.18]])
    chosen = least_sum(lambda price: (error + price * size).argmin(1, keepdim=True), size, 70)
    assert float(chosen.sum()) == pytest.approx(70) and chosen.tolist() == pytest.approx([20, 40, 10])


def test_moved_keys_err_less_on_queries_that_were_held_back() -> None:
    own, stays = heads(tokens=64), torch.arange(64) % 8 == 0
    moved = own.moved(0, stays, 16)
    assert not moved[stays].equal(own.keys[0][stays]) and moved[~stays].equal(own.keys[0][~stays])
    fit = own.queries.shape[1] - own.queries.shape[1] // refit.HELD_BACK

    def error(held: torch.Tensor) -> float:
        slots = own.slots(0, stays, held)
        fitted = refit.refit(own.queries, slots)
        return float(output_error(own.queries[:, fit:], slots, fitted.log_weights.exp(), fitted.values))

    assert error(moved[stays]) < error(own.keys[0][stays])


@pytest.mark.parametrize("how", ["choose=quota", "choose=gram", "choose=gram-all", "choose=curves", "move=2"])
def test_caches_keep_as_many_tokens_as_those_of_rehearse(how: str) -> None:
    model, ids = zoo.build("llama", num_hidden_layers=2), zoo.tokens(1, 200)
    plain, tried = (CompressedCache(model, form) for form in (FORM, f"{FORM}:{how}"))
    for cache in (plain, tried):
        prefill(model, ids, cache)
    # Heads keep whole slots of what a price gives them.
    assert 0 <= plain.device_bytes - tried.device_bytes <= 8 * plain.device_bytes // 200
    with torch.no_grad():
        after = [model(ids[:, :1], past_key_values=cache).logits for cache in (plain, tried)]
    assert after[1].isfinite().all() and not after[1].equal(after[0])


def test_several_chunks_are_refused() -> None:
    model, ids = zoo.build("llama", num_hidden_layers=2), zoo.tokens(1, 200)
    with pytest.raises(ValueError, match="one text of one chunk"):
        prefill(model, ids, CompressedCache(model, f"{FORM}:chunk=64"))
