"""Stretches of a text rehearsed where they lie, each to a size of its own; what lies between them stays as it is.

    settled | exact  stretch  exact  stretch | behind
              -- decided here --------------   waits, as before

The tokens that wait are decided up to the end of the last stretch. Each stretch is replayed by itself, keeps its best
tokens of all heads, and is refitted, as a chunk of a prompt is. Positions stay, so the text goes on as if nothing had
happened; tokens behind can still be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.methods.allocation import NEG_INF, winners
from kvsketch.methods.budget import Size, Tokens
from kvsketch.methods.waiting import ALWAYS, Waiting, lengthened, own_sinks
from kvsketch.slots.table import SlotTable


class TokenRange(NamedTuple):
    """Tokens `begin` up to `end` of a table; of these `size` stay in a head on average, None: all."""

    begin: int
    end: int
    size: Size | None = None


def undecided(tables: Sequence[SlotTable], ranges: Sequence[TokenRange]) -> list[TokenRange]:
    """Stretches, which follow each other, without gaps, from the first on that has a size; what is before it stays."""
    todo = without_gaps(ranges, tables[0].settled)
    first = next((number for number, each in enumerate(todo) if each.size is not None), len(todo))
    for table in tables if first else ():
        settle_whole(table, todo[first - 1].end)
    return todo[first:]


def without_gaps(ranges: Sequence[TokenRange], begin: int) -> list[TokenRange]:
    """Stretches from `begin` on, and those between them, which keep all tokens."""
    result: list[TokenRange] = []
    for part in ranges:
        if part.end <= begin:
            continue
        if part.begin > begin:
            result.append(TokenRange(begin, part.begin))
        result.append(part._replace(begin=max(begin, part.begin)))
        begin = part.end
    return result


def settle_whole(table: SlotTable, end: int) -> None:
    """Tokens up to `end` stay, all of them; their queries go."""
    state = table.state_of(Waiting)
    if state.queries is not None:
        state.queries = state.queries[:, :, end - table.settled :].clone()
    table.count(settled=end)


def settle_behind(table: SlotTable, queries: Tensor, room: int) -> None:
    """All tokens are decided but the last, whose `queries` [B, H m, behind, bytes] wait, with room for more.

    Scores were needed for the choice alone.
    """
    behind, state = queries.shape[2], table.state_of(Waiting)
    table.count(settled=table.seen - behind)
    state.queries, state.score = lengthened(queries, behind + room), None


def chosen(tables: Sequence[SlotTable], ranges: Sequence[TokenRange], sinks: int, share: str) -> list[Tensor]:
    """Which slots [B, H, S] stay: the best of each stretch, and all that lies outside."""
    index = [table.index_slots() for table in tables]
    keep = [each >= 0 for each in index]
    for part in ranges:
        if part.size is None:
            continue
        inside = [(each >= part.begin) & (each < part.end) for each in index]
        worth = [worth_of(table, own, sinks) for table, own in zip(tables, inside, strict=True)]
        best = winners(tables, worth, [sized(table, part) for table in tables], share)
        keep = [stays & ~own | won for stays, own, won in zip(keep, inside, best, strict=True)]
    return keep


def worth_of(table: SlotTable, inside: Tensor, sinks: int) -> Tensor:  # [B, H, S]
    """Scores of the slots of a stretch; sinks stay, and what lies elsewhere takes no part."""
    score = table.state_of(Waiting).score
    assert score is not None
    always = table.position_slots() < own_sinks(table, sinks)
    return score.masked_fill(always, ALWAYS).masked_fill_(~inside, NEG_INF)


def sized(table: SlotTable, part: TokenRange) -> Tokens:
    """Tokens of a stretch that a head keeps on average, by row: left padding does not count."""
    assert part.size is not None
    if table.padding is None:
        return part.size.of(part.end - part.begin)
    real = part.end - torch.maximum(table.padding, torch.full_like(table.padding, part.begin))
    return part.size.of(real.clamp_min(0).view(-1, 1, 1))
