"""Algorithm 1 of SubGen over plain keys and values: the structure, and its update by any number of tokens at once.

    M: s pairs (k, v), each drawn with probability |v|^2 / mu;    mu = sum |v|^2
    D: clusters (x_i, S_i, n_i): a representative, t keys drawn uniformly from the members, the number of members

The update by a block equals the token loop, draw for draw: leader clustering does not depend on blocks, and a reservoir
slot holds the last token that fired in it. Nothing here knows tables, windows or budgets.

Legend: B batch rows, H KV heads, n tokens, s samples, m clusters, t slots per cluster, D key size, Dv value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.fold_token import DENOMINATOR, MERGE, NUMERATOR
from kvsketch.ops.fold_token.reference import by_parity, norms
from kvsketch.ops.random import hash_combine, initial_state
from kvsketch.ops.reservoir.reference import thresholds
from kvsketch.slots.tensors import gather_slots

POLICIES = ("grow", "absorb", "double")


@dataclass(frozen=True)
class Tokens:
    """A stretch of the stream, in order; tokens that are not `valid` do not take part."""

    keys: Tensor  # [B, H, n, D]
    values: Tensor  # [B, H, n, Dv]
    index: Tensor  # [B, n] int64, what a slot remembers of its token
    positions: Tensor  # [B, n] int64, what the draws depend on
    valid: Tensor  # [B, n] bool

    def taken(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, ..., D] and index [B, H, ...] of the columns `at` [B, H, ...]."""
        flat = at.flatten(2)
        index = self.index[:, None].expand(-1, at.shape[1], -1).gather(2, flat)
        return gather_slots(self.keys, flat).unflatten(2, at.shape[2:]), index.view(at.shape)


@dataclass(frozen=True)
class Sketch:
    """M, D and mu for every row and head; a row may use fewer samples, clusters and slots than there is room for."""

    keys: Tensor  # [B, H, s, D]
    values: Tensor  # [B, H, s, Dv]
    index: Tensor  # [B, H, s] int64, -1 while null
    mu: Tensor  # [B, H] fp64
    representatives: Tensor  # [B, H, m, D]
    counts: Tensor  # [B, H, m] int64, 0: no such cluster; the clusters that exist come first
    den_keys: Tensor  # [B, H, m, t, D]
    den_index: Tensor  # [B, H, m, t] int64
    delta: Tensor  # [B, H] fp32
    streams: Tensor  # [B, H, 3] int64
    sizes: Tensor  # [B, 3] int64, used of s, m and t
    folded: Tensor | None = None  # [B, H] int64, tokens so far; given: samples with an odd number are drawn uniformly

    @property
    def alive(self) -> Tensor:  # [B, H]
        return (self.counts > 0).sum(-1)

    @classmethod
    def empty(
        cls,
        like: Tokens,
        s: int,
        m: int,
        t: int,
        seed: int = 0,
        layer: int = 0,
        first_head: int = 0,
        mixed: bool = False,
    ) -> Sketch:
        """A structure for the heads and sizes of `like` that has seen nothing; every row may use all the room."""
        batch, heads, _, size = like.keys.shape
        device = like.keys.device
        return cls(
            keys=like.keys.new_zeros(batch, heads, s, size),
            values=like.values.new_zeros(batch, heads, s, like.values.shape[3]),
            index=torch.full((batch, heads, s), -1, device=device),
            mu=torch.zeros(batch, heads, dtype=torch.float64, device=device),
            representatives=like.keys.new_zeros(batch, heads, m, size),
            counts=torch.zeros(batch, heads, m, dtype=torch.int64, device=device),
            den_keys=like.keys.new_zeros(batch, heads, m, t, size),
            den_index=torch.full((batch, heads, m, t), -1, device=device),
            delta=torch.zeros(batch, heads, device=device),
            streams=stream_states(seed, layer, batch, first_head, heads, device),
            sizes=torch.tensor([s, m, t], device=device).expand(batch, 3),
            folded=torch.zeros(batch, heads, dtype=torch.int64, device=device) if mixed else None,
        )


def stream_states(
    seed: int, layer: int, batch: int, first_head: int, heads: int, device: torch.device
) -> Tensor:  # [B, H, 3]
    """Hash states for (seed, layer, head, stream); rows share them, so a row draws the same in every batch."""
    state = hash_combine(torch.tensor(initial_state(seed), device=device), layer)
    state = hash_combine(state, first_head + torch.arange(heads, device=device))
    state = hash_combine(state[:, None], torch.arange(3, device=device))
    return state.expand(batch, heads, 3).contiguous()


