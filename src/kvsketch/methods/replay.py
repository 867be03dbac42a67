"""The score of a replay: how much the text itself would look at a token if it came again.

score(j) = max over the queries i of the repetition, and the query heads of the group, of
           softmax(scale <q_i, k_j>) over the chunk, the sinks and the repetition up to i

exact      the model repeats the text in a second forward (`cache.replay.repetition`), as in KVzip (arXiv 2505.23416)
virtual    queries of the text are rotated to the positions of a repetition, which rotary embeddings allow; no
           forward is needed
learned    a map that was fitted on other texts (`replay_map`, `kvsketch fit`) makes real scores of virtual ones
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import replay_map
from kvsketch.methods.base import Method
from kvsketch.methods.budget import Tokens
from kvsketch.methods.replay_map import ReplayMap
from kvsketch.methods.waiting import Waiting, WaitingMethod, newest_keys, newest_slots, newest_values, own_sinks
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots import packing
from kvsketch.slots.table import SlotTable

GAP = 24  # positions between the text and its virtual repetition
MAX_ROTATED = {"cuda": 1 << 27}  # entries of rotated queries held at once, of more than one chunk; elsewhere one chunk
GOLDEN = (5**0.5 - 1) / 2


class Piece(NamedTuple):
    """Tokens that the model repeats, of those that wait."""

    begin: int
    tokens: int

    @property
    def end(self) -> int:
        return self.begin + self.tokens


@dataclass(frozen=True)
class Replay:
    """Scores tokens chunk by chunk, and keeps some queries of the repetition for a refit."""

    chunk: int  # tokens that are repeated together
    sinks: int
    samples: int = 0  # queries of a chunk and KV head for a refit
    learned: ReplayMap | None = None  # from first queries and virtual scores to real ones

    def exact(self, table: SlotTable, queries: Tensor, copies: Tensor, tokens: int) -> None:
        """Scores the next `tokens` tokens that the model has repeated.

        Queries [B, Hq, m, D] and keys [B, H, m, D] are those of the repetition; what was said before the tokens
        themselves stands in front.
        """
        state, waiting = table.state_of(Waiting), table.seen - table.settled
        packing.unpack(table)
        slots = newest_slots(table, waiting)[:, :, state.scored : state.scored + tokens]
        keys = table.keys_at(slots)
        first = sink_keys(table, self.sinks) if table.settled + state.scored >= self.sinks else keys[:, :, :0]
        begun, q = copies.shape[2] - tokens, queries[:, :, -tokens:].to(keys.dtype)
        sinks = torch.cat([first, copies[:, :, :begun]], 2)
        scores = ops.replay_scores(q, q, keys, sinks, table.forward.scale, copies=copies[:, :, begun:])
        state.note(table, slots, scores, [tokens], sampled(q, keys.shape[1], 1, None, self.samples))

    def features(self, table: SlotTable) -> Tensor:  # [B, H, n, F]
        """What is known of the tokens that have virtual scores."""
        state = table.state_of(Waiting)
        assert state.score is not None
        slots = newest_slots(table, state.scored)
        hidden = None if table.padding is None else (table.padding - (table.seen - state.scored)).clamp_min(0)
        keys, values = newest_keys(table, slots), newest_values(table, slots)
        return replay_map.features(state.score.gather(2, slots), keys, values, hidden)

    def virtual(
        self,
        table: SlotTable,
        queries: Tensor,
        lengths: Sequence[int] | None = None,
        behind: int = 0,
        whole: int | None = None,
    ) -> None:
        """Scores the newest tokens but for the last `behind`, those of the queries [B, Hq, n, D].

        lengths: of the chunks; unless given these are equal. whole: tokens of a text that is read in part, once it is
        complete; the repetition stands behind them.
        """
        packing.unpack(table)
        new = queries.shape[2]
        slots = newest_slots(table, new, behind)  # [B, H, n]
        keys = newest_keys(table, slots, behind)
        queries, pads = queries.to(keys.dtype), table.padding
        # Queries that waited are not those of all heads.
        if learns := self.learned is not None and table.forward.appended == new > 1:
            queries = self._as_repeated(table, queries)
        first, sinks = first_keys(table, self.sinks), own_sinks(table, self.sinks)
        angles = whole_turns(tuple(table.context.rotary), queries.device)
        lengths, done = list(lengths or equal_chunks(new, self.chunk)), 0
        most = MAX_ROTATED.get(keys.device.type, 1) // queries[:, :, : max(lengths)].numel()
        scores, again = [], []
        known = self._known_sums(table, queries) if len(lengths) == 1 and not (behind or learns) else None
        for length, count in runs(lengths, max(1, most)):
            begin, end = table.seen - behind - new + done, done + count * length
            q, k = queries[:, :, done:end], keys[:, :, done:end]
            begins = (begin + length * torch.arange(count, device=k.device)).expand(len(k), -1)  # [B, P]
            asked_from = begins if pads is None else torch.maximum(begins, pads.view(-1, 1))
            repeated = ops.rotate_queries(q, GAP + (table.seen if whole is None else whole) - asked_from, angles)
            hidden = None if pads is None else (pads - begin).clamp_min(0)
            bare: Tokens = sum(b < sinks for b in range(begin, begin + count * length, length))
            if pads is not None:
                bare = (begins < pads.view(-1, 1) + sinks).sum(1)
            scores.append(
                ops.replay_scores(
                    repeated, q, k, first, table.forward.scale, chunks=count, bare=bare, hidden=hidden, known=known
                )
            )
            again.append(sampled(repeated, k.shape[1], count, hidden, self.samples))
            done = end
        result, asked = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in (scores, again))
        table.state_of(Waiting).note(table, slots, result, lengths, asked)
        if learns:
            self._learned_scores(table, slots)

    def _known_sums(self, table: SlotTable, queries: Tensor) -> Tensor | None:  # [B, Hq, n]
        """What the queries have seen in the first reading, if these tokens alone were there."""
        sums, new = table.forward.row_lse, queries.shape[2]
        is_alone = table.seen == new and table.document is None and table.padding is None
        return sums[:, :, :new] if is_alone and sums is not None and sums.shape[2] >= new else None

    def _as_repeated(self, table: SlotTable, queries: Tensor) -> Tensor:
        """Queries [B, Hq, n, D] as the model would have them if it repeated the newest tokens, at the first places."""
        assert self.learned is not None
        angles = whole_turns(tuple(table.context.rotary), queries.device)
        places = positions_of(table, queries.shape[2])
        plain = ops.rotate_queries(queries, -places, angles)
        return ops.rotate_queries(self.learned.queries_of(table.context.layer_idx, plain), places, angles)

    def _learned_scores(self, table: SlotTable, slots: Tensor) -> None:
        assert self.learned is not None
        state = table.state_of(Waiting)
        if (
            state.score is not None
            and (weights := self.learned.scores_of(table.context.layer_idx, slots.device)) is not None
        ):
            state.score.scatter_(2, slots, replay_map.predicted(self.features(table), weights))


@dataclass(frozen=True)
class ReplayedMethod(WaitingMethod):
    """A method that scores tokens by a replay, for which the model may have to read the text again (`cache.replay`)."""

    @property
    @abstractmethod
    def repeats(self) -> bool:
        """Whether the model repeats a prompt in a second forward, or parts of it for a promise."""

    @property
    def promises(self) -> bool:
        """Whether it keeps a promised loss in place of a budget (`cache.replay.promise`)."""
        return False

    @abstractmethod
    def pieces(self, tokens: int, most: int) -> list[Piece]:
        """What the model repeats of so many tokens; whole chunks have at most `most`."""

    @abstractmethod
    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        """Takes note of a piece that the model has repeated, with these queries and keys [B, H, m, D].

        Keys of what was said before the piece stand in front of its own.
        """


def repeats(method: Method) -> TypeGuard[ReplayedMethod]:
    """Whether the model repeats a prompt for this method, in a second forward."""
    return isinstance(method, ReplayedMethod) and method.repeats


def pieces_of(tokens: int, chunk: int) -> list[Piece]:
    """The chunks of a text, as the model repeats them."""
    lengths = equal_chunks(tokens, chunk)
    return [Piece(end - length, length) for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]


def equal_chunks(tokens: int, chunk: int) -> list[int]:
    """Lengths of equal chunks, as near to `chunk` tokens as they can be."""
    count = max(1, round(tokens / chunk))
    return [tokens // count + (number < tokens % count) for number in range(count)]


def runs(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Chunks of equal lengths that follow each other, as (length, count); at most `most` at a time."""
    for length, equal in itertools.groupby(lengths):
        count = len(list(equal))
        for start in range(0, count, most):
            yield length, min(most, count - start)


