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

from kvsketch.slots import padding as left_padding
from kvsketch.slots.table import SlotTable

RANK = 128
FIT_TOKENS = 4096
SWEEPS = 2
RIDGE = 1e-4
# [B, Hq, 1, D]: what a layer asked last; [B, Hq, n, D]: what it asked for the end of a prompt, until the next layer
# has read it.
ASKED, PROMPT = "asked", "prompt_queries"
# The map, [B, F, r], [B, r, F'] and [B, 1, F']; [B, half]: the angles by which a position turns each pair of channels.
BASIS, MAP, OFFSET, ANGLES = "speculation_basis", "speculation_map", "speculation_offset", "speculation_angles"
# [B] int64: tokens of a row that its map was found from; the mark: the fewest of any row.
TOKENS = "speculation_tokens"
GROWTH = 2


def note(table: SlotTable, query: Tensor) -> None:
    """Remembers the query of the layer, [B, Hq, 1, D], for the next layer."""
    if table.rank + 1 < table.compressed_layers:
        table.row_state.setdefault(ASKED, torch.empty_like(query)).copy_(query)


def learn(table: SlotTable, queries: Tensor) -> None:
    """Finds the map from the layer before, from the queries [B, Hq, n, D] of several tokens."""
    before, state = _prompt_before(table, queries), table.row_state
    new = min(queries.shape[2], FIT_TOKENS)
    if before is None or (MAP in state and new < GROWTH * table.marks.get(TOKENS, FIT_TOKENS)):
        return
    state[ANGLES] = queries.new_tensor(table.rotary, dtype=torch.float32).repeat(queries.shape[0], 1)
    pairs = list(zip(_still(table, before), _still(table, queries), strict=True))
    known, learned = MAP in state, state[TOKENS].tolist() if TOKENS in state else [0] * len(pairs)
    for row, (asked, wanted) in enumerate(pairs):
        if known and len(asked) < GROWTH * max(1, learned[row]):
            continue
        for name, part in zip((BASIS, MAP, OFFSET), _fit(asked, wanted), strict=True):
            state.setdefault(name, queries.new_zeros(len(pairs), *part.shape))[row] = part.to(queries.dtype)
        learned[row] = len(asked)
    state[TOKENS] = torch.tensor(learned, device=queries.device)
    table.marks[TOKENS] = max(1, min(learned))


def leave(table: SlotTable, queries: Tensor) -> None:
    """Leaves the queries of several tokens to the next layer."""
    if table.rank + 1 < table.compressed_layers:
        table.row_state[PROMPT], table.marks[PROMPT] = queries[:, :, -FIT_TOKENS:].clone(), table.seen


def can_speculate(table: SlotTable) -> bool:
    """Whether the layer has a map and the layer before has asked."""
    return MAP in table.row_state and table.previous is not None and ASKED in table.previous.row_state


def speculate(table: SlotTable, query: Tensor) -> Tensor:  # [B, Hq, 1, D]
    """What the layer before lets expect in the place of `query`, whose shape and position alone are used."""
    assert table.previous is not None
    state, position = table.row_state, table.real_tokens() - 1
    asked = table.previous.row_state[ASKED].to(query.device)
    asked = turned(asked, position, state[ANGLES], -1).transpose(1, 2).flatten(2)
    still = asked @ state[BASIS] @ state[MAP] + state[OFFSET]  # [B, 1, F']
    return turned(still.unflatten(2, (query.shape[1], -1)).transpose(1, 2), position, state[ANGLES], 1)


def turned(queries: Tensor, position: Tensor, angles: Tensor, sign: int) -> Tensor:
    """Queries [B, Hq, n, D] turned forth (1) or back (-1) by their positions [B, 1, n], in pairs (i, i + half)."""
    half = angles.shape[1]
    if half == 0:
        return queries
    angle = position.unsqueeze(-1).float() * angles.view(-1, 1, 1, half)  # [B, 1, n, half]
    cos, sin = angle.cos(), angle.sin() * sign
    low, high, rest = queries.float().split([half, half, queries.shape[3] - 2 * half], dim=3)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], 3).to(queries.dtype)


def _prompt_before(table: SlotTable, queries: Tensor) -> Tensor | None:
    """Takes what the layer before asked for these very tokens, if it is there."""
    previous = table.previous
    if previous is None or PROMPT not in previous.row_state or previous.marks[PROMPT] != table.seen:
        return None
    del previous.marks[PROMPT]
    asked = previous.row_state.pop(PROMPT)
    return asked.to(queries.device) if asked.shape[2] == min(queries.shape[2], FIT_TOKENS) else None


def _still(table: SlotTable, queries: Tensor) -> list[Tensor]:
    """Queries of the last tokens without rotation, [n, F] float32 for each batch row without its padding."""
    queries = queries[:, :, -FIT_TOKENS:]
    new = queries.shape[2]
    position = table.real_tokens() - new + torch.arange(new, device=queries.device)  # [B, 1, n]
    still = turned(queries.float(), position, table.row_state[ANGLES], -1).transpose(1, 2).flatten(2)
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
