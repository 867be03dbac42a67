"""Bits: which layers hold their keys in more bits than the others, where a prompt chooses (`bits=auto`).

Most layers lose nothing by keys in `FEW` bits, and a few lose much. When a prompt has been read, queries as they would
be if the text came again (as they are, without rotary angles) read the keys themselves, o, and their codes, o':

    cost = sum |o' - o|^2 / sum |o|^2        over sampled queries and all heads of the layer

Layers with the largest cost for their bytes get `MANY` bits, one after the other, while a layer's cost is at least
`WORTH` and all of them together add no more than `SPARE` to the bytes of `FEW` bits: a byte has one price for all.

Legend: as in `table`; Q queries, G query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots import coding
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import FEW, MANY, MIN_TOKENS_TO_QUANTISE, MOST_MANY, coded
from kvsketch.slots.heads import mean_over_heads
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import fetched

WORTH = 0.01  # the output moves by a tenth
BEHIND = 24  # positions between the text and its repetition
QUERIES, ROWS = 64, 4  # of a prompt, and of a batch, that are looked at


def note_rounding(table: SlotTable, queries: Tensor) -> None:
    """Notes what rounding its keys costs the queries [B, Hq, n, D] just asked, before the table is coded."""
    if not table.stored_bits.auto or not table.exact or coding.waits(table) or table.forward.rounding is not None:
        return
    pads = left_padding.of_rows(table.padding, len(queries))
    # Rows that are too short for codes are exact.
    long = [row for row, pad in enumerate(pads) if table.seen - pad >= MIN_TOKENS_TO_QUANTISE] or [0]
    rows = [long[at] for at in torch.linspace(0, len(long) - 1, min(ROWS, len(long))).long().tolist()]
    sums = torch.stack([_moved(table, queries, row) for row in rows]).sum(0)  # [2, H]
    moved, size = mean_over_heads(sums, table)
    table.forward.rounding = moved / size.clamp_min(1e-30)


def _moved(table: SlotTable, queries: Tensor, row: int) -> Tensor:  # [2, H]
    """|o' - o|^2 and |o|^2 of one row, summed over queries and the query heads of each KV head."""
    first = 0 if table.padding is None else int(table.padding[row])
    keys, values = (part[row : row + 1, :, first:] for part in (table.key_slots(), table.value_slots()))
    new, heads = min(queries.shape[2], keys.shape[2]), keys.shape[1]
    asked = torch.linspace(0, new - 1, min(QUERIES, new), device=keys.device).long() - new
    q = queries[row : row + 1, :, asked].to(keys.dtype)
    if table.context.rotary:
        behind = torch.full((1, 1), BEHIND + new, device=keys.device)
        q = ops.rotate_queries(q, behind, whole_turns(tuple(table.context.rotary), keys.device))
    exact, rounded = (
        ops.weighted_attention(q, k, values, None, None, table.forward.scale).float()
        for k in (keys, coded(keys, FEW, None).plain())
    )  # [1, Hq, Q, D]
    return torch.stack([(part**2).view(heads, -1).sum(-1) for part in (rounded - exact, exact)])


def settle_bits(tables: Sequence[SlotTable], slots: Sequence[Tensor] | None = None) -> None:
    """Chooses the bits of all tables where a prompt has yet to (synchronises with the GPU once).

    `slots` of one number: how many each of them will hold, else as many as it holds.
    """
    if not all(table.stored_bits.auto for table in tables) or (slots is None and any(table.exact for table in tables)):
        return
    costs = [table.forward.rounding for table in tables if table.forward.rounding is not None]
    if len(costs) < len(tables):
        # Something had to go before there were tokens enough.
        for table in tables:
            coding.choose_bits(table, FEW)
        return
    answer = [float(number) for number in fetched([each.double() for each in (*costs, *(slots or ()))])]
    counts = answer[len(costs) :] or [float(table.log_den.numel()) for table in tables]
    for table, many in zip(tables, dearest(answer[: len(costs)], counts), strict=True):
        coding.choose_bits(table, MANY if many else FEW)


def dearest(costs: Sequence[float], counts: Sequence[float]) -> list[bool]:
    """Which layers get more bits, of those that cost so much and hold so many keys."""
    result, left = [False] * len(costs), MOST_MANY * sum(counts)
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer] / max(counts[layer], 1.0)):
        if costs[layer] >= WORTH and counts[layer] <= left:
            result[layer], left = True, left - counts[layer]
    return result
