"""Speculation: predicts the query of a layer from the query of the layer before.

The residual stream changes little from one layer to the next, so the query of layer l says much about that of layer
l + 1. With u for a query whose rotation by position is undone,

    u_(l+1)  ~  m + (u_l - mean u_l) Q A,        u: all query heads of a layer side by side

Q [F, r] are the r directions in which u_l varies most, A [r, F'] the least-squares map from there. Both are found for
each batch row by itself, from the queries of a prompt or of its first chunk, and again from one with twice as many
tokens of the row. Tables hold all of it as row state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.methods.infinigen.state import FIT_TOKENS, Learned
from kvsketch.slots import padding as left_padding
from kvsketch.slots.table import SlotTable

RANK = 128
SWEEPS = 2
RIDGE = 1e-4
GROWTH = 2


def note(table: SlotTable, query: Tensor) -> None:
    """Remembers the query of the layer, [B, Hq, 1, D], for the next layer."""
    if table.rank + 1 < table.compressed_layers:
        state = table.state_of(Learned)
        state.asked = query.clone() if state.asked is None else state.asked.copy_(query)


def learn(table: SlotTable, queries: Tensor) -> None:
    """Finds the map from the layer before, from the queries [B, Hq, n, D] of several tokens."""
    before, state = _prompt_before(table, queries), table.state_of(Learned)
    new = min(queries.shape[2], FIT_TOKENS)
    if before is None or (state.map is not None and new < GROWTH * (state.fewest_tokens or FIT_TOKENS)):
        return
    state.angles = queries.new_tensor(table.rotary, dtype=torch.float32).repeat(queries.shape[0], 1)
    pairs = list(zip(_still(table, before), _still(table, queries), strict=True))
    known, learned = state.map is not None, [0] * len(pairs) if state.tokens is None else state.tokens.tolist()
    for row, (asked, wanted) in enumerate(pairs):
        if known and len(asked) < GROWTH * max(1, learned[row]):
            continue
        parts = [part.to(queries.dtype) for part in _fit(asked, wanted)]
        if state.map is None:
            state.basis, state.map, state.offset = (queries.new_zeros(len(pairs), *part.shape) for part in parts)
        state.basis[row], state.map[row], state.offset[row] = parts
        learned[row] = len(asked)
    state.tokens = torch.tensor(learned, device=queries.device)
    state.fewest_tokens = max(1, min(learned))


def leave(table: SlotTable, queries: Tensor) -> None:
    """Leaves the queries of several tokens to the next layer."""
    if table.rank + 1 < table.compressed_layers:
        state = table.state_of(Learned)
        state.prompt_queries, state.prompt_seen = queries[:, :, -FIT_TOKENS:].clone(), table.seen


def speculate(table: SlotTable, query: Tensor) -> Tensor:  # [B, Hq, 1, D]
    """What the layer before lets expect in the place of `query`; itself, if that has not asked or there is no map."""
    state = table.state_of(Learned)
    asked = None if table.previous is None else table.previous.state_of(Learned).asked
    if asked is None or state.map is None:
        return query
    position = table.real_tokens() - 1
    asked = rotated(asked.to(query.device), position, state.angles, -1).transpose(1, 2).flatten(2)
    still = asked @ state.basis @ state.map + state.offset  # [B, 1, F']
    return rotated(still.unflatten(2, (query.shape[1], -1)).transpose(1, 2), position, state.angles, 1)


def rotated(queries: Tensor, position: Tensor, angles: Tensor, sign: int) -> Tensor:
    """Queries [B, Hq, n, D] rotated forth (1) or back (-1) by their positions [B, 1, n], in pairs (i, i + half)."""
    half = angles.shape[1]
    if half == 0:
        return queries
    angle = position.unsqueeze(-1).float() * angles.view(-1, 1, 1, half)  # [B, 1, n, half]
    cos, sin = angle.cos(), angle.sin() * sign
    low, high, rest = queries.float().split([half, half, queries.shape[3] - 2 * half], dim=3)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], 3).to(queries.dtype)


def _prompt_before(table: SlotTable, queries: Tensor) -> Tensor | None:
    """Takes what the layer before asked for these very tokens, if it is there."""
    state = None if table.previous is None else table.previous.state_of(Learned)
    if state is None or state.prompt_queries is None or state.prompt_seen != table.seen:
        return None
    asked, state.prompt_queries = state.prompt_queries, None
    return asked.to(queries.device) if asked.shape[2] == min(queries.shape[2], FIT_TOKENS) else None


def _still(table: SlotTable, queries: Tensor) -> list[Tensor]:
    """Queries of the last tokens without rotation, [n, F] float32 for each batch row without its padding."""
    queries = queries[:, :, -FIT_TOKENS:]
    new = queries.shape[2]
    position = table.real_tokens() - new + torch.arange(new, device=queries.device)  # [B, 1, n]
    still = rotated(queries.float(), position, table.state_of(Learned).angles, -1).transpose(1, 2).flatten(2)
    padding = left_padding.of_rows(table.padding, len(still))
    return [row[max(0, pad - (table.seen - new)) :] for row, pad in zip(still, padding, strict=True)]


def _fit(asked: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Basis, map and offset that lead from asked [n, F] to wanted [n, F'], by least squares."""
    tokens, width = asked.shape
    # A row with a nan gets a map that means nothing, and the solver something to solve.
    asked, wanted = (rows.nan_to_num(0.0, 0.0, 0.0) for rows in (asked, wanted))
    means = [rows.sum(0, keepdim=True) / max(1, tokens) for rows in (asked, wanted)]
    asked, wanted = asked - means[0], wanted - means[1]
    rank = min(RANK, width)
    # Subspace iteration, from the same start for every row.
    start = torch.randn(width, rank, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.to(asked)).Q
    for _ in range(SWEEPS):
        basis = torch.linalg.qr(asked.mT @ (asked @ basis)).Q
    short = asked @ basis
    gram = short.mT @ short
    ridge = (RIDGE * gram.diagonal().mean()).clamp_min(1e-12)
    solved = torch.linalg.solve(gram + ridge * torch.eye(rank, device=gram.device), short.mT @ wanted)
    return basis, solved, means[1] - means[0] @ basis @ solved