def fold(sketch: Sketch, tokens: Tokens, policy: str) -> Sketch:
    """The structure after these tokens."""
    sketch = fold_numerator(sketch, tokens)
    has_denominator = sketch.den_keys.shape[3] > 0
    return fold_denominator(sketch, tokens, policy) if has_denominator else sketch


def fold_numerator(sketch: Sketch, tokens: Tokens) -> Sketch:
    """Each sample becomes token i with probability |v_i|^2 / mu_i, mu_i the sum up to and including i.

    Where `folded` counts tokens, samples with an odd number do with probability 1 / n_i, n_i the tokens up to i.
    """
    weights = torch.where(tokens.valid[:, None], norms(tokens.values).double().square(), 0.0)  # [B, H, n]
    totals = torch.cat([sketch.mu[..., None], weights], -1).cumsum(-1)
    state, samples = sketch.streams[..., NUMERATOR], sketch.keys.shape[2]
    last = ops.reservoir(state, tokens.positions, thresholds(weights, totals[..., 1:]), samples)[:, :, 0]
    folded = sketch.folded
    if folded is not None:
        counts = folded[..., None] + tokens.valid[:, None].cumsum(-1)  # [B, H, n]
        uniform = thresholds(tokens.valid[:, None].expand_as(counts), counts.clamp_min(1))
        last = by_parity(last, ops.reservoir(state, tokens.positions, uniform, samples)[:, :, 0], samples)
        folded = folded + tokens.valid[:, None].sum(-1)
    fired = (last >= 0) & used(sketch.sizes[:, 0], last.shape[2])
    at = last.clamp_min(0)
    keys, index = tokens.taken(at)
    return replace(
        sketch,
        keys=torch.where(fired[..., None], keys, sketch.keys),
        values=torch.where(fired[..., None], gather_slots(tokens.values, at), sketch.values),
        index=torch.where(fired, index, sketch.index),
        mu=totals[..., -1],
        folded=folded,
    )


def fold_denominator(sketch: Sketch, tokens: Tokens, policy: str) -> Sketch:
    """Every token opens a cluster or joins the nearest; `policy` says what a far token does when there is no room."""
    column = torch.arange(tokens.keys.shape[2], device=tokens.keys.device)
    valid = tokens.valid[:, None]
    while True:
        limit = sketch.sizes[:, 1:2]
        room = sketch.representatives.shape[2]
        if policy == "grow":
            limit = torch.full_like(limit, room)
        result = ops.leader_clustering(
            tokens.keys, valid, sketch.representatives, sketch.alive, sketch.delta, limit.expand_as(sketch.alive)
        )
        full = result.overflow < column.shape[0]
        if policy == "absorb" or not bool(full.any()):
            joined = join(sketch, tokens, result.labels, result.representatives)
            return with_room(joined, max(1, int(joined.alive.max()))) if policy == "grow" else joined
        if policy == "grow":
            sketch = with_room(sketch, max(16, 2 * room))
            continue
        before = column < result.overflow[..., None]
        sketch = join(sketch, tokens, torch.where(before, result.labels, room), result.representatives)
        sketch = doubled(sketch, tokens, result.overflow, full)
        valid = tokens.valid[:, None] & ~before


def join(sketch: Sketch, tokens: Tokens, labels: Tensor, representatives: Tensor) -> Sketch:
    """The tokens join the clusters `labels` [B, H, n] (m: none) and take each of their slots with probability 1 / n."""
    clusters, per_cluster = sketch.den_keys.shape[2:4]
    member = labels < clusters
    running = running_counts(labels, sketch.counts)
    threshold = torch.where(member, thresholds(torch.ones_like(running), running.clamp_min(1)), 0)
    target = labels.clamp_max(clusters - 1)
    last = ops.reservoir(sketch.streams[..., DENOMINATOR], tokens.positions, threshold, per_cluster, target, clusters)
    fired = (last >= 0) & used(sketch.sizes[:, 2], per_cluster)[:, None]
    keys, index = tokens.taken(last.clamp_min(0))
    return replace(
        sketch,
        representatives=representatives,
        counts=sketch.counts + occurrences(labels, clusters + 1)[..., :-1],
        den_keys=torch.where(fired[..., None], keys, sketch.den_keys),
        den_index=torch.where(fired, index, sketch.den_index),
    )


