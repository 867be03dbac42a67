"""SubGen's structure on plain keys and values: the paper's lemmas and exact variances.

Draws depend on the head, so heads that hold the same keys and values are independent runs. Seeds are fixed; each
statistical check states the chance with which a right implementation would fail it for a random seed, and each is shown
to reject a law that is wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.subgen.sketch import Sketch, fold, stream_states
from kvsketch.methods.subgen.slots import resized
from kvsketch.ops.fold_token import DENOMINATOR, NUMERATOR
from kvsketch.ops.reservoir.reference import thresholds
from tests.methods.subgen_streams import (
    DEVICE,
    LEAST_P,
    SIGMAS,
    clustered,
    denominator,
    exact_terms,
    normal,
    numerator,
    numerator_terms,
    off_by,
    p_value,
    part,
    run,
    stream,
)

# T1, T2: the numerator's samples


def test_mu_is_the_sum_of_squared_norms_after_every_token() -> None:
    values = normal(60, 5)
    tokens = stream(normal(60, 4, seed=1), values)
    sketch = Sketch.empty(tokens, 3, 1, 1)
    for i in range(60):
        sketch = fold(sketch, part(tokens, i, i + 1), "absorb")
        expected = values[: i + 1].double().square().sum()
        torch.testing.assert_close(sketch.mu.cpu().flatten()[0], expected, rtol=1e-6, atol=0)
    assert sketch.mu.dtype == torch.float64


def values_with_zeros() -> Tensor:
    values = normal(50, 6) * torch.linspace(0.2, 3.0, 50)[:, None]
    values[[0, 17]] = 0.0
    return values


@pytest.mark.parametrize("block", [50, 7, 1])
def test_samples_follow_the_squared_norms(block: int) -> None:
    """Lemma 2.2, 47 degrees of freedom; a zero value is never drawn. False alarm: 1e-4."""
    values = values_with_zeros()
    sketch = run(stream(normal(50, 4), values), s=20_000, t=1, delta=1.0, block=block)
    assert p_value(sketch.index, values.square().sum(-1)) > LEAST_P


def test_the_check_of_samples_rejects_other_laws() -> None:
    values = values_with_zeros()
    tokens = stream(normal(50, 4), values)
    law = values.square().sum(-1)
    squares = law.to(DEVICE).double().expand(1, 1, -1)
    state = Sketch.empty(tokens, 1, 1, 1).streams[..., NUMERATOR]
    after = squares.cumsum(-1)
    wrong = {
        "norms instead of squared norms": thresholds(squares.sqrt(), squares.sqrt().cumsum(-1)),
        "mu without the token itself": thresholds(squares, (after - squares).clamp_min(1e-9)).clamp_max(1 << 32),
        "mu one token late": thresholds(squares, after + squares),
        "uniform": thresholds(torch.ones_like(squares), torch.arange(1, 51, device=DEVICE)),
    }
    for name, threshold in wrong.items():
        last = ops.reservoir(state, tokens.positions, threshold, 20_000)
        assert p_value(last[last >= 0], law) < LEAST_P, name


def test_every_layer_head_and_sum_draws_for_itself() -> None:
    """A row draws the same in every batch, and a head whatever heads are beside it."""
    first, second, other = (stream_states(seed, layer, 2, 0, 3, DEVICE) for seed, layer in ((7, 0), (7, 1), (8, 0)))
    assert len(torch.cat([first[0], second[0], other[0]]).unique()) == 3 * 3 * 3
    assert torch.equal(first[0], first[1])
    assert torch.equal(stream_states(7, 0, 1, 1, 2, DEVICE), first[:1, 1:])


# T3: the numerator's variance


@pytest.mark.parametrize("samples", [32, 128, 512])
def test_variance_of_the_numerator_is_the_exact_one(samples: int) -> None:
    """E|z - V^T e|^2 = (|e|^2 |V|_F^2 - |V^T e|^2) / s, so the error falls as 1 / s. False alarm: 6e-5."""
    keys, values, query = normal(200, 4), normal(200, 6, seed=1), normal(4, seed=2)
    e, v = exact_terms(keys, query), values.double()
    identity = (e.square().sum() * v.square().sum() - (e @ v).square().sum()) / samples
    sketch = run(stream(keys, values, heads=500), samples, 1, 1.0, "absorb")
    error = (numerator(sketch, query).cpu() - e @ v).square().sum(-1)
    assert off_by(error, float(identity)) < SIGMAS
    assert off_by(numerator(sketch, query)[:, 0].cpu(), float((e @ v)[0])) < SIGMAS, "unbiased"
    # An estimate that is not divided by the probability is rejected.
    plain = (numerator(replace(sketch, mu=sketch.mu * 1.2), query).cpu() - e @ v).square().sum(-1)
    assert off_by(plain, float(identity)) > SIGMAS


# sampling=mixed: every second sample uniform


@pytest.mark.parametrize("block", [50, 7, 1])
def test_mixed_samples_follow_two_laws(block: int) -> None:
    """Even samples follow the squared norms, odd ones are uniform, zero values among them. False alarm: 1e-4 each."""
    values = values_with_zeros()
    sketch = run(stream(normal(50, 4), values), s=20_000, t=1, delta=1.0, block=block, mixed=True)
    assert sketch.folded.item() == 50
    even, odd = sketch.index[..., ::2], sketch.index[..., 1::2]
    squares, flat = values.square().sum(-1), torch.ones(50)
    assert p_value(even, squares) > LEAST_P and p_value(odd, flat) > LEAST_P
    assert p_value(even, flat) < LEAST_P and p_value(odd, squares) < LEAST_P


def test_further_samples_of_a_larger_budget_follow_the_same_two_laws() -> None:
    """They repeat earlier ones, of which the number is odd; each further one has another to repeat."""
    values, held = values_with_zeros(), 20_001
    sketch = run(stream(normal(50, 4), values), s=held, t=1, delta=1.0, mixed=True)
    sizes = (2 * held - 1, *sketch.sizes[0, 1:].tolist())
    larger = resized(sketch, torch.tensor([sizes], device=DEVICE), sizes, sketch.folded, grows=True)
    squares, flat, further = values.square().sum(-1), torch.ones(50), larger.index[..., held + 1 :]
    assert torch.equal(larger.index[..., :held], sketch.index)
    assert p_value(further[..., ::2], squares) > LEAST_P and p_value(further[..., 1::2], flat) > LEAST_P


@pytest.mark.parametrize("samples", [2, 31, 128])
def test_both_sums_of_mixed_samples_have_the_exact_mean_and_variance(samples: int) -> None:
    """A sample adds g = f / (a p + b / n): the mean is sum f, the variance a Var_p(g) + b Var_uniform(g).

    False alarm: 6e-5 each.
    """
    keys, values, query = normal(200, 4), normal(200, 6, seed=1), normal(4, seed=2)
    values = values * torch.linspace(0.05, 2.0, 200)[:, None]
    even, odd = (samples + 1) // 2, samples // 2
    p = values.double().square().sum(-1)
    p = p / p.sum()
    e = exact_terms(keys, query)
    sketch = run(stream(keys, values, heads=600), samples, 1, 1.0, "absorb", mixed=True)
    result = {
        "numerator": (numerator(sketch, query)[:, 0].cpu(), e * values[:, 0].double()),
        "denominator": (numerator_terms(sketch, query).sum(-1)[0].cpu(), e),
    }
    for name, (sums, f) in result.items():
        g = f / (even * p + odd / 200)
        variance = even * ((p * g * g).sum() - (p * g).sum() ** 2) + odd * ((g * g).mean() - g.mean() ** 2)
        assert off_by(sums, float(f.sum())) < SIGMAS, name
        assert off_by((sums - f.sum()).square(), float(variance)) < SIGMAS, name
        # Read with the weights of one law alone, the same samples are off.
        if odd:
            wrong = numerator_terms(replace(sketch, folded=None), query).sum(-1)[0].cpu()
            assert off_by(wrong, float(e.sum())) > SIGMAS


# T4, T5, T6: the denominator's clusters


def test_lemma_of_the_clusters_after_every_token() -> None:
    """Lemma 2.3: representatives are keys, counts are members, members lie within delta, representatives do not."""
    keys, delta = normal(60, 3), 1.3
    tokens = stream(keys, normal(60, 2))
    sketch = Sketch.empty(tokens, 1, 1, 4)
    sketch = replace(sketch, delta=torch.full_like(sketch.delta, delta))
    members: dict[int, list[int]] = {}
    for i in range(60):
        sketch = fold(sketch, part(tokens, i, i + 1), "grow")
        alive = int(sketch.alive)
        x = sketch.representatives[0, 0, :alive].cpu().double()
        counts = sketch.counts[0, 0, :alive].tolist()
        grown = [c for c in range(alive) if counts[c] != len(members.get(c, []))]
        assert len(grown) == 1, "a token joins one cluster"
        members.setdefault(grown[0], []).append(i)
        assert counts == [len(members[c]) for c in range(alive)]
        assert sum(counts) == i + 1
        for c in range(alive):
            assert torch.equal(x[c], keys[members[c][0]].double()), "the representative is the first member"
            assert (keys[members[c]].double() - x[c]).norm(dim=1).max() <= delta + 1e-6
            assert set(sketch.den_index[0, 0, c].tolist()) <= set(members[c])
        if alive > 1:
            assert torch.pdist(x).min() > delta - 1e-6


def test_cluster_slots_are_uniform_over_the_members() -> None:
    """Lemma 2.3 (5), one chi-square per cluster. False alarm: 1e-4 each, 4 clusters."""
    keys = clustered(60, 4)
    tokens = stream(keys, normal(60, 2))
    sketch = run(tokens, 1, 20_000, delta=2.0, block=13)
    labels = ops.leader_clustering(
        tokens.keys, tokens.valid[:, None], torch.zeros_like(sketch.representatives), torch.zeros_like(sketch.alive),
        sketch.delta, sketch.alive,
    ).labels[0, 0].cpu()  # fmt: skip
    assert sketch.alive.item() == 4
    for c in range(4):
        assert p_value(sketch.den_index[0, 0, c], (labels == c).double()) > LEAST_P
    member = labels == 0
    old_count = thresholds(torch.ones(60), (member.cumsum(0) - 1).clamp_min(1)) * member
    old_count = old_count.to(DEVICE).expand(1, 1, -1)
    slots = ops.reservoir(sketch.streams[..., DENOMINATOR], tokens.positions, old_count, 20_000)
    assert p_value(slots, member.double()) < LEAST_P, "the count before the token, instead of after, is rejected"


@pytest.mark.parametrize("per_cluster", [1, 8])
def test_denominator_is_unbiased_with_the_exact_variance(per_cluster: int) -> None:
    """Var(tau) = sum_i n_i^2 / t Var over members of exp(s). False alarm: 6e-5 for each of the two means."""
    keys, query = clustered(150, 5, spread=0.5), normal(4, seed=9)
    tokens = stream(keys, normal(150, 2), heads=500)
    sketch = run(tokens, 1, per_cluster, delta=4.0)
    x = sketch.representatives[0, 0, : int(sketch.alive[0, 0])].cpu().double()
    labels = torch.cdist(keys.double(), x).argmin(1)
    e = exact_terms(keys, query)
    parts = [e[labels == c] for c in range(len(x))]
    assert [len(p) for p in parts] == sketch.counts[0, 0].tolist()
    variance = sum(len(p) ** 2 / per_cluster * float(p.var(unbiased=False)) for p in parts)
    tau = denominator(sketch, query).cpu()
    assert off_by(tau, float(e.sum())) < SIGMAS
    assert off_by((tau - e.sum()).square(), variance) < SIGMAS
    without_counts = replace(sketch, counts=torch.full_like(sketch.counts, 30))
    assert off_by(denominator(without_counts, query).cpu(), float(e.sum())) > SIGMAS
    if per_cluster > 1:
        one_draw = sketch.den_keys[..., :1, :].expand_as(sketch.den_keys)
        tau = denominator(replace(sketch, den_keys=one_draw), query, coalesce=False).cpu()
        assert off_by((tau - e.sum()).square(), variance) > SIGMAS, "slots that are not independent"


def test_clusterable_keys_need_no_more_clusters_than_parts() -> None:
    centers = torch.eye(6) * 10
    which = torch.randint(6, (300,), generator=torch.Generator().manual_seed(0))
    keys = centers[which] + 0.5 * torch.nn.functional.normalize(normal(300, 6), dim=1)
    assert run(stream(keys, keys), 1, 2, delta=1.0).alive.item() <= 6
    assert run(stream(keys, keys), 1, 2, delta=0.4).alive.item() > 6, "a smaller radius needs more"
