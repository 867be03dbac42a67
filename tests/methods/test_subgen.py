"""SubGen's structure on plain keys and values: the paper's lemmas, exact variances, blocks against the token loop.

Draws depend on the head, so heads that hold the same keys and values are independent runs. Seeds are fixed; each
statistical check states the chance with which a right implementation would fail it for a random seed, and each is shown
to reject a law that is wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.subgen_sketch import Sketch, Tokens, fold
from kvsketch.ops.fold_token import DENOMINATOR, NUMERATOR
from kvsketch.ops.fold_token.reference import denominator_weights, numerator_shares, numerator_weights
from kvsketch.ops.reservoir.reference import draws, thresholds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.5
LEAST_P = 1e-4  # chance of a false alarm of one chi-square check
SIGMAS = 4.0  # and of one mean: 6e-5


def stream(keys: Tensor, values: Tensor, heads: int = 1, start: int = 0) -> Tokens:
    """Tokens [n, D] as one row of `heads` equal heads."""
    position = torch.arange(start, start + len(keys), device=DEVICE)[None]
    keys, values = (t.to(DEVICE).expand(1, heads, *t.shape) for t in (keys, values))
    return Tokens(keys, values, position, position, torch.ones_like(position, dtype=torch.bool))


def part(tokens: Tokens, start: int, end: int) -> Tokens:
    cut = slice(start, end)
    rows = (tensor[:, cut] for tensor in (tokens.index, tokens.positions, tokens.valid))
    return Tokens(tokens.keys[:, :, cut], tokens.values[:, :, cut], *rows)


def run(
    tokens: Tokens, s: int, t: int, delta: float, policy: str = "grow", clusters: int = 1, block: int | None = None
) -> Sketch:
    sketch = Sketch.empty(tokens, s, clusters, t)
    sketch = replace(sketch, delta=torch.full_like(sketch.delta, delta))
    count = tokens.keys.shape[2]
    for start in range(0, count, block or count):
        sketch = fold(sketch, part(tokens, start, start + (block or count)), policy)
    return sketch


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clustered(count: int, centers: int, size: int = 4, spread: float = 0.1, seed: int = 0) -> Tensor:
    """Keys around well separated centres, in random order."""
    middle = normal(centers, size, seed=seed) * 5
    which = torch.randint(centers, (count,), generator=torch.Generator().manual_seed(seed + 1))
    return middle[which] + spread * normal(count, size, seed=seed + 2)


def plan_of(sketch: Sketch) -> Tensor:
    zero = torch.zeros_like(sketch.samples)
    return torch.stack([zero, zero, zero, sketch.samples, sketch.clusters, sketch.per_cluster], 1)


def numerator(sketch: Sketch, query: Tensor, coalesce: bool = True) -> Tensor:  # [H, Dv]
    """z = sum of weight exp(scale <q, k>) v, in float64."""
    weights = numerator_weights(sketch.mu, numerator_shares(sketch.values, sketch.index, coalesce), plan_of(sketch))
    scores = SCALE * (sketch.keys.double() @ query.to(DEVICE).double())
    return ((weights.double() + scores).exp()[..., None] * sketch.values.double()).sum(2)[0]


def denominator(sketch: Sketch, query: Tensor, coalesce: bool = True) -> Tensor:  # [H]
    """tau = sum of weight exp(scale <q, k>), in float64."""
    weights = denominator_weights(sketch.counts, sketch.den_index, plan_of(sketch), coalesce)
    scores = SCALE * (sketch.den_keys.double() @ query.to(DEVICE).double())
    return (weights.double() + scores).exp().sum((2, 3))[0]


def p_value(observed: Tensor, law: Tensor) -> float:
    """Chi-square of token frequencies against their probabilities; tokens of probability 0 must not occur."""
    counts = torch.bincount(observed.flatten().cpu().long(), minlength=len(law)).double()
    law = law.double() / law.sum()
    if counts[law == 0].any():
        return 0.0
    return float(stats.chisquare(counts[law > 0].numpy(), (law[law > 0] * counts.sum()).numpy()).pvalue)


def off_by(samples: Tensor, expected: float) -> float:
    """Distance of the mean from its expected value, in standard errors."""
    return float((samples.mean() - expected).abs() / (samples.std() / len(samples) ** 0.5))


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


# T3: the numerator's variance


def exact_terms(keys: Tensor, query: Tensor) -> Tensor:
    return (SCALE * keys.double() @ query.double()).exp()


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


# T7: blocked against token by token


def token_loop(
    keys: Tensor, values: Tensor, s: int, t: int, delta: float, limit: int, streams: Tensor
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Algorithm 1 as the paper writes it: (samples, representatives, counts, cluster slots) as token numbers."""
    mu, samples = 0.0, [-1] * s
    leaders: list[int] = []
    counts: list[int] = []
    slots: list[list[int]] = []
    for i in range(len(keys)):
        position = torch.tensor([[i]], device=DEVICE)
        u_num, u_den = (
            (draws(streams[..., kind], position, size)[0, 0, 0].double() / 2**32).tolist()
            for kind, size in ((NUMERATOR, s), (DENOMINATOR, t))
        )
        distance = [float((keys[i] - keys[x]).square().sum().sqrt()) for x in leaders]
        if (not leaders or min(distance) > delta) and len(leaders) < limit:
            leaders.append(i)
            counts.append(1)
            slots.append([i] * t)
        else:
            c = distance.index(min(distance))
            counts[c] += 1
            slots[c] = [i if u < 1 / counts[c] else old for u, old in zip(u_den, slots[c], strict=True)]
        w = float(values[i].double().square().sum())
        if w > 0:
            samples = [i if u < w / (mu + w) else old for u, old in zip(u_num, samples, strict=True)]
        mu += w
    return samples, leaders, counts, slots


