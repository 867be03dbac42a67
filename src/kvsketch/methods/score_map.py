"""From the score of a virtual replay to that of a real one: a least-squares map for each KV head.

    x_j  =  l_j, l_{j-2}, l_{j-1}, l_{j+1}, l_{j+2}, log |k_j - mean k|, log |v_j|,      l = log(virtual score + FLOOR)
    log(score_j + FLOOR)  ~  <w, x_j> + c,      w = argmin mean (<w, x_j> + c - y_j)^2 + RIDGE |w|^2  (standardised x)

Fitted on the tokens of a text that the model has repeated (`replay=sampled`), or once for a model on other texts
(`replay=learned`, `kvsketch fit`), where the layer's keys and values before their rotation are further features.
Legend: B batch rows, H KV heads, n tokens, D head size, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-4  # of a score, below which nobody looks
NEIGHBOURS = (-2, -1, 1, 2)
RIDGE = 1e-3


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
    product: Tensor  # [..., F + 1] float64, with the logarithms of the scores

    @classmethod
    def of(cls, x: Tensor, scores: Tensor) -> Moments:
        """Of features [..., n, F] and the real scores [..., n] of these tokens."""
        x = torch.nn.functional.pad(x.double(), (0, 1), value=1.0)
        return cls(x.mT @ x, (x.mT @ log_score(scores.double()).unsqueeze(-1)).squeeze(-1))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.square + other.square, self.product + other.product)

    def fit(self, ridge: float = RIDGE) -> Tensor:  # [..., F + 1]
        """The weights of the features, and the constant."""
        count = self.square[..., -1:, -1]
        mean, target = self.square[..., -1, :-1] / count, self.product[..., -1:] / count
        spread = self.square[..., :-1, :-1] / count.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        size = spread.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12).sqrt()
        alike = spread / (size.unsqueeze(-1) * size.unsqueeze(-2))
        alike.diagonal(dim1=-2, dim2=-1).add_(ridge)
        shared = (self.product[..., :-1] / count - mean * target) / size
        weights = torch.linalg.solve(alike, shared) / size
        return torch.cat([weights, target - (weights * mean).sum(-1, keepdim=True)], -1).float()


def predicted(x: Tensor, weights: Tensor) -> Tensor:  # [..., n]
    """Scores of tokens with features [..., n, F] under a map [..., F + 1]; in [0, 1]."""
    logs = (x @ weights[..., :-1].unsqueeze(-1)).squeeze(-1) + weights[..., -1:]
    return (logs.exp() - FLOOR).clamp(0, 1)


def completed(x: Tensor, real: Tensor, at: Tensor) -> Tensor:  # [B, H, n]
    """The real scores [B, H, m] of the tokens `at` [m], and those that a map of each head, fitted on them, predicts."""
    if real.shape[2] == x.shape[2]:
        return real
    weights = Moments.of(x[:, :, at], real).fit()
    return predicted(x, weights).index_copy(2, at, real)
