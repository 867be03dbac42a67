"""The balancing walk in torch. Legend: M blocks at a time; the rest as in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.balance_walk import TIE, Arguments, Walked
from kvsketch.ops.common.tensors import wide
from kvsketch.ops.random import hash_combine, to_uniform

# Gram entries held at once; blocks are taken in groups so that a long prompt fits in memory.
MAX_GRAM = 1 << 24


def balance_walk(call: Arguments) -> Walked:
    slots, greedy = call.slots, call.walk == "greedy"
    uniforms = block_uniforms(slots, call.state, call.ids, call.first_head).flatten(0, 2)
    batch, heads, blocks, size = slots.shape
    rows = torch.arange(batch * heads, device=slots.device).repeat_interleave(blocks)
    places = slots.flatten(0, 2)  # [B * H * N, b]
    signs = torch.zeros_like(places, dtype=torch.int8)
    failed = torch.zeros(places.shape[0], dtype=torch.bool, device=slots.device)
    group = max(1, MAX_GRAM // max(1, size * size))
    for start in range(0, places.shape[0], group):
        part = slice(start, start + group)
        valid = places[part] >= 0
        gathered = _gather(call.k, call.v, call.weights, rows[part], places[part])
        gram = normalized_gram(*gathered, valid, call.exponent, call.center, call.constant, by_row=greedy)
        signs[part], failed[part] = walk_blocks(gram, valid, uniforms[part], call.walk, call.c)
    return Walked(signs.view(slots.shape), failed.view(batch, heads, blocks))


def normalized_gram(
    k: Tensor,  # [M, b, D]
    v: Tensor | None,  # [M, b, Dv]
    valid: Tensor,  # [M, b]
    scale: float,
    center: bool = False,
    constant: float = 0.0,
    by_row: bool = False,
) -> Tensor:  # [M, b, b]
    """g of the package docstring, zero where a token is missing.

    `by_row`, for the greedy walk: row j is divided by its largest exp(scale <k_j, k_l>), l < j, and is zero from l = j.
    """
    real = valid.to(k.dtype)
    k = k * real[..., None]
    if center:
        mean = k.sum(1) / real.sum(1).clamp_min(1.0)[:, None]
        k = (k - mean[:, None]) * real[..., None]
    exponent = scale * k @ k.mT
    there = valid[:, None, :] & valid[..., None]
    if by_row:
        there = there.tril(-1)
        origin = exponent.masked_fill(~there, float("-inf")).amax(-1, keepdim=True)
    else:
        origin = scale * k.square().sum(-1).amax(-1)[:, None, None]
    gram = torch.where(there, exponent - origin, float("-inf")).exp()
    if v is not None:
        v = v * real[..., None]
        radius = v.square().sum(-1).amax(-1) + constant
        gram = gram * (v @ v.mT + constant) / radius.masked_fill(radius == 0, 1.0)[:, None, None]
    return gram


def walk_blocks(gram: Tensor, valid: Tensor, uniforms: Tensor, walk: str, c: float) -> tuple[Tensor, Tensor]:
    """Signs [M, b] int8 of the walk over each Gram matrix [M, b, b], and whether some |y_j| was larger than c, [M]."""
    y = torch.zeros_like(uniforms)
    tie = TIE * gram.tril(-1).abs().sum(-1)
    signs = torch.zeros_like(valid, dtype=torch.int8)
    largest = torch.zeros_like(y[:, 0])
    for j in range(gram.shape[1]):
        step, u = y[:, j], uniforms[:, j]
        largest = torch.maximum(largest, step.abs())
        tied = step.abs() <= tie[:, j]
        up = torch.where(tied, u < 0.5, step < 0) if walk == "greedy" else u < 0.5 - step / (2 * c)
        sign = torch.where(up, 1.0, -1.0) * valid[:, j]
        signs[:, j] = sign.to(torch.int8)
        y = y + sign[:, None] * gram[:, :, j]
    return signs, largest > c


def block_uniforms(slots: Tensor, state: int, ids: Tensor | None, first_head: int = 0) -> Tensor:
    """The draw of each token [B, H, N, b]: the random state continued by head, both halves of the id, and place."""
    _, heads, blocks, size = slots.shape
    device = slots.device
    if ids is None:
        ids = torch.arange(blocks, device=device)
    head = first_head + torch.arange(heads, device=device)[:, None]
    by_head = hash_combine(torch.tensor(state, device=device), head)
    by_block = hash_combine(hash_combine(by_head, ids), ids >> 32)[..., None]
    return to_uniform(hash_combine(by_block, torch.arange(size, device=device))).expand(slots.shape)


def _gather(
    k: Tensor, v: Tensor | None, weights: Tensor | None, rows: Tensor, places: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Keys and weighted values of the blocks, [M, b, D] and [M, b, Dv], in float32 (float64 for float64)."""
    at = (rows[:, None], places.clamp_min(0))
    keys = wide(k.flatten(0, 1)[at])
    if v is None:
        return keys, None
    values = v.flatten(0, 1)[at].to(keys.dtype)
    return keys, values if weights is None else values * weights.flatten(0, 1)[at][..., None].to(keys.dtype)
