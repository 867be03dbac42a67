"""Expected Attention: the tokens that queries to come are expected to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods.allocation import HEAD
from kvsketch.methods.budget import Size, row_prompts
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.parameters import option
from kvsketch.methods.waiting import (
    LEAST_WAITING,
    Waiting,
    WaitingMethod,
    newest_keys,
    newest_slots,
    newest_values,
    own_sinks,
)
from kvsketch.slots import packing
from kvsketch.slots.table import SlotTable

PIECE = 2048  # tokens that are worked on at a time


@dataclass(frozen=True)
class Expected(WaitingMethod):
    """Keeps the tokens to which a normal distribution of queries, fitted to those of the text, attends most.

        q ~ N(mu, Sigma)   mean and covariance of the text's queries before rotary embedding, without the sinks',
                           rotated by the mean of the rotations of the next `future` positions
        z_j = E exp(scale <q, k_j>) = exp(scale <mu, k_j> + scale^2 / 2 k_j' Sigma k_j)
        score(j) = (mean over the query heads of the group of z_j / sum z + epsilon) |v_j|

    The sinks stay and take no part in the sum. The question need not be known. Tokens after the prompt, of a new turn
    or generated, are stored until there are `wait`, then scored by the distribution of their own queries.

    Paper: Devoto, Jeblick and Jegou, Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution (arXiv 2510.00636). Differs from the authors' code, whose heads all take the same bytes: heads
    that keep fewer tokens take fewer; `share` has no floor; a stream is scored part by part, each with a sum of its
    own; left-padded batches work. As their code it takes |v| for the paper's |W_O v|.
    """

    name: ClassVar[str] = "expected"
    family: ClassVar[str] = "evict"
    paper: ClassVar[str] = "arXiv 2510.00636"
    look: ClassVar[tuple[str, ...]] = ("#4a6b00", "P")
    needs_angles: ClassVar[tuple[str, str]] = ("rotates queries", "kvzip")

    recent: Size | int | str = 0
    share: str = HEAD
    wait: int = option(512, "new tokens after a prompt that are stored, with their queries, until they are scored")
    future: int = option(512, "positions over which the rotation of future queries is averaged")
    epsilon: float = option(0.0, "added to the expected attention before the value's norm weighs it")
    bits: int | str = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("wait", least=LEAST_WAITING, unit="tokens")
        self._require_whole("future", unit="positions")
        self._require("epsilon", 0 <= self.epsilon < math.inf, "a number of 0 or more")

    @property
    def declared(self) -> Capabilities:
        return replace(
            super().declared,
            documents=SUPPORTED,
            cache_positions=no("it expects queries at the distances of the text"),
            latent=no("it weighs a token by the norm of its value in each head"),
            vllm=no("it was not tried in pages of vLLM; use snapkv or rehearse"),
        )

    def kept_heads(self, heads: int, query_heads: int) -> int:
        # Every head has a distribution of its own.
        return query_heads

    @property
    def most_waiting(self) -> int:
        return min(PIECE, self.wait)

    def score(self, table: SlotTable, queries: Tensor) -> None:
        packing.unpack(table)
        slots, sinks = newest_slots(table, queries.shape[2]), own_sinks(table, self.sinks)  # [B, H, n]
        position = table.position_slots().gather(2, slots)[:, 0]  # [B, n]
        counted = position >= sinks
        mean, covariance = moments(queries, table.context.rotary, table.before + position, counted)
        places = table.before + table.real_tokens()[:, :, 0] + torch.arange(self.future, device=table.device)  # [B, T]
        mean, covariance = rotated_on_average(mean, covariance, table.context.rotary, places)
        keys, values = newest_keys(table, slots), newest_values(table, slots)
        logits = expected_logits(keys, mean, covariance, table.forward.scale)  # [B, H, G, n]
        attention = logits.masked_fill(~counted[:, None, None], -math.inf).softmax(-1).nan_to_num(0.0).mean(2)
        # Times the number of tokens: a part of a text then counts as the whole does.
        count = counted.sum(1, keepdim=True)[..., None]
        whole = torch.maximum(table.real_tokens(), torch.zeros_like(count) + row_prompts(table))
        score = (attention * count + self.epsilon * (whole - sinks)) * values.float().norm(dim=-1)
        # In [0, 1) and in the same order: tokens that stay are worth more.
        table.state_of(Waiting).note(table, slots, score / (1 + score), [queries.shape[2]])

    def settle(self, tables: Sequence[SlotTable]) -> None:
        if chosen := self.chosen(tables, PIECE):
            self.keep_chosen(tables, chosen)


def moments(queries: Tensor, angles: tuple[float, ...], position: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, Hq, D] and covariance [B, Hq, D, D] of queries [B, Hq, n, D] before their rotary embedding.

    `position` [B, n] by which they were rotated; those that are `counted` [B, n] take part.
    """
    total = counted.sum(1).clamp_min(1).view(-1, 1, 1, 1)
    batch, heads, _, size = queries.shape
    mean = torch.zeros(batch, heads, 1, size, device=queries.device)
    covariance = torch.zeros(batch, heads, size, size, device=queries.device)
    for q, counts in _plain(queries, angles, position, counted):
        mean += (q * counts).sum(2, keepdim=True) / total
    # In a second pass: the queries of some models lie far from zero.
    for q, counts in _plain(queries, angles, position, counted):
        apart = (q - mean) * counts
        covariance += apart.mT @ apart / total
    return mean.squeeze(2), covariance


def _plain(
    queries: Tensor, angles: tuple[float, ...], position: Tensor, counted: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the queries without their rotation, [B, Hq, m, D], and whether they count, [B, 1, m, 1]."""
    pieces = (queries.split(PIECE, 2), position.split(PIECE, 1), counted[:, None, :, None].split(PIECE, 2))
    for q, places, counts in zip(*pieces, strict=True):
        yield moved(q, angles, -places), counts


def rotated_on_average(
    mean: Tensor, covariance: Tensor, angles: tuple[float, ...], places: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments of queries [B, Hq, D] and [B, Hq, D, D] rotated by the mean of the rotations of the places [B, T]."""
    angle = places.unsqueeze(-1) * torch.tensor(angles, dtype=torch.float64, device=mean.device)  # [B, T, D/2]
    cos, sin = (each.mean(1)[:, None, None].float() for each in (angle.cos(), angle.sin()))
    return rotated(mean.unsqueeze(2), cos, sin).squeeze(2), rotated(rotated(covariance, cos, sin).mT, cos, sin)


def moved(q: Tensor, angles: tuple[float, ...], positions: Tensor) -> Tensor:
    """Queries [B, Hq, n, D] as they would be so many positions, [B] or [B, n], later, in float32."""
    angle = positions.view(len(positions), 1, -1, 1) * torch.tensor(angles, dtype=torch.float64, device=q.device)
    return rotated(q, angle.cos().float(), angle.sin().float())


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [..., D], channels (i, i + half) rotated by angles with these cosines and sines [..., half]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :].float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def expected_logits(keys: Tensor, mean: Tensor, covariance: Tensor, scale: float) -> Tensor:  # [B, H, G, n]
    """log E exp(scale <q, k>) of keys [B, H, n, D] over normal queries with these moments, [B, Hq, ...]."""
    heads = keys.shape[1]
    mean, covariance = (moment.unflatten(1, (heads, -1)) for moment in (mean, covariance))
    result = []
    for part in keys.float().unsqueeze(2).split(PIECE, 3):  # [B, H, 1, n, D]
        linear, square = part @ mean.unsqueeze(-1), ((part @ covariance) * part).sum(-1)
        result.append(scale * linear.squeeze(-1) + 0.5 * scale**2 * square)
    return torch.cat(result, -1)
