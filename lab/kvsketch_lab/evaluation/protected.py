"""Rules for the tokens of a long answer that are no methods yet, each a method with another score.

    kvsketch_lab.evaluation.protected:Prompt:wait=16        a method string, as any class outside the library

`long-answers` compares them. Scores of `rehearse` are at most 1, and sinks and recent tokens stay whatever they are.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods import Rehearse, StreamingLLM
from kvsketch.methods.budget import row_prompts
from kvsketch.methods.waiting import Waiting, newest_slots, newest_values
from kvsketch.slots import SlotTable

LARGEST = 1 / 8  # of the tokens of a chunk, whose values are the longest


@dataclass(frozen=True)
class Window(StreamingLLM):
    """The prompt stays, then the most recent tokens. Where the prompt alone is too long its beginning goes."""

    name: ClassVar[str] = "window"

    def scores(self, table: SlotTable, queries: Tensor) -> Tensor:
        position = table.position_slots().float()
        return position + (position < row_prompts(table)) * 2.0**24


@dataclass(frozen=True)
class Rescored(Rehearse):
    """`rehearse` with other scores for the tokens of a chunk once it has scored them."""

    name: ClassVar[str] = "rescored"

    def score(self, table: SlotTable, queries: Tensor) -> None:
        before, is_prompt = table.state_of(Waiting).scored, table.settled == 0
        super().score(table, queries)
        state = table.state_of(Waiting)
        slots = newest_slots(table, state.scored - before)
        assert state.score is not None
        state.score.scatter_(2, slots, self.rescored(table, slots, state.score.gather(2, slots), is_prompt))

    @abstractmethod
    def rescored(self, table: SlotTable, slots: Tensor, scores: Tensor, is_prompt: bool) -> Tensor:
        """Other scores for the slots [B, H, n] that have these scores [B, H, n]."""


@dataclass(frozen=True)
class Prompt(Rescored):
    """The prompt stays before all tokens of the answer."""

    name: ClassVar[str] = "prompt"

    def rescored(self, table: SlotTable, slots: Tensor, scores: Tensor, is_prompt: bool) -> Tensor:
        return scores + is_prompt


@dataclass(frozen=True)
class Values(Rescored):
    """Of each chunk and head the tokens with the largest norms of their values stay before all others."""

    name: ClassVar[str] = "values"

    def rescored(self, table: SlotTable, slots: Tensor, scores: Tensor, is_prompt: bool) -> Tensor:
        norms = newest_values(table, slots).float().norm(dim=-1)
        best = norms.topk(max(1, int(LARGEST * norms.shape[2])), dim=2).indices
        return scores + torch.zeros_like(scores).scatter_(2, best, 1.0)


@dataclass(frozen=True)
class Random(Rescored):
    """Any tokens stay, prompt or answer."""

    name: ClassVar[str] = "random"

    def rescored(self, table: SlotTable, slots: Tensor, scores: Tensor, is_prompt: bool) -> Tensor:
        chance = torch.Generator().manual_seed(table.context.seed + table.seen * 1009 + table.context.layer_idx)
        return torch.rand(scores.shape, generator=chance).to(scores)


@dataclass(frozen=True)
class Even(Rescored):
    """A score is a share of the attention within its chunk: it is scaled by the chunk's tokens, so that a short chunk
    of an answer does not beat a long prompt.
    """

    name: ClassVar[str] = "even"

    def rescored(self, table: SlotTable, slots: Tensor, scores: Tensor, is_prompt: bool) -> Tensor:
        return scores * min(1.0, slots.shape[2] / self.chunk)
