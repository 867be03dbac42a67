"""From what a virtual replay sees to what a real one would: least-squares maps for each head.

    queries    q'_i  ~  q_i + [q_i, q_{i+1}, 1] W         per query head, before rotation: a model that repeats a text
                                                          knows which token comes next
    scores     log(score_j + FLOOR)  ~  [x_j, 1] w        per KV head
               x_j = l_j, l_{j-2}, l_{j-1}, l_{j+1}, l_{j+2}, log |k_j - mean k|, log |v_j|
               l   = log(virtual score + FLOOR)
    fit        W = argmin mean |target - [x, 1] W|^2 + ridge |W|^2  with x of unit variance; the constant is free

`kvsketch fit` fits both on some texts, once for a model (`replay=learned`).
Legend: B batch rows, Hq query heads, H KV heads, n tokens, D head size, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-4  # of a score, below which nobody looks
NEIGHBOURS = (-2, -1, 1, 2)
RIDGE = 1e-3
QUERY_RIDGE = 2e-2


def features(scores: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> Tensor:  # [B, H, n, F]
    """What is known of tokens without a second forward: virtual scores [B, H, n], keys and values [B, H, n, D].

    hidden [B]: the first tokens of a row that are left padding, which count nowhere.
    """
    logs = log_score(scores)
    width = max(NEIGHBOURS)
    beside = torch.nn.functional.pad(scores, (width, width))
    near = [log_score(beside[:, :, width + step : width + step + scores.shape[2]]) for step in NEIGHBOURS]
    return torch.stack([logs, *near, _log_norm(_centered(keys.float(), hidden)), _log_norm(values.float())], -1)


def log_score(scores: Tensor) -> Tensor:
    return (scores + FLOOR).log()


def _centered(keys: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is None:
        return keys - keys.mean(2, keepdim=True)
    there = (torch.arange(keys.shape[2], device=keys.device) >= hidden.view(-1, 1)).view(len(keys), 1, -1, 1)
    return keys - (keys * there).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp_min(1)


def _log_norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1).clamp_min(1e-6).log()


@dataclass
class Moments:
    """Sums over tokens that decide a least-squares fit; those of several texts add up."""

    square: Tensor  # [..., F + 1, F + 1] float64, of the features and 1
    product: Tensor  # [..., F + 1, T] float64, with the targets

    @classmethod
    def of(cls, x: Tensor, targets: Tensor) -> Moments:
        """Of features [..., n, F] and targets [..., n, T] of the same tokens."""
        x = torch.nn.functional.pad(x.double(), (0, 1), value=1.0)
        return cls(x.mT @ x, x.mT @ targets.double())

    @classmethod
    def of_scores(cls, x: Tensor, scores: Tensor) -> Moments:
        return cls.of(x, log_score(scores.double()).unsqueeze(-1))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.square + other.square, self.product + other.product)

    def fit(self, ridge: float) -> Tensor:  # [..., F + 1, T]
        """The weights of the features, and of the constant."""
        count = self.square[..., -1:, -1:]
        mean, target = self.square[..., :-1, -1:] / count, self.product[..., -1:, :] / count
        spread = self.square[..., :-1, :-1] / count - mean @ mean.mT
        size = spread.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12).sqrt().unsqueeze(-1)
        alike = spread / (size * size.mT)
        alike.diagonal(dim1=-2, dim2=-1).add_(ridge)
        weights = torch.linalg.solve(alike, (self.product[..., :-1, :] / count - mean * target) / size) / size
        return torch.cat([weights, target - mean.mT @ weights], -2).float()


def predicted(x: Tensor, weights: Tensor) -> Tensor:  # [..., n]
    """Scores of tokens with features [..., n, F] under a map [..., F + 1, 1]; in [0, 1]."""
    logs = (x @ weights[..., :-1, :] + weights[..., -1:, :]).squeeze(-1)
    return (logs.exp() - FLOOR).clamp(0, 1)


@dataclass(eq=False)
class ReplayMap:
    """The maps of all layers of a model; copies of a cache share them. Equal maps hold equal numbers."""

    queries: dict[int, Tensor]  # [Hq, 2 D + 2, D] of each layer: W, and the center of the queries
    scores: dict[int, Tensor]  # [H, F + 1, 1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplayMap):
            return NotImplemented
        return self is other or all(map(_are_equal, (self.queries, self.scores), (other.queries, other.scores)))

    def __hash__(self) -> int:
        return hash((*self.queries, *self.scores))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayMap:
        return self

    def queries_of(self, layer: int, q: Tensor) -> Tensor:
        """Queries [B, Hq, n, D], before rotation, as they would be in a repetition."""
        weights = self.queries[layer] = self.queries[layer].to(q.device, q.dtype)
        size, center = q.shape[3], weights[:, -1:]
        own, after = weights[:, :size], weights[:, size : 2 * size]
        # Around the center, which may be many times the spread: half precision then loses little.
        near = q - center
        return q + (torch.matmul(near, own) + torch.matmul(following(near), after) + weights[:, -2:-1])

    def scores_of(self, layer: int, device: torch.device) -> Tensor | None:
        if layer not in self.scores:
            return None
        self.scores[layer] = self.scores[layer].to(device)
        return self.scores[layer]


def _are_equal(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    """Whether maps of layers hold the same numbers, wherever they lie."""
    return one.keys() == other.keys() and all(torch.equal(x.cpu(), other[layer].cpu()) for layer, x in one.items())


def following(q: Tensor) -> Tensor:
    """The queries of the next tokens; the last token has itself."""
    return torch.cat([q[:, :, 1:], q[:, :, -1:]], 2)


def query_moments(q: Tensor, real: Tensor) -> Moments:  # of each query head
    """Of first queries [B, Hq, n, D] and those of the repetition, both before rotation."""
    x = torch.cat([q, following(q)], -1)
    return Moments.of(x.transpose(0, 1).flatten(1, 2), (real.float() - q.float()).transpose(0, 1).flatten(1, 2))


def fitted_queries(moments: Moments) -> Tensor:  # [Hq, 2 D + 2, D]
    """What `ReplayMap` holds of the queries of a layer."""
    size = moments.product.shape[-1]
    weights = moments.fit(QUERY_RIDGE)
    center = (moments.square[:, -1:, :size] / moments.square[:, -1:, -1:]).float()
    moved = weights[:, -1:] + center @ (weights[:, :size] + weights[:, size:-1])
    return torch.cat([weights[:, :-1], moved, center], 1)
