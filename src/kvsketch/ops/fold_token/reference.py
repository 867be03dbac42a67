"""Folding one token in torch: the host never waits for the device, and no shape depends on data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.tensors import wide
from kvsketch.ops.fold_token import DENOMINATOR, NUMERATOR, Layout, State
from kvsketch.ops.reservoir.reference import draws, thresholds

NEG_INF = float("-inf")


def fold_token(state: State, layout: Layout, coalesce: bool) -> None:
    real = state.clock if state.padding is None else state.clock - state.padding
    real = real.expand(state.plan.shape[0])
    slot = slot_of(real, state.plan, layout).view(-1, 1, 1).expand(state.next_slot.shape)
    index = state.index.gather(2, slot)  # [B, H, 1]
    position = index.long() if state.padding is None else index - state.padding.view(-1, 1, 1)
    sinks, used = state.plan[:, 0].view(-1, 1, 1), state.plan[:, 3].view(-1, 1, 1)
    folds = (index >= 0) & (position >= sinks) & (used > 0)  # [B, H, 1]
    _fold_numerator(state, layout, slot, index, position, folds)
    samples = torch.arange(layout.exact, layout.valued, device=slot.device).expand(*slot.shape[:2], -1)
    values, index_of_samples = _at(state, state.values, samples), state.index[:, :, layout.exact : layout.valued]
    state.shares.copy_(numerator_shares(values, index_of_samples, coalesce, mixed=state.folded is not None))
    if state.squares is not None:
        state.squares.copy_(norms(values).square())
    weights = state.log_den if state.log_num is None else state.log_num
    weights[:, :, layout.exact : layout.valued] = numerator_weights(
        state.mu, state.shares, state.plan, state.squares, state.folded
    )
    if layout.clusters:
        _fold_denominator(state, layout, slot, index, position, folds)
        samples_index = state.index[:, :, layout.valued :].unflatten(2, (layout.clusters, layout.per_cluster))
        log_den = denominator_weights(state.counts, samples_index, state.plan, coalesce)
        state.log_den[:, :, layout.valued :] = log_den.flatten(2)
    state.next_slot.copy_(slot)
    state.index.scatter_(2, slot, -1)
    state.log_den.scatter_(2, slot, NEG_INF)
    if state.log_num is not None:
        state.log_num.scatter_(2, slot, NEG_INF)


def slot_of(position: Tensor, plan: Tensor, layout: Layout) -> Tensor:  # [B]
    """The slot of the exact token at `position` [B] of a row: in the ring, that of the token it replaces."""
    sinks, recent, hold = plan[:, 0], plan[:, 1], plan[:, 2]
    ring = layout.sinks + position % (recent + 1)
    held = layout.sinks + layout.ring + position - sinks
    return torch.where(position < sinks, position, torch.where(position < sinks + hold, held, ring))


def numerator_shares(values: Tensor, index: Tensor, coalesce: bool, mixed: bool = False) -> Tensor:  # [B, H, s]
    """log(copies) - log|v|^2 of each sample; -inf for empty slots and, when coalesced, for all copies but the first.

    `mixed`: without the second term.
    """
    norm = norms(values)
    share = torch.zeros_like(norm) if mixed else -2.0 * norm.log()
    if coalesce:
        share = share + log_copies(index)
    return torch.where(index >= 0, share, NEG_INF)


def numerator_weights(
    mu: Tensor, shares: Tensor, plan: Tensor, squares: Tensor | None = None, folded: Tensor | None = None
) -> Tensor:  # [B, H, s]
    """log mu - log s + share; with squares, share - log(a |v|^2 / mu + b / n)."""
    samples = plan[:, 3].clamp_min(1).view(-1, 1, 1)
    if squares is None or folded is None:
        return mu.log().float()[..., None] - samples.float().log() + shares
    by_norm = torch.where(mu > 0, 1.0 / mu, 0.0)[..., None] * squares.double() * ((samples + 1) // 2)
    uniform = (samples // 2) / folded.clamp_min(1)[..., None].double()
    # An empty slot may have probability 0.
    return torch.where(shares > NEG_INF, shares - (by_norm + uniform).log().float(), NEG_INF)


def by_parity(even: Tensor, odd: Tensor, samples: int) -> Tensor:  # [..., s]
    """`even` at the samples with an even number, `odd` at the others."""
    return torch.where(torch.arange(samples, device=even.device) % 2 == 0, even, odd)


def denominator_weights(counts: Tensor, index: Tensor, plan: Tensor, coalesce: bool) -> Tensor:  # [B, H, m, t]
    """log n_i - log t, and log(copies) when coalesced."""
    weight = counts.float().log()[..., None] - plan[:, 5].clamp_min(1).float().log().view(-1, 1, 1, 1)
    if coalesce:
        weight = weight + log_copies(index)
    return torch.where(index >= 0, weight, NEG_INF)


def log_copies(index: Tensor) -> Tensor:
    """log of how often each entry occurs along the last dimension, at its first occurrence; -inf at the others."""
    ordered, order = index.sort(dim=-1, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    run = first.long().cumsum(-1) - 1
    sizes = torch.zeros_like(run).scatter_add_(-1, run, torch.ones_like(run))
    copies = torch.where(first, sizes.gather(-1, run), 0)
    return torch.zeros_like(copies).scatter_(-1, order, copies).float().log()


def norms(values: Tensor) -> Tensor:
    """|v| in float32 (float64 for float64)."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.promote_types(values.dtype, torch.float32))


