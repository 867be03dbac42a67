"""SubGen's structure: blocks against the token loop, capacity policies, and limit cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.subgen.sketch import Sketch, Tokens, fold
from kvsketch.methods.subgen.slots import covering_radii, resized
from kvsketch.ops.fold_token import DENOMINATOR, NUMERATOR, Plan
from kvsketch.ops.fold_token.reference import numerator_shares
from kvsketch.ops.reservoir.reference import draws
from kvsketch.slots.tensors import gather_slots
from tests.methods.subgen_streams import (
    DEVICE,
    LEAST_P,
    clustered,
    denominator,
    exact_terms,
    normal,
    numerator,
    p_value,
    run,
    stream,
)

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


def test_doubling_from_a_radius_of_zero_begins_with_the_closest_pair() -> None:
    keys = torch.tensor([[0.0], [1.0], [3.0], [7.0], [15.0]])
    sketch = run(stream(keys, keys + 1), 1, 2, 0.0, "double", clusters=4)
    assert sketch.delta.tolist() == [[1.0]]
    assert sketch.counts[0, 0].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(("apart", "delta"), [(1.5, 2.0), (2.0, 2.0), (10.0, 16.0)])
def test_a_radius_is_doubled_until_two_keys_lie_within_it_and_no_further(apart: float, delta: float) -> None:
    keys = apart * torch.arange(3.0).unsqueeze(1)
    assert run(stream(keys, keys + 1), 1, 2, 1.0, "double", clusters=2).delta.tolist() == [[delta]]


def test_a_larger_structure_repeats_the_slots_of_its_clusters_and_a_smaller_one_pours_clusters_together() -> None:
    sketch = run(stream(clustered(60, 4), normal(60, 2)), 1, 3, delta=2.0)
    event, again = torch.zeros_like(sketch.alive), [0, 1, 2, 0, 1, 2, 0]
    larger = resized(sketch, torch.tensor([[1, 4, 7]], device=DEVICE), (1, 4, 7), event, grows=True)
    assert torch.equal(larger.den_index, sketch.den_index[..., again])
    assert torch.equal(larger.den_keys, sketch.den_keys[..., again, :])
    smaller = resized(sketch, torch.tensor([[1, 2, 3]], device=DEVICE), (1, 2, 3), event, grows=False)
    points, counts = sketch.representatives[0, 0], sketch.counts[0, 0]
    poured = counts[:2].clone().index_add_(0, torch.cdist(points[2:], points[:2]).argmin(1), counts[2:])
    assert len(counts) == 4 and torch.equal(smaller.counts[0, 0], poured)


def test_rounding_leaves_no_key_outside_the_radius_that_covers_it() -> None:
    """The farthest key of each of 64 heads lies at the radius itself, which has been rounded."""
    keys, clusters = normal(1, 64, 40, 8).to(DEVICE), 5
    position = torch.arange(40, device=DEVICE)[None]
    tokens = Tokens(keys, keys, position, position, torch.ones_like(position, dtype=torch.bool))
    delta = covering_radii(tokens, [Plan(0, 0, 0, 0, clusters, 1)])
    centers = gather_slots(keys, ops.farthest_first(keys, clusters).index)
    farthest = (keys.unsqueeze(3) - centers.unsqueeze(2)).square().sum(-1).amin(-1).amax(-1)
    assert (farthest <= delta.square()).all() and (farthest > 0.99 * delta.square()).all()


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


def test_a_row_uses_no_more_samples_clusters_and_slots_than_it_has() -> None:
    """Of a batch whose other rows have more."""
    tokens = stream(normal(60, 3), normal(60, 2), heads=4)
    sketch = Sketch.empty(tokens, 6, 4, 5)
    sizes, delta = torch.tensor([[3, 2, 2]], device=DEVICE), torch.full_like(sketch.delta, 0.5)
    folded = fold(replace(sketch, sizes=sizes, delta=delta), tokens, "absorb")
    assert (folded.index[..., :3] >= 0).all() and (folded.index[..., 3:] == -1).all()
    assert (folded.alive == 2).all() and (folded.counts.sum(-1) == 60).all()
    assert (folded.den_index[:, :, :2, :2] >= 0).all() and (folded.den_index[..., 2:] == -1).all()


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
