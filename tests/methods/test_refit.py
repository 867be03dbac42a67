"""Refitted slots: the error falls, equal keys merge exactly, and a head that gains nothing stays as it is."""

from __future__ import annotations

import pytest
import torch

from kvsketch.methods.rehearse import refit as module
from kvsketch.methods.rehearse.problems import Changes, LayerProblems, refit_layers
from kvsketch.methods.rehearse.refit import Slots, refit

pytestmark = pytest.mark.touchy


@pytest.fixture(autouse=True, params=[module.SOLVED, 0], ids=["solved", "stepped"])
def solved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it with values that are solved to the end, and with those of a few steps."""
    monkeypatch.setattr(module, "SOLVED", request.param)


def problem(slots: int = 60, kept: int = 20, queries: int = 400) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(slots)
    q, k = 2.0 * torch.randn(6, queries, 16), torch.randn(6, slots, 16)
    v = torch.randn(6, slots, 16)
    return q, k, v, torch.stack([torch.randperm(slots)[:kept] for _ in range(6)])


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 0.25 * q @ k.mT + log_w.unsqueeze(1)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.gather(1, at.unsqueeze(-1).expand(*at.shape, x.shape[-1]))


def test_new_queries_see_the_mass_and_the_output_of_all_slots_better() -> None:
    q, k, v, kept = problem()
    result = refit(q[:, :300], Slots(k, v, kept, 0.25))
    new = q[:, 300:]
    out, mass = attended(new, k, v, torch.zeros(6, 60))
    errors = []
    for values, log_w in ((rows(v, kept), torch.zeros(6, 20)), (result.values, result.log_weights)):
        out_kept, mass_kept = attended(new, rows(k, kept), values, log_w)
        errors.append(((out_kept - out).square().mean().item(), (mass_kept - mass).square().mean().item()))
    assert errors[1][0] < 0.6 * errors[0][0] and errors[1][1] < 0.3 * errors[0][1]
    assert (result.gain < 1).all()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_slots_with_equal_keys_merge_into_one_with_their_sum(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where queries see about as much elsewhere: what is fitted is their share of the chunk."""
    monkeypatch.setattr(module, "RIDGES", (1e-6, 1e-6))
    q, k, v, _ = problem(slots=40, queries=200)
    k[:, 20:] = k[:, :20]
    kept = torch.arange(20).expand(6, 20)
    others = (0.25 * q @ k.mT).logsumexp(-1) + torch.linspace(-2.0, 2.0, 200) if elsewhere else None
    result = refit(q, Slots(k, v, kept, 0.25, elsewhere=others), steps=(2000, 100))
    torch.testing.assert_close(result.log_weights.exp(), torch.full((6, 20), 2.0), atol=0.02, rtol=0)
    out, mass = attended(q, k, v, torch.zeros(6, 40))
    out_kept, mass_kept = attended(q, k[:, :20], result.values, result.log_weights)
    torch.testing.assert_close(out_kept, out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(mass_kept, mass, atol=0.02, rtol=0)


def test_what_is_fitted_is_never_worse_than_plain_slots_on_the_fitted_queries() -> None:
    q, k, _, kept = problem()
    p = (0.25 * q @ k.mT).softmax(-1)
    a = p.gather(2, kept.unsqueeze(1).expand(6, 400, 20))
    w = module.fitted_weights(module.squared(a), a, torch.ones(6, 400), module.WEIGHT_STEPS)
    gram_ridge = module.RIDGES[0] * (a * a).sum(1).mean(-1, keepdim=True)

    def cost(weights: torch.Tensor) -> torch.Tensor:
        missing = (a @ weights.unsqueeze(-1)).squeeze(-1) - 1
        return missing.square().sum(-1) + (gram_ridge * (weights - 1).square()).sum(-1)

    assert (cost(w) <= cost(torch.ones_like(w))).all() and (w >= module.WEIGHTS[0]).all()


def test_values_are_held_back_by_what_weights_make_of_their_slots() -> None:
    """A diag(w) is all that values depend on: nothing changes where slots weigh 16 times as much and are seen as much
    less, which no rounding notices.
    """
    q, k, v, kept = problem()
    p = (0.25 * q @ k.mT).softmax(-1)
    a, target = p.gather(2, kept.unsqueeze(1).expand(6, 400, 20)), p @ v
    w = 0.5 + torch.rand(6, 20, generator=torch.Generator().manual_seed(0))
    result = []
    for times in (1.0, 16.0):
        seen = a / times
        result.append(module.fitted_values(module.squared(seen), seen, times * w, rows(v, kept), target, 8)[0])
    torch.testing.assert_close(*result, atol=1e-4, rtol=1e-4)


def test_what_rounding_does_to_keys_is_fitted_away() -> None:
    q, k, v, kept = problem(kept=54)
    rough = (k * 2).round() / 2
    out, mass = attended(q, k, v, torch.zeros(6, 60))
    errors = []
    for held in (None, rough):
        result = refit(q, Slots(k, v, kept, 0.25, held=None if held is None else rows(held, kept)))
        out_kept, mass_kept = attended(q, rows(rough, kept), result.values, result.log_weights)
        errors.append((out_kept - out).square().mean().item() + (mass_kept - mass).square().mean().item())
    assert errors[1] < 0.9 * errors[0]


def test_queries_that_look_elsewhere_do_not_count() -> None:
    q, k, v, kept = problem()
    away = torch.arange(400) % 2 == 0
    elsewhere = torch.where(away, 60.0, -torch.inf).expand(6, -1)
    all_of_them, near = (
        refit(q, Slots(k, v, kept, 0.25, elsewhere=elsewhere)),
        refit(q[:, ~away], Slots(k, v, kept, 0.25)),
    )
    torch.testing.assert_close(all_of_them.log_weights, near.log_weights, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(all_of_them.values, near.values, atol=2e-3, rtol=2e-3)


def test_a_head_whose_held_back_queries_lose_keeps_its_plain_slots() -> None:
    q, k, v, kept = problem(queries=64)
    held = torch.arange(64) >= 64 - 64 // module.HELD_BACK
    # The queries that are fitted see other slots than those held back.
    q[:, held] = -8.0 * q[:, held]
    q[0] = q[0].abs()
    result = refit(q, Slots(k, v, kept, 0.25))
    plain = ~(result.gain < 1)
    assert plain.any()
    assert (result.log_weights[plain] == 0).all()
    torch.testing.assert_close(result.values[plain], rows(v, kept)[plain])


def test_heads_that_keep_fewer_slots_are_fitted_as_if_alone() -> None:
    q, k, v, kept = problem()
    alone = refit(q[:1], Slots(k[:1], v[:1], kept[:1, :7], 0.25))
    kept[0, 7:] = -1
    together = refit(q, Slots(k, v, kept, 0.25))
    torch.testing.assert_close(together.values[0, :7], alone.values[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(together.log_weights[0, :7], alone.log_weights[0], atol=1e-2, rtol=1e-2)
    assert (together.log_weights[0, 7:] == 0).all()


@pytest.mark.parametrize("solved", [module.SOLVED], indirect=True)
def test_the_last_bit_of_an_input_does_not_move_the_values_of_few_slots() -> None:
    """Queries see all keys nearly alike: the normal matrix has one large eigenvalue, and steps differ by 0.3."""
    q, k, v, kept = problem(slots=40, kept=15)
    q, k = q / 4, k / 2
    first = refit(q, Slots(k, v, kept, 0.25))
    again = refit(q, Slots(k * (1 + 1e-7 * torch.randn_like(k)), v, kept, 0.25))
    assert (first.gain < 1).all()
    torch.testing.assert_close(first.log_weights, again.log_weights, atol=1e-3, rtol=0)
    torch.testing.assert_close(first.values, again.values, atol=1e-3, rtol=0)


@pytest.mark.parametrize("solved", [module.SOLVED], indirect=True)
def test_values_are_solved_to_the_end() -> None:
    """The slope of the sum of squares is 0 there."""
    q, k, v, kept = problem()
    a, target, _ = Slots(k, v, kept, 0.25).seen_by(q)
    plain, w = rows(v, kept), torch.linspace(0.5, 4.0, 20).expand(6, 20)
    x = (a * w.unsqueeze(1)).double()
    ridge = module.RIDGES[1] * x.square().sum(1).mean(-1).view(-1, 1, 1)
    result, parts = module.solved_values(a.double().mT @ a.double(), a, w, plain, target)
    missing = x @ result.double() - x.sum(-1, keepdim=True) * target.double()
    slope = x.mT @ missing + ridge * (result - plain).double()
    assert slope.abs().max() < 1e-4 * (x.mT @ target.double()).abs().max()
    torch.testing.assert_close(parts, result * w.unsqueeze(-1))


@pytest.mark.parametrize("solved", [module.SOLVED], indirect=True)
@pytest.mark.parametrize("way", ["solved", "stepped", "few"])
def test_a_ridge_holds_values_near_what_they_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """|A diag(w) V' - diag(A w) O|^2 + r' |V' - V|^2 has slope 0, however many steps lead there.

    Where it is stepped, r' is a large share of the mean of the diagonal, so that few steps are enough.
    """
    if way != "solved":
        monkeypatch.setattr(module, "RIDGES", (1e-2, 0.5))
    q, k, v, kept = problem(slots=60, kept=30, queries=24 if way == "few" else 200)
    a, target, _ = Slots(k, v, kept, 0.25).seen_by(q)
    plain, w = rows(v, kept), torch.linspace(0.5, 2.0, 30).expand(6, 30)
    if way == "solved":
        result, _ = module.solved_values(a.double().mT @ a.double(), a, w, plain, target)
    elif way == "stepped":
        result, _ = module.fitted_values(module.squared(a), a, w, plain, target, 60)
    else:
        result, _ = module.values_of_few(a, w, plain, target, 60)
    x = (a * w.unsqueeze(1)).double()
    pull = module.RIDGES[1] * x.square().sum(1).mean(-1).view(-1, 1, 1) * (result - plain).double()
    slope = x.mT @ (x @ result.double() - x.sum(-1, keepdim=True) * target.double()) + pull
    assert slope.norm() < 0.01 * pull.norm()


def test_fewer_queries_than_slots_are_fitted_by_the_same_steps() -> None:
    """In sums over queries, without a matrix of slots by slots."""
    q, k, v, kept = problem(slots=60, kept=40, queries=24)
    a, target, share = Slots(k, v, kept, 0.25).seen_by(q)
    plain, gram = rows(v, kept), module.squared(a)
    weights = [module.fitted_weights(matrix, a, share, 16) for matrix in (gram, a)]
    torch.testing.assert_close(weights[1], weights[0], atol=1e-4, rtol=1e-4)
    for steps in (1, 2, 5):
        expected = module.fitted_values(gram, a, weights[0], plain, target, steps)
        for ours, theirs in zip(module.values_of_few(a, weights[0], plain, target, steps), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_a_head_with_a_nan_keeps_its_plain_slots_and_the_others_are_fitted() -> None:
    q, k, v, kept = problem()
    expected = refit(q, Slots(k, v, kept, 0.25))
    k[2, 5] = float("nan")
    result = refit(q, Slots(k, v, kept, 0.25))
    others = torch.arange(6) != 2
    assert (result.log_weights[2] == 0).all()
    torch.testing.assert_close(result.values[2], rows(v, kept)[2])
    torch.testing.assert_close(result.values[others], expected.values[others])


def test_inputs_in_bf16_are_fine() -> None:
    """Queries, keys, values and all products of them rounded to bf16: new queries see no more error."""
    q, k, v, kept = problem()
    new, plain = q[:, 300:], Slots(k, v, kept, 0.25)
    half = Slots(k.bfloat16(), v.bfloat16(), kept, 0.25)
    errors = []
    for result in (refit(q[:, :300], plain), refit(q[:, :300].bfloat16(), half)):
        out, mass = attended(new, k, v, torch.zeros(6, 60))
        out_kept, mass_kept = attended(new, rows(k, kept), result.values.float(), result.log_weights)
        errors.append(((out_kept - out).square().mean() + (mass_kept - mass).square().mean()).item())
    assert errors[1] < 1.05 * errors[0]


def test_few_steps_fit_new_queries_as_well_as_many() -> None:
    q, k, v, kept = problem()
    new, errors = q[:, 300:], []
    for steps in ((module.WEIGHT_STEPS, module.VALUE_STEPS), (300, 100)):
        result = refit(q[:, :300], Slots(k, v, kept, 0.25), steps=steps)
        out, mass = attended(new, k, v, torch.zeros(6, 60))
        out_kept, mass_kept = attended(new, rows(k, kept), result.values, result.log_weights)
        errors.append(((out_kept - out).square().mean() + (mass_kept - mass).square().mean()).item())
    assert errors[0] < 1.1 * errors[1]


def test_folding_adds_a_slot_to_the_one_with_its_key() -> None:
    """Slot 2 has the key of slot 0 and half its score; a sink, slot 1, takes nothing although slot 3 is like it."""
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 64, 8)
    k[:, 2], k[:, 3] = k[:, 0], k[:, 1]
    score = torch.tensor([[0.8, 2.0, 0.4, 0.8]])
    slots = Slots(k, v, torch.tensor([[0, 1]]), 0.3)
    result = module.fold(q, slots, score)
    assert result.gain < 1
    torch.testing.assert_close(result.log_weights.exp(), torch.tensor([[1 + 0.5 + 1.0, 1.0]]))
    torch.testing.assert_close(result.values[0, 0], (v[0, 0] + 0.5 * v[0, 2] + v[0, 3]) / 2.5)
    torch.testing.assert_close(result.values[0, 1], v[0, 1])


@pytest.mark.parametrize(("at", "nearest"), [(1.5, 0), (2.5, 1)])
def test_folding_takes_the_nearest_key_and_at_most_once(at: float, nearest: int) -> None:
    """Slot 2 lies between two keys of other lengths; its greater score counts as an equal one.

    Tokens that always stay may have a smaller score than one that goes.
    """
    k, q = torch.zeros(1, 3, 8), torch.zeros(1, 64, 8)
    k[0, :, 0] = torch.tensor([0.0, 4.0, at])
    v = torch.eye(3, 8).unsqueeze(0)
    result = module.fold(q, Slots(k, v, torch.tensor([[0, 1]]), 0.3), torch.tensor([[0.2, 0.5, 0.9]]))
    assert result.gain < 1
    torch.testing.assert_close(result.log_weights.exp()[0], 1 + torch.eye(2)[nearest])
    torch.testing.assert_close(result.values[0, nearest], (v[0, nearest] + v[0, 2]) / 2)


def fitted(steps: int, kept: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after so many steps, and the least of the sum of squares with its ridge; all are positive."""
    torch.manual_seed(5)
    a = torch.rand(2, 200, kept)
    share = (a @ (1 + 0.5 * torch.rand(2, kept, 1))).squeeze(-1) + 0.5 * torch.randn(2, 200)
    exact = a.double()
    gram = exact.mT @ exact
    ridge = module.RIDGES[0] * gram.diagonal(dim1=-2, dim2=-1).mean(-1).view(-1, 1)
    matrix = gram + ridge.unsqueeze(-1) * torch.eye(kept)
    wanted = torch.linalg.solve(matrix, (exact.mT @ share.double().unsqueeze(-1)).squeeze(-1) + ridge)
    assert wanted.min() > 0
    return module.fitted_weights((a.mT @ a).contiguous(), a, share, steps), wanted.float()


def test_a_hundredth_of_the_diagonal_pulls_weights_to_one() -> None:
    """One slot, of which 50 queries want three times as much: (150 + r) / (50 + r) with r = 50 / 100."""
    a = torch.ones(1, 50, 1)
    w = module.fitted_weights(module.squared(a), a, torch.full((1, 50), 3.0), module.WEIGHT_STEPS)
    assert w.item() == pytest.approx(150.5 / 50.5, rel=1e-4)


def test_weights_are_the_least_of_their_sum_of_squares_and_ridge() -> None:
    torch.testing.assert_close(*fitted(2000), atol=1e-3, rtol=1e-3)


def test_the_steps_of_weights_gain_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on in the direction of the one before it: plain gradients are farther from the end after as many."""
    own = module.weight_steps
    fast, wanted = fitted(module.WEIGHT_STEPS)
    monkeypatch.setattr(module, "weight_steps", lambda descent, speeds: own(descent, [0.0] * len(speeds)))
    slow, _ = fitted(module.WEIGHT_STEPS)
    assert (fast - wanted).norm() < 0.8 * (slow - wanted).norm()


@pytest.mark.parametrize("count", [7, 300, 640])
def test_a_square_is_that_of_the_matrix(count: int) -> None:
    """Also where it is computed in blocks, and what lies below the diagonal is copied."""
    a = torch.rand(2, 40, count)
    torch.testing.assert_close(module.squared(a), a.mT @ a)


def changes(chunks: list[range], folds: bool, stays: range = range(0, 30, 3)) -> Changes:
    """The refit of two heads of 30 tokens, of which those of the chunks come again."""
    torch.manual_seed(0)
    keys, values, queries = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(2, 30, 64, 8)
    worth, most = torch.rand(2, 30), max(map(len, chunks))
    places = torch.tensor([[*chunk, *[-1] * (most - len(chunk))] for chunk in chunks])
    marks = torch.stack([torch.isin(places, torch.tensor(stays)), places >= 0]).unsqueeze(1).expand(-1, 2, -1, -1)
    asked = queries[:, [chunk[0] for chunk in chunks]]
    layer = LayerProblems(asked, keys, None, values, worth, places, marks, 0.3, None, 0)
    return refit_layers([layer], marks.sum(-1).unsqueeze(1), folds)[0]


@pytest.mark.parametrize("folds", [False, True])
def test_a_chunk_is_refitted_alone_beside_a_longer_one(folds: bool) -> None:
    """What fills up the shorter one is no token of it."""
    together, first, second = (changes(c, folds) for c in ([range(17), range(17, 30)], [range(17)], [range(17, 30)]))
    result, alone = (torch.cat([c.log_weights.unsqueeze(1), c.values], 1) for c in (together, _joined(first, second)))
    order, wanted = together.place.argsort(), _joined(first, second).place.argsort()
    torch.testing.assert_close(result[order], alone[wanted], atol=1e-3, rtol=1e-3)
    assert together.log_weights.abs().max() > 0.1, "weights were refitted"


def test_layers_fold_by_their_own_scores() -> None:
    torch.manual_seed(0)
    places = torch.arange(30).unsqueeze(0)
    marks = torch.stack([places % 3 == 0, places >= 0]).unsqueeze(1).expand(-1, 2, -1, -1)
    layers = []
    for _ in range(2):
        keys, values, asked = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(2, 1, 64, 8)
        layers.append(LayerProblems(asked, keys, None, values, torch.rand(2, 30), places, marks, 0.3, None, 0))
    counted = marks.sum(-1).unsqueeze(1)
    together = refit_layers(layers, counted.expand(-1, 2, -1, -1), True)
    for layer, change in zip(layers, together, strict=True):
        alone = refit_layers([layer], counted, True)[0]
        torch.testing.assert_close(change.log_weights, alone.log_weights)
        torch.testing.assert_close(change.values, alone.values)
        assert alone.log_weights.abs().max() > 0.1


@pytest.mark.parametrize("solved", [module.SOLVED], indirect=True)
def test_a_cpu_asks_some_of_the_queries() -> None:
    """A quarter fewer where slots are many; a GPU asks all of them."""
    cpu, slots = torch.device("cpu"), (module.SOLVED, module.SOLVED + 1)
    assert [module.queries_of(kept, 1000, cpu) for kept in slots] == [384, 288]
    assert [module.queries_of(kept, 200, cpu) for kept in slots] == [200, 200]
    assert module.queries_of(1, 1000, torch.device("cuda")) == 1000


def test_a_cpu_leaves_heads_as_they_are_that_keep_nine_tenths() -> None:
    kept, sizes = torch.tensor([0, 89, 90, 99, 100]), torch.full((5,), 100)
    assert module.worth_it(kept, sizes, torch.device("cpu")).tolist() == [True, True, False, False, False]
    assert module.worth_it(kept, sizes, torch.device("cuda")).tolist() == [True, True, True, True, False]
    sizes_of = [len(changes([range(30)], folds, range(count)).place) for count in (26, 27) for folds in (False, True)]
    assert sizes_of == [52, 52, 0, 54]


def _joined(*parts: Changes) -> Changes:
    return Changes(*(torch.cat(each) for each in zip(*parts, strict=True)))