def _fold_numerator(state: State, layout: Layout, slot: Tensor, index: Tensor, position: Tensor, folds: Tensor) -> None:
    """Every sample becomes the token with probability |v|^2 / (mu + |v|^2), or the odd ones with 1 / n."""
    weight = torch.where(folds, norms(_at(state, state.values, slot)).double().square(), 0.0)  # [B, H, 1]
    state.mu.add_(weight[..., 0])
    threshold = thresholds(weight, state.mu[..., None])
    if state.folded is not None:
        state.folded.add_(folds[..., 0])
        threshold = by_parity(threshold, thresholds(folds, state.folded[..., None]), layout.samples)
    drawn = draws(state.streams[..., NUMERATOR], position[:, 0], layout.samples)[:, :, 0]  # [B, H, s]
    used = torch.arange(layout.samples, device=drawn.device) < state.plan[:, 3].view(-1, 1, 1)
    fired = (drawn < threshold) & used
    stretch = slice(layout.exact, layout.valued)
    target = torch.arange(layout.exact, layout.valued, device=drawn.device).expand(fired.shape)
    _copy(state.keys, slot, target, fired)
    _copy(state.values, slot, target, fired)
    state.index[:, :, stretch].copy_(torch.where(fired, index, state.index[:, :, stretch]))


def _fold_denominator(
    state: State, layout: Layout, slot: Tensor, index: Tensor, position: Tensor, folds: Tensor
) -> None:
    """The token opens a cluster or joins the nearest, whose slots it takes with probability 1 / n each."""
    key = _at(state, state.keys, slot)
    distance = (wide(state.representatives) - wide(key)).square().sum(-1)  # [B, H, m]
    alive = (state.counts > 0).sum(-1, keepdim=True)
    number = torch.arange(layout.clusters, device=key.device)
    nearest, label = torch.where(number < alive, distance, float("inf")).min(-1, keepdim=True)
    opens = (nearest > state.delta[..., None].square()) & (alive < state.plan[:, 4].view(-1, 1, 1))
    label = torch.where(opens, alive, label)
    state.counts.scatter_add_(2, label, folds.to(state.counts.dtype))
    at = label[..., None].expand_as(key)
    state.representatives.scatter_(
        2, at, torch.where((opens & folds)[..., None], key, state.representatives.gather(2, at))
    )

    count = state.counts.gather(2, label)
    threshold = torch.where(folds, thresholds(torch.ones_like(count), count.clamp_min(1)), 0)
    slots = torch.arange(layout.per_cluster, device=key.device)
    fired = draws(state.streams[..., DENOMINATOR], position[:, 0], layout.per_cluster)[:, :, 0] < threshold  # [B, H, t]
    fired = fired & (slots < state.plan[:, 5].view(-1, 1, 1))
    target = layout.valued + label * layout.per_cluster + slots
    _copy(state.keys, slot, target, fired)
    state.index.scatter_(2, target, torch.where(fired, index, state.index.gather(2, target)))


def _copy(part: Tensor | CodedSlots, slot: Tensor, target: Tensor, fired: Tensor) -> None:
    """Copies what `slot` [B, H, 1] holds into the slots `target` [B, H, n] where they have `fired`, as it is stored."""
    for held in (part,) if isinstance(part, Tensor) else (part.codes, part.steps.unsqueeze(-1)):
        at = target[..., None].expand(-1, -1, -1, held.shape[3])
        held.scatter_(2, at, torch.where(fired[..., None], _gathered(held, slot), held.gather(2, at)))
    if not isinstance(part, Tensor):
        gone = (part.exact_at.unsqueeze(-1) == target.unsqueeze(2)) & fired.unsqueeze(2)  # [B, H, E, n]
        part.exact_at.masked_fill_(gone.any(-1), -1)


def _at(state: State, part: Tensor | CodedSlots, slots: Tensor) -> Tensor:  # [B, H, n, D]
    """The vectors of the slots [B, H, n]."""
    return _gathered(part, slots) if isinstance(part, Tensor) else part.decoded_at(slots, state.representatives.dtype)


def _gathered(held: Tensor, slots: Tensor) -> Tensor:
    return held.gather(2, slots[..., None].expand(-1, -1, -1, held.shape[3]))