def doubled(sketch: Sketch, tokens: Tokens, overflow: Tensor, full: Tensor) -> Sketch:
    """Where `full`, doubles delta until two of the representatives and the key at `overflow` lie within it, and merges.

    Members then lie within 2 delta of their representative (Charikar et al., Incremental clustering, 1997).
    """
    at = overflow.clamp_max(tokens.keys.shape[2] - 1)[..., None]
    key = gather_slots(tokens.keys, at)
    points = torch.cat([sketch.representatives, key], 2).float()
    distances = (points[:, :, :, None] - points[:, :, None]).square().sum(-1).sqrt()
    exists = torch.cat([sketch.counts > 0, torch.ones_like(at, dtype=torch.bool)], -1)
    different = ~torch.eye(points.shape[2], dtype=torch.bool, device=points.device)
    pair = exists[..., None] & exists[..., None, :] & different
    closest = torch.where(pair, distances, float("inf")).amin((-1, -2))
    delta = sketch.delta * (closest / sketch.delta).log2().ceil().clamp_min(1.0).exp2()
    delta = torch.where(delta < closest, 2.0 * delta, delta)
    delta = torch.where(sketch.delta > 0, delta, closest)
    sketch = replace(sketch, delta=torch.where(full, delta, sketch.delta))
    none = torch.zeros_like(sketch.alive)
    limit = torch.full_like(none, sketch.representatives.shape[2])
    merged = ops.leader_clustering(
        sketch.representatives, sketch.counts > 0, torch.zeros_like(sketch.representatives), none, sketch.delta, limit
    )
    event = tokens.positions[:, None].expand(-1, at.shape[1], -1).gather(2, at)[..., 0]
    return merge(sketch, merged.labels, merged.representatives, event)


def merge(sketch: Sketch, labels: Tensor, representatives: Tensor, event: Tensor) -> Sketch:
    """Pours cluster i into cluster labels[i] (m: nowhere); a slot takes that of i with probability n_i / sum of n.

    `event` [B, H] tells the draws of one merge from those of another.
    """
    clusters, per_cluster = sketch.den_keys.shape[2:4]
    number = torch.arange(clusters, device=labels.device)
    poured = (labels[..., :, None] == labels[..., None, :]) & (number[:, None] >= number)
    counts = torch.where(labels < clusters, sketch.counts, 0)
    totals = (poured * counts[..., None, :]).sum(-1)
    state = hash_combine(sketch.streams[..., MERGE], event)
    last = ops.reservoir(
        state, number.expand(labels.shape[0], -1), thresholds(counts, totals.clamp_min(1)), per_cluster,
        labels.clamp_max(clusters - 1), clusters,
    )  # fmt: skip
    source = last.clamp_min(0)
    fill = torch.where(last >= 0, sketch.den_index.gather(2, source), -1)
    return replace(
        sketch,
        representatives=representatives,
        counts=torch.zeros_like(counts).scatter_add_(2, labels.clamp_max(clusters - 1), counts),
        den_keys=sketch.den_keys.gather(2, source[..., None].expand_as(sketch.den_keys)),
        den_index=fill,
    )


def with_room(sketch: Sketch, clusters: int) -> Sketch:
    """The same structure with slots for `clusters` clusters."""
    more = clusters - sketch.counts.shape[2]
    pad = torch.nn.functional.pad
    return replace(
        sketch,
        representatives=pad(sketch.representatives, (0, 0, 0, more)),
        counts=pad(sketch.counts, (0, more)),
        den_keys=pad(sketch.den_keys, (0, 0, 0, 0, 0, more)),
        den_index=pad(sketch.den_index, (0, 0, 0, more), value=-1),
    )


def running_counts(labels: Tensor, counts: Tensor) -> Tensor:  # [B, H, n]
    """Members of each token's cluster right after it joined; labels m: any number."""
    ordered, order = labels.sort(dim=-1, stable=True)
    joined = occurrences(labels, counts.shape[2] + 1)
    first = joined.cumsum(-1) - joined
    before = torch.nn.functional.pad(counts, (0, 1)) - first
    running = torch.arange(1, labels.shape[2] + 1, device=labels.device) + before.gather(2, ordered)
    return torch.empty_like(running).scatter_(2, order, running)


def occurrences(labels: Tensor, kinds: int) -> Tensor:  # [B, H, kinds]
    return labels.new_zeros(*labels.shape[:2], kinds).scatter_add_(2, labels, torch.ones_like(labels))


def used(sizes: Tensor, room: int) -> Tensor:  # [B, 1, room]
    return torch.arange(room, device=sizes.device) < sizes.view(-1, 1, 1)