def positions_of(table: SlotTable, count: int) -> Tensor:  # [B, count]
    """The positions of the last `count` tokens of each row; of left padding any."""
    last = table.before + table.seen
    result = torch.arange(last - count, last, device=table.device).expand(table.shape[0], -1)
    return result if table.padding is None else (result - table.padding.view(-1, 1)).clamp_min(0)


def first_keys(table: SlotTable, sinks: int) -> Tensor:  # [B, H, sinks, D]
    """The keys of the first tokens of the whole text, none where it has no more than these."""
    text = table if table.document is None else table.document
    return sink_keys(text, sinks if text.seen > sinks else 0).expand(table.shape[0], -1, -1, -1)


def sink_keys(table: SlotTable, sinks: int) -> Tensor:  # [B, H, sinks, D]
    """The keys of the first tokens of each row."""
    if table.exact and table.padding is None:
        return table.key_slots()[:, :, :sinks]
    first = table.position_slots().unsqueeze(-1) == torch.arange(sinks, device=table.device)  # [B, H, S, E]
    return table.keys_at(first.int().argmax(2))


def sampled(again: Tensor, heads: int, chunks: int, hidden: Tensor | None, count: int) -> Tensor:
    """So many queries [B, H, P, count, D] of each KV head and chunk, of queries [B, Hq, P C, D].

    From all heads of the group and all tokens behind the first `hidden` [B] ones. In no order: any part of them is
    spread over all tokens.
    """
    batch, query_heads, tokens, size = again.shape
    group, length = query_heads // heads, tokens // chunks
    begins = torch.arange(0, tokens, length, device=again.device)  # [P]
    asked = torch.zeros_like(begins).expand(batch, -1)
    if hidden is not None:
        asked = (hidden.view(-1, 1) - begins).clamp(0, length - 1)
    first = (asked * group).unsqueeze(-1)  # [B, P, 1], of the queries of a chunk, token by token
    spread = (torch.arange(count, dtype=torch.float64, device=again.device) * GOLDEN).frac()
    at = first + (spread * (length * group - first)).long()  # [B, P, count]
    token, member = (begins.unsqueeze(-1) + at // group).unsqueeze(1), (at % group).unsqueeze(1)
    head = torch.arange(batch * heads, device=again.device).view(batch, heads, 1, 1)
    rows = (head * group + member) * tokens + token  # [B, H, P, count]
    return again.reshape(-1, size).index_select(0, rows.flatten()).view(*rows.shape, size)
