"""The scores of attention received.

    Votes           of the last queries: snapkv, pyramidkv
    HeavyHitters    of all queries so far: h2o, keyformer

A query gives every head the same mass, so the scores of heads and layers can be compared, and heads may share a budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.allocation import HEAD, LAYER, MODEL, SHARES, capacities, claim
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Size, Tokens
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, Support, no
from kvsketch.methods.evict import EvictingMethod, evict, keep_best
from kvsketch.methods.parameters import Removed, option
from kvsketch.ops.attention_mass import is_plain
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.state import TableState, per_slot
from kvsketch.slots.table import SlotTable


@dataclass
class Scores(TableState):
    """What each slot has received so far."""

    score: Tensor | None = per_slot()  # [B, H, S] float32

    def held(self) -> Tensor:
        assert self.score is not None
        return self.score


ONE_SUM = Removed("sum", "the query heads of a KV head are added up")


@dataclass(frozen=True)
class Votes:
    """score(j) = mean over neighbours of  sum over the last `window` queries i of  softmax_j(scale * <q_i, k_j>)

    n new tokens make it  max(0, 1 - n / window) * score + their votes. Votes of single tokens are not pooled.
    """

    window: int
    kernel: int  # neighbouring positions whose mean is taken, 1: none

    def add(self, table: SlotTable, queries: Tensor, recent: Tokens) -> None:
        """Counts the votes of the newest queries [B, Hq, n, D]; the last `recent` tokens are not pooled."""
        state, votes = table.state_of(Scores), queries[:, :, -self.window :]
        fade = max(0.0, 1.0 - table.new_tokens / self.window)
        if table.in_place:
            add_attention(table, votes, state.held(), fade)
            return
        new = add_attention(table, votes, torch.zeros(table.shape, device=queries.device))
        if table.new_tokens > 1:
            new = self._pooled(table, new, recent)
        state.score = new if state.score is None else new.add_(state.score, alpha=fade)

    def _pooled(self, table: SlotTable, votes: Tensor, recent: Tokens) -> Tensor:
        """Votes [B, H, S] pooled over the stored neighbours in position order; the recent window stays as it is."""
        position = table.position_slots()
        newest = position >= table.real_tokens() - recent
        # Tokens that take no part add nothing to their neighbours, like the zeros beyond the ends of the prompt.
        pooled = torch.where(newest | (position < 0), 0.0, votes)
        order = None if table.exact else position.argsort(-1)
        pooled = F.avg_pool1d(pooled if order is None else pooled.gather(2, order), self.kernel, 1, self.kernel // 2)
        pooled = pooled if order is None else torch.empty_like(pooled).scatter_(2, order, pooled)
        return torch.where(newest, votes, pooled)


@dataclass(frozen=True)
class HeavyHitters:
    """score(j) = sum over queries i that saw j of  softmax_j((scale * <q_i, k_j> + noise_ij) / temperature)"""

    temperature: ops.Temperature | None = None
    noise: ops.Noise | None = None

    def add(self, table: SlotTable, queries: Tensor) -> None:
        """Adds the attention of the newest queries [B, Hq, n, D]; log-sums that prefill left are not computed again."""
        state, lse = table.state_of(Scores), table.forward.row_lse
        # After a roll back the score is a view of a longer tensor.
        old = torch.zeros(table.shape, device=queries.device) if state.score is None else state.score.contiguous()
        lse = None if lse is None else lse[:, :, : queries.shape[2]]
        state.score = add_attention(table, queries, old, 1.0, self.temperature, self.noise, lse)


@dataclass(frozen=True)
class AttentionScored(EvictingMethod):
    """An evicting method whose scores are attention received; with `share`, several heads have one budget.

    A prompt decides how many slots a head has: after its layer took it, or after all layers did. Tokens that come alone
    evict inside their head. A text that outgrows its budget token by token leaves heads equal until the next prompt.
    """

    share: str = option(
        HEAD, "who shares a budget: head (nobody), the heads of a layer, or all heads", SHARES,
        kw_only=True,
    )  # fmt: skip
    floor: Size | int | str = option("20%", "share of an equal part that every head gets, or 0", kw_only=True)

    State: ClassVar[type[Scores]] = Scores
    removed: ClassVar[Mapping[str, Removed]] = {**BudgetedMethod.removed, "gqa_reduce": ONE_SUM}
    wants_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        with contextlib.suppress(ValueError):
            self._set("floor", Size.parse(self.floor, smallest=0))
        is_share = isinstance(self.floor, Size) and (self.floor.share is not None or self.floor.tokens == 0)
        self._require("floor", is_share, "a share of at most 100%, such as 20%, or 0")

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, shared_budget=SUPPORTED)

    @property
    def in_equal_pages(self) -> Support:
        if self.share != HEAD:
            return no(f"share={self.share} gives heads different sizes, and pages have equal heads; use share={HEAD}")
        return super().in_equal_pages

    @property
    def ragged(self) -> bool:
        return self.share != HEAD

    def worth(self, table: SlotTable) -> Tensor:  # [B, H, S]
        """The scores of all slots."""
        score = table.state_of(self.State).held()
        return score if table.layout is None else table.layout.unpacked(score)

    @property
    def settles(self) -> bool:
        return self.share == MODEL

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        self.observe(table, queries)
        if table.exact and table.length <= self.budget_tokens(table):
            return
        if self._divides(table):
            if self.share == LAYER:
                self._divide([table])
        elif table.capacity is not None:
            keep_best([table], [self.worth(table)], self, [table.capacity - 1])
        else:
            evict(table, self.worth(table), self)

    def settle(self, tables: Sequence[SlotTable]) -> None:
        waiting = [table for table in tables if not table.empty and self._divides(table)]
        if waiting:
            self._divide(waiting)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        held = super().stored_bytes(shape)
        return held if held is None or self.share == HEAD else held + shape.layout(self.budget_tokens(shape.table) + 1)

    def _divides(self, table: SlotTable) -> bool:
        """Whether the newest tokens belong to a prompt, and heads get new numbers of slots."""
        over = not table.exact or table.length > self.budget_tokens(table)
        return self.share != HEAD and over and table.forward.appended > 1 and table.prompt_tokens >= table.seen

    def _divide(self, tables: Sequence[SlotTable]) -> None:
        floor = cast(Size, self.floor).share or Fraction(0)
        worth = [self.worth(table) for table in tables]
        claims = [claim(table, own, self) for table, own in zip(tables, worth, strict=True)]
        keep_best(tables, worth, self, capacities(tables, claims, floor))


def add_attention(
    table: SlotTable,
    queries: Tensor,
    into: Tensor,
    fade: float = 1.0,
    temperature: ops.Temperature | None = None,
    noise: ops.Noise | None = None,
    row_lse: Tensor | None = None,
) -> Tensor:
    """Makes `into` [B, H, S] fade * into + the attention of `queries` to each slot (`ops.attention_mass`), in place.

    A decode step whose attention has left its logits does not read the keys a second time. Where heads differ, `into`
    is flat as the table is.
    """
    plain = temperature is None and noise is None
    layout, temperature, index = table.layout, temperature or ops.Temperature(), table.stored_index()
    equal = into if layout is None else layout.unpacked(into)
    left, clock = table.forward.row_logits, None if table.exact else table.clock
    if left is not None:
        assert index is not None
        ops.mass_from_logits(
            left.logits, index, table.clock,
            row_lse=left.row_lse if plain or is_plain(temperature, noise) else None, padding=table.padding,
            temperature=temperature, noise=noise, into=equal, fade=fade,
        )  # fmt: skip
    else:
        ops.attention_mass(
            queries, table.read_keys(), table.forward.scale,
            seen=clock, index=index, padding=table.padding, temperature=temperature, noise=noise,
            row_lse=row_lse, into=equal, fade=fade,
        )  # fmt: skip
    if layout is None:
        return into
    return layout.write(into, equal) if table.shared else into.copy_(layout.packed(equal))
