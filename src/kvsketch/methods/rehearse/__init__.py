"""Rehearse: keeps what a text needs to be read again, whatever is asked about it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod, option
from kvsketch.methods.budget import Size
from kvsketch.methods.rehearse.refit import refit as refitted
from kvsketch.slots.state import Range, TableState, per_row, per_slot
from kvsketch.slots.table import SlotTable

SHARES = ("head", "layer", "model")
REFITS = ("full", "none")
GAP = 24  # positions between the text and its virtual repetition
ROOM = 64  # slots, and queries, that are added at a time for generated tokens
QUERIES = 2048  # of a chunk and KV head that a refit takes
ALWAYS = 2.0  # the score of tokens that stay; replay scores are at most 1


@dataclass
class Rehearsed(TableState):
    """What is known of the tokens, and what waits for the next rehearsal."""

    score: Tensor | None = per_slot()  # [B, H, S], replay scores
    queries: Tensor | None = per_row()  # [B, Hq, room, D], of tokens since the last rehearsal
    waiting: Tensor | None = per_row(lambda t, s: Range(t.shape[:1], 0, s.room))  # [B] int64, how many these are
    again: Tensor | None = per_row()  # [B, H, chunks, Q, D], turned queries of the chunks of a rehearsal under way

    @property
    def room(self) -> int:
        return 0 if self.queries is None else self.queries.shape[2]


@dataclass(frozen=True)
class Rehearse(BudgetedMethod):
    """Keeps the tokens that the text itself would look at if it came again, and refits their weights and values.

    Chunk by chunk, when all layers have taken the tokens:

        score    of token j: the most attention that any query gives it in a virtual repetition (`ops.replay_scores`)
        choose   sinks and the last `recent` tokens stay; the others compete, with `share=model` in all layers and heads
                 together, so that the mean over heads is the budget
        refit    weights and values of what stays, so that the repeated queries see the mass and the output of the whole
                 chunk (`refit.py`); a head that gains nothing on held-back queries stays as it is

    Generated tokens are kept whole until they make a chunk of their own. The question is not known when the cache is
    compressed, and need not be.

    Scores: KVzip (Kim et al., arXiv 2505.23416) repeats the text in a second forward; here queries are turned to the
    positions of a repetition, which rotary embeddings allow, and no forward is needed. One budget for all heads as in
    KVzip, refitting after Attention Matching (Zweiger et al., arXiv 2602.16284).
    """

    name: ClassVar[str] = "rehearse"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2505.23416"
    look: ClassVar[tuple[str, ...]] = ("#b3123d", "#ff6b8f", "*")
    State: ClassVar[type[TableState]] = Rehearsed

    budget: Size | int | str = "50%"
    recent: Size | int | str = 32
    share: str = option("model", "who shares a budget: every head has its own, the heads of a layer, or all", SHARES)
    refit: str = option("full", "whether weights and values of what stays are refitted", REFITS)
    chunk: int = option(2048, "tokens that are rehearsed together")
    bits: int = 4

    @property
    def placeless(self) -> str:
        return "for its weights are refitted to the distances of the text"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("chunk", isinstance(self.chunk, int) and self.chunk >= 64, "a whole number of tokens, 64 or more")

    # one layer after a forward

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        state = table.state_of(Rehearsed)
        if not table.rotary:
            raise ValueError(
                f"{self.name} turns queries by the rotary angles of the model, which has none that kvsketch knows; use "
                "snapkv, h2o or another method"
            )
        self._remember(table, state, queries)
        if self.is_due(table):
            self._score(table, state)
        elif table.in_place:
            table.advance()
            if self._waiting(table) % ROOM == 0:
                table.lengthen(ROOM)

    def is_due(self, table: SlotTable) -> bool:
        """Whether the tokens since the last rehearsal are to be rehearsed after this forward."""
        return table.appended > 1 or self._waiting(table) >= self.chunk

    def maintenance_due(self, table: SlotTable) -> bool:
        # Heads of different sizes have no kernel yet; their steps are not recorded.
        return True

    def _waiting(self, table: SlotTable) -> int:
        """Tokens since the last rehearsal, by the host's count."""
        return table.seen - table.settled

    def _remember(self, table: SlotTable, state: Rehearsed, queries: Tensor) -> None:
        """Keeps the queries of the new tokens behind those that wait."""
        batch, heads, new, size = queries.shape
        room = -(-self._waiting(table) // ROOM) * ROOM
        if state.queries is None or state.room < room:
            grown = queries.new_zeros(batch, heads, room, size)
            if state.queries is not None:
                grown[:, :, : state.room] = state.queries
            state.queries = grown
        if state.waiting is None:
            state.waiting = torch.zeros(batch, dtype=torch.int64, device=queries.device)
        at = state.waiting.view(-1, 1) + torch.arange(new, device=queries.device)  # [B, n]
        state.queries.scatter_(2, at.view(batch, 1, new, 1).expand(queries.shape), queries)
        state.waiting += new

    def _score(self, table: SlotTable, state: Rehearsed) -> None:
        assert state.queries is not None
        table.unpack()
        slots = newest_slots(table, self._waiting(table))  # [B, H, m]
        keys = table.key_slots()
        first = sink_keys(table, keys, self.sinks)
        scores, kept = [], []
        for piece in self._pieces(table):
            at = slots[:, :, piece]
            k = keys.gather(2, at.unsqueeze(-1).expand(*at.shape, keys.shape[3]))
            q = state.queries[:, :, piece].to(k.dtype)
            begin = table.settled + piece.start
            pads = torch.zeros_like(table.real_tokens()[:, 0, 0]) if table.padding is None else table.padding
            again = turned(q, table.rotary, GAP + table.seen - pads.clamp_min(begin)).to(k.dtype)
            sinks = first if begin >= self.sinks + int(pads.max()) else first[:, :, :0]
            hidden = (pads - begin).clamp(0, q.shape[2])
            scores.append(ops.replay_scores(again, q, k, sinks, table.scale, hidden=hidden))
            kept.append(sampled(again, keys.shape[1], hidden))
        if state.score is None:
            state.score = torch.zeros(table.shape, device=keys.device)
        state.score.scatter_(2, slots, torch.cat(scores, 2))
        state.again = torch.stack(kept, 2)

    def _pieces(self, table: SlotTable) -> list[slice]:
        waiting = self._waiting(table)
        return [slice(start, min(start + self.chunk, waiting)) for start in range(0, waiting, self.chunk)]

    # all layers together

    def settle(self, tables: Sequence[SlotTable]) -> None:
        if tables[0].state_of(Rehearsed).again is None:
            return
        for table, keep in zip(tables, self._chosen(tables), strict=True):
            self._rebuild(table, keep)

    def _chosen(self, tables: Sequence[SlotTable]) -> list[Tensor]:
        """Which slots of each table stay, [B, H, S] bool."""
        worth = []
        for table in tables:
            score, position = table.state_of(Rehearsed).score, table.position_slots()
            assert score is not None
            always = (position < self.sinks) | (position >= table.real_tokens() - self.recent_size.of(table.seen))
            worth.append(torch.where(position < 0, -1.0, torch.where(always, ALWAYS, score)))
        if self.share == "model":
            flat = torch.cat([w.flatten(1) for w in worth], 1)
            heads = sum(w.shape[1] for w in worth)
            best = largest(flat, heads * self._each(tables[0]))
            parts = best.split([w[0].numel() for w in worth], 1)
            return [part.view(w.shape) for part, w in zip(parts, worth, strict=True)]
        if self.share == "layer":
            return [
                largest(w.flatten(1), w.shape[1] * self._each(t)).view(w.shape)
                for t, w in zip(tables, worth, strict=True)
            ]
        return [largest(w, self._each(t).unsqueeze(-1)) for t, w in zip(tables, worth, strict=True)]

    def _each(self, table: SlotTable) -> Tensor:  # [B, 1]
        """Mean tokens of a head, by row; never fewer than what always stays."""
        total, least = self.row_budget(table).total, self.sinks + int(self.recent_size.of(table.seen))
        each = total if isinstance(total, Tensor) else torch.full((table.shape[0],), total, device=table.device)
        return each.view(-1, 1).clamp_min(least)

    def _rebuild(self, table: SlotTable, keep: Tensor) -> None:
        state = table.state_of(Rehearsed)
        table.unpack()
        held = table.log_weights()[1]
        weights = torch.zeros(table.shape, device=table.device) if held is None else held
        if self.refit == "full":
            weights = self._refit(table, state, keep, weights)
        counts = keep.sum(-1)  # [B, H]
        order = torch.where(keep, table.index_slots(), table.seen).argsort(dim=-1, stable=True)
        chosen = order[:, :, : int(counts.max())]
        chosen = torch.where(torch.arange(chosen.shape[2], device=chosen.device) < counts.unsqueeze(-1), chosen, -1)
        log_den = weights.gather(2, chosen.clamp_min(0))
        table.rebuild(chosen, chosen.shape[2] + ROOM, log_den=log_den, next_slot=counts.unsqueeze(-1))
        table.pack(counts + ROOM + 1)
        table.note_settled()
        state.again = state.queries = state.waiting = None

    def _refit(self, table: SlotTable, state: Rehearsed, keep: Tensor, weights: Tensor) -> Tensor:
        """Gives the kept tokens of the rehearsal new values; returns the weights of all slots, [B, H, S]."""
        assert state.again is not None
        slots, keys, values = newest_slots(table, self._waiting(table)), table.key_slots(), table.value_slots()
        position = table.position_slots()
        weights = weights.clone()
        for number, piece in enumerate(self._pieces(table)):
            at = slots[:, :, piece]
            stays = keep.gather(2, at)
            kept = stays.int().argsort(dim=-1, descending=True, stable=True)[:, :, : int(stays.sum(-1).max())]
            kept = torch.where(stays.gather(2, kept), kept, -1)
            k, v = (x.gather(2, at.unsqueeze(-1).expand(*at.shape, x.shape[3])) for x in (keys, values))
            hidden = position.gather(2, at) < 0
            found = refitted(state.again[:, :, number], k, v, kept, table.scale, hidden=hidden)
            here = torch.where(kept >= 0, at.gather(2, kept.clamp_min(0)), -1)
            table.replace_values(here, found.values)
            spare = torch.cat([weights, weights[:, :, :1]], 2)
            weights = spare.scatter(2, torch.where(here < 0, weights.shape[2], here), found.log_weights)[:, :, :-1]
        return weights


def newest_slots(table: SlotTable, count: int) -> Tensor:  # [B, H, count]
    """The slots of the last `count` tokens, in the order of the text."""
    if table.exact:
        return torch.arange(table.length - count, table.length, device=table.device).expand(*table.shape[:2], -1)
    # Left padding has negative numbers in `index_slots`; the newest tokens are told by their own.
    return table.order_slots()[:, :, -count:]


def sink_keys(table: SlotTable, keys: Tensor, sinks: int) -> Tensor:  # [B, H, sinks, D]
    """The keys of the first tokens of each row, where the table has them all; else none."""
    position = table.position_slots()
    found = position.unsqueeze(-1) == torch.arange(sinks, device=keys.device)  # [B, H, S, E]
    at = found.int().argmax(2)
    return keys.gather(2, at.unsqueeze(-1).expand(*at.shape, keys.shape[3]))


def turned(q: Tensor, angles: Sequence[float], positions: Tensor) -> Tensor:
    """Queries [B, Hq, n, D] as they would be so many positions [B] later, in float32."""
    half = len(angles)
    angle = positions.view(-1, 1, 1, 1) * torch.tensor(angles, dtype=torch.float64, device=q.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    x, y, rest = q[..., :half].float(), q[..., half : 2 * half].float(), q[..., 2 * half :].float()
    return torch.cat([x * cos - y * sin, x * sin + y * cos, rest], -1)


def sampled(again: Tensor, heads: int, hidden: Tensor) -> Tensor:  # [B, H, Q, D]
    """QUERIES of the turned queries of each KV head, evenly over heads of the group and tokens behind the `hidden`."""
    grouped = again.unflatten(1, (heads, -1)).transpose(2, 3).flatten(2, 3)  # [B, H, n G, D]
    first = hidden.clamp_max(again.shape[2] - 1).view(-1, 1) * (again.shape[1] // heads)
    count = grouped.shape[2] - first  # [B, 1]
    at = first + torch.arange(QUERIES, device=again.device) * count // QUERIES
    return grouped.gather(2, at.view(len(at), 1, -1, 1).expand(-1, heads, -1, grouped.shape[3]))


def largest(worth: Tensor, count: Tensor) -> Tensor:
    """Which `count` entries of the last dimension are the largest; negative ones never are."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    numbers = torch.arange(worth.shape[-1], device=worth.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, numbers)
    return (rank < count) & (worth >= 0)