@pytest.mark.parametrize(("policy", "limit"), [("grow", 10**9), ("absorb", 6)])
@pytest.mark.parametrize("block", [1, 7, 64, 90])
def test_blocks_equal_the_token_loop_draw_for_draw(policy: str, limit: int, block: int) -> None:
    keys, values = clustered(90, 7, spread=0.8), normal(90, 3)
    values[5] = 0.0
    tokens = stream(keys, values, heads=2)
    sketch = run(tokens, 20, 3, 3.0, policy, clusters=6, block=block)
    for head in range(2):
        streams = sketch.streams[:, head : head + 1]
        samples, leaders, counts, slots = token_loop(keys, values, 20, 3, 3.0, limit, streams)
        alive = int(sketch.alive[0, head])
        assert sketch.index[0, head].tolist() == samples
        assert sketch.counts[0, head, :alive].tolist() == counts
        assert torch.equal(sketch.representatives[0, head, :alive].cpu(), keys[leaders])
        assert sketch.den_index[0, head, :alive].tolist() == slots
        assert torch.equal(sketch.keys[0, head].cpu(), keys[samples])
        assert torch.equal(sketch.den_keys[0, head, :alive].cpu(), keys[torch.tensor(slots)])


@pytest.mark.parametrize("block", [1, 10, 200])
def test_doubling_keeps_room_and_a_known_radius(block: int) -> None:
    keys = normal(200, 3) * torch.linspace(0.1, 6.0, 200)[:, None]
    tokens = stream(keys, normal(200, 2), heads=3)
    sketch = run(tokens, 1, 4, 0.05, "double", clusters=8, block=block)
    whole = run(tokens, 1, 4, 0.05, "double", clusters=8)
    assert torch.equal(sketch.den_index, whole.den_index)
    assert torch.equal(sketch.counts, whole.counts)
    assert (sketch.counts.sum(-1) == 200).all()
    assert (sketch.alive <= 8).all()
    assert (sketch.delta > 0.05).all()
    for head in range(3):
        x = sketch.representatives[0, head, : int(sketch.alive[0, head])].cpu()
        delta = float(sketch.delta[0, head])
        assert torch.log2(torch.tensor(delta / 0.05)).frac().abs() < 1e-5, "delta was doubled, nothing else"
        assert torch.pdist(x).min() > delta
        assert torch.cdist(keys, x).amin(1).max() <= 2 * delta


def test_merged_clusters_stay_uniform_samples_of_their_members() -> None:
    """After doubling everything lies in one cluster of 30 unlike parts. False alarm: 1e-4."""
    keys = torch.cat([torch.zeros(20, 1), torch.full((7, 1), 1.0), torch.full((3, 1), 2.0), torch.full((1, 1), 50.0)])
    sketch = run(stream(keys, keys + 1), 1, 20_000, 0.5, "double", clusters=2)
    counts = sketch.counts[0, 0].tolist()
    assert counts == [30, 1]
    law = torch.ones(31)
    law[30] = 0
    assert p_value(sketch.den_index[0, 0, 0], law) > LEAST_P


# T8: limits


def test_a_cluster_for_every_key_makes_the_denominator_exact() -> None:
    keys, query = normal(80, 4), normal(4, seed=3)
    sketch = run(stream(keys, keys), 1, 1, delta=0.0)
    assert sketch.alive.item() == 80
    torch.testing.assert_close(denominator(sketch, query).cpu()[0], exact_terms(keys, query).sum(), rtol=1e-6, atol=0)


def test_equal_keys_share_a_cluster_of_radius_zero() -> None:
    keys = normal(5, 4).repeat(4, 1)
    assert run(stream(keys, keys), 1, 1, delta=0.0).counts.tolist() == [[[4] * 5]]


def test_values_of_zero_leave_the_samples_empty() -> None:
    keys = normal(30, 4)
    sketch = run(stream(keys, torch.zeros(30, 3)), 8, 2, 1.0)
    assert (sketch.index == -1).all()
    assert sketch.mu.item() == 0
    assert numerator(sketch, keys[0]).abs().sum() == 0


def test_copies_counted_once_give_the_same_sums() -> None:
    keys, values, query = normal(12, 4), normal(12, 3), normal(4, seed=1)
    sketch = run(stream(keys, values), 50, 6, 2.0)
    assert len(set(sketch.index.flatten().tolist())) < 50
    for read in (numerator, denominator):
        torch.testing.assert_close(read(sketch, query, True), read(sketch, query, False), rtol=1e-5, atol=1e-6)
    shares = numerator_shares(sketch.values, sketch.index, True)
    assert int((shares > float("-inf")).sum()) == len(set(sketch.index.flatten().tolist()))
