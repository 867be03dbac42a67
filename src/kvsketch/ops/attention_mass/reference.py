"""Attention mass in torch.

Whole rows are processed in blocks: a row's sum and its share of every column are available together, and memory is that
of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.attention_mass import HIDDEN, Noise, Options, Temperature, is_plain, stream
from kvsketch.ops.random import gumbel, hash_combine, to_uniform

NEG_INF = float("-inf")
MASK = 0xFFFFFFFF
# Logits held at once: as many as fit a CPU's cache, or as fill a GPU.
MAX_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}


def attention_mass(q: Tensor, k: Tensor, scale: float, options: Options) -> Tensor:
    seen, index, padding, noise = options.seen, options.index, options.padding, options.noise
    batch, query_heads, queries = q.shape[:3]
    kv_heads, columns = k.shape[1:3]
    group = query_heads // kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(dtype)
    places = torch.arange(columns, device=k.device).view(1, 1, -1) if index is None else index
    places = column_places(places, padding)[:, :, None, None]  # [B, H, 1, 1, S]
    pad = torch.zeros(1, dtype=torch.int64, device=q.device) if padding is None else padding
    pad = pad.view(-1, 1, 1, 1, 1)
    whole = index is None and padding is None  # every column is a token that later queries see
    plain = is_plain(options.temperature, None)
    tau = temperature_at(options.temperature, seen, q.device, 5).to(dtype)
    row_places = (torch.arange(queries, device=q.device) + (seen - queries)).view(1, 1, 1, -1, 1)
    heads = torch.arange(query_heads, device=q.device).view(1, kv_heads, group, 1, 1)
    heads = heads if noise is None else noise.first_head * group + heads

    mass = torch.zeros(batch, kv_heads, group, columns, dtype=dtype, device=q.device)
    block = max(1, MAX_LOGITS.get(q.device.type, 1 << 19) // max(1, batch * query_heads * columns))
    for start in range(0, queries, block):
        rows = slice(start, min(start + block, queries))
        # Whole prompts are causal: later columns are seen by none of these rows.
        end = columns if index is not None else columns - queries + rows.stop
        at = row_places[:, :, :, rows]
        # The query heads of a KV head are rows of one product: keys are never copied per query head.
        block_q = (q[:, :, rows].to(dtype) * scale).reshape(batch, kv_heads, -1, q.shape[3])
        x = (block_q @ keys[:, :, :end].mT).view(batch, kv_heads, group, -1, end)
        if noise is not None:
            x = x + gumbel(pair_uniform(noise, heads, at - pad, places[..., :end] - pad)).to(dtype)
        x = x if plain else x.div_(tau)
        if whole:
            # Masks of all columns would take longer than the product.
            own = rows.stop - start
            x[..., end - own :] += torch.full((own, own), NEG_INF, dtype=dtype, device=x.device).triu_(1)
        else:
            x = x.masked_fill(places[..., :end] > at, NEG_INF)
        if options.row_lse is None:
            shares = x.softmax(-1)
        else:
            shares = (x - options.row_lse.unflatten(1, (kv_heads, group))[..., rows, None].to(dtype)).exp()
        if not whole:
            shares = shares.masked_fill((x == NEG_INF).all(-1, keepdim=True) | (at < pad), 0.0)
        mass[..., :end] += shares.sum(3)
    return options.add(mass.flatten(1, 2))


def mass_from_logits(logits: Tensor, options: Options) -> Tensor:
    seen, index, padding, noise = options.seen, options.index, options.padding, options.noise
    assert index is not None
    kv_heads = index.shape[1]
    x = logits.unflatten(1, (kv_heads, -1))  # [B, H, G, S]
    places = column_places(index, padding)[:, :, None]
    hidden = places == HIDDEN
    if noise is not None:
        group = x.shape[2]
        heads = torch.arange(logits.shape[1], device=x.device).view(1, kv_heads, group, 1) + noise.first_head * group
        pad = 0 if padding is None else padding.view(-1, 1, 1, 1)
        row = torch.as_tensor(seen, device=x.device) - 1 - pad
        x = x + gumbel(pair_uniform(noise, heads, row, places - pad))
    if options.row_lse is None:
        x = (x / temperature_at(options.temperature, seen, x.device, x.dim())).masked_fill(hidden, NEG_INF)
        shares = x.softmax(-1)
    else:
        shares = (x - options.row_lse.view(*x.shape[:3], 1)).exp()
    # The softmax of nothing is NaN, and so may be the logit of an empty slot.
    mass = shares.masked_fill(hidden, 0.0).flatten(1, 2)
    return options.add(mass)


def column_places(index: Tensor, padding: Tensor | None) -> Tensor:  # [B or 1, H or 1, S] int64
    """The logical index of each column; HIDDEN for empty slots and left padding."""
    places = index.long()
    least = 0 if padding is None else padding.view(-1, 1, 1).clamp_min(0)
    return torch.where(places >= least, places, HIDDEN)


def temperature_at(temperature: Temperature, seen: int | Tensor, device: torch.device, dims: int = 1) -> Tensor:
    """The temperature when `seen` tokens have been seen, float32, one or [B, ...] of `dims` dimensions.

    Does not wait for the device.
    """
    since = temperature.since
    since = since.view(-1, *[1] * (dims - 1)) if isinstance(since, Tensor) else since
    steps = (torch.as_tensor(seen, device=device) - since).float()
    return temperature.start + steps.clamp(0, temperature.steps) * temperature.slope


def pair_uniform(noise: Noise, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Draws in (0, 1) for pairs of positions: a hash of each position, then one cheap hash of the two.

    Two multiplications with a shift between them suffice because the top 23 bits alone are used and because both states
    are well mixed already; with one multiplication pairs of rows are visibly correlated.
    """
    state = hash_combine(torch.tensor(stream(noise), dtype=torch.int64, device=heads.device), heads)
    x = hash_combine(hash_combine(state, 0), rows) ^ hash_combine(hash_combine(state, 1), columns)
    x = (x * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return to_uniform(x)
