"""InfiniGen: choose tokens by a few channels of rotated queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods.parameters import Removed, option
from kvsketch.methods.recall import Recalled, RecallingMethod
from kvsketch.slots import offloaded
from kvsketch.slots import padding as left_padding
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.heads import mean_over_heads
from kvsketch.slots.state import Range, number, per_row
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import filled

GROWTH = 2


@dataclass
class Learned(Recalled):
    """What InfiniGen remembers of a layer."""

    gram: Tensor | None = per_row()  # [B, H, D, D] float32, sum of q q^T over a prompt, until its last chunk is read
    skew: Tensor | None = per_row()  # [B, H, D, p], the directions along which queries are longest
    partial: Tensor | None = per_row()  # [B, H, tokens, p], every key along them
    # [B] int64, tokens that a row had when it learned its directions, 0: it has none yet
    learned: Tensor | None = per_row(lambda t, s: Range(t.shape[:1], 0, t.seen))
    learn_next: int = number()  # tokens seen when the next row learns; 0: none has yet

    @property
    def indexed(self) -> bool:
        return self.partial is not None

    def index_parts(self) -> tuple[Tensor, Tensor]:
        """Directions and partial keys."""
        assert self.skew is not None and self.partial is not None
        return self.skew, self.partial


@dataclass(frozen=True)
class InfiniGen(RecallingMethod):
    """Reads the tokens with the largest approximate scores, from the few directions in which queries are longest.

    Keys and queries are rotated by the orthogonal matrix of the queries' singular vectors. That keeps inner products,
    and the first channels then hold most of the queries' length. The score over the first p = ceil(ratio * D) channels,

        s'_i = scale * <rotated q, rotated k_i> over p channels

    is compared with the largest: tokens with s'_i > max - alpha matter. Their number, in the mean over the query heads
    of a row and at most the budget, is how many of its best tokens each head reads, in addition to its own.
    Attention over them is exact.

    A row learns its directions when it reaches its budget, from the queries of that forward (a whole prompt, or one
    token) and, where these leave directions undecided, from all its keys. It learns again whenever its tokens have
    doubled: rotary positions rotate queries, so that old directions fit new queries badly.

    Paper: Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
    Management (arXiv 2406.19707). Differs from the authors' code: the directions come from the queries of the text
    itself, per batch row and KV head, not from a calibration text; columns are taken by their sum of squares; and the
    query that scores is the layer's own. The authors multiply the input of the layer before with this layer's query
    weights, because they must start copying early; here nothing is copied early, and the layer's own query makes the
    choice that theirs approximates.
    """

    name: ClassVar[str] = "infinigen"
    paper: ClassVar[str] = "arXiv 2406.19707"
    look: ClassVar[tuple[str, ...]] = ("#7a5230", "v")
    State: ClassVar[type[Learned]] = Learned
    tail_tokens: ClassVar[int] = 256
    sinks: int = field(default=0, init=False)
    ratio: float = option(0.2, "share of the channels that score")
    alpha: float = option(
        5.0,
        "distance from the largest score, in logits, within which a token is read (authors: 4 for OPT, 5 for Llama)",
    )
    removed: ClassVar[Mapping[str, Removed]] = {
        **RecallingMethod.removed,
        "speculate": Removed("own", "nothing is copied early, so that the layer's own query chooses at no cost"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("ratio", 0 < self.ratio <= 1, "a share of the channels, above 0 and at most 1")
        self._require("alpha", self.alpha > 0, "a distance from the largest score, above 0")

    def rows_read(self, table: SlotTable) -> int:
        return self.budget_tokens(table)

    def maintenance_due(self, table: SlotTable) -> bool:
        outgrown = self.is_indexed(table) and table.seen + 1 > table.state_of(self.State).index_parts()[1].shape[2]
        learns = self.selects(table) and table.seen + 1 >= self._learns_at(table)
        return outgrown or learns or super().maintenance_due(table)

    def _learns_at(self, table: SlotTable) -> int:
        """Tokens seen from which on some row may learn."""
        return table.state_of(self.State).learn_next or self.budget_tokens(table)

    def can_forget(self, table: SlotTable, left: int) -> bool:
        # The directions were learned from the queries of a prompt.
        return super().can_forget(table, left) and (not self.selects(table) or left >= table.prompt_tokens)

    def forget(self, table: SlotTable, count: int) -> None:
        super().forget(table, count)
        if table.seen < self.budget_tokens(table):
            table.state_of(self.State).partial = None

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        end = max(table.seen, table.prompt_tokens) if table.new_tokens > 1 else table.seen
        if self.selects(table) and end >= self._learns_at(table):
            state, gram = table.state_of(self.State), gram_of(table, queries)
            state.gram = gram if state.gram is None else gram.add_(state.gram)
        super().compress(table, queries)

    def index(self, table: SlotTable) -> None:
        """Writes the new tokens' keys along the chosen directions, which a row that is due learns first."""
        state = table.state_of(self.State)
        if not self.reads_on(table) and state.gram is not None:
            gram, state.gram = state.gram, None
            self._learn_directions(table, gram)
        begins = state.skew is not None and table.seen >= self.budget_tokens(table) and not self.reads_on(table)
        if not (state.indexed or begins):
            return
        new = table.new_tokens if state.indexed else table.seen
        self._reserve(table)
        keys = offloaded.newest(table, table.seen - new)[0] if new > 1 else self.newest_key(table)
        place = table.seen_on_device() - new + torch.arange(new, device=keys.device)
        skew, partial = state.index_parts()
        place = place.view(1, 1, -1, 1).expand(*keys.shape[:3], partial.shape[3])
        partial.scatter_(2, place, keys @ skew)

    def _learn_directions(self, table: SlotTable, gram: Tensor) -> None:
        """Gives directions to the rows that are due, and their keys along these.

        When a row is due depends on its own tokens alone, so that it learns the same beside others.
        """
        state, keys = table.state_of(self.State), offloaded.all_keys(table)
        batch, heads, _, size = keys.shape
        real = table.real_tokens().flatten()
        if state.skew is None:
            state.skew = keys.new_zeros(batch, heads, size, math.ceil(self.ratio * size))
            state.learned = torch.zeros_like(real)
        learned = state.learned
        assert learned is not None
        all_rows = self.budget_tokens(table)
        budget = torch.full_like(real, all_rows) if state.budgets is None else state.budgets.long()
        rows = torch.arange(batch, device=keys.device)
        if table.padding is not None:
            rows = (real >= torch.maximum(GROWTH * learned, budget)).nonzero().flatten()
        padding = None if table.padding is None else table.padding[rows]
        if len(rows):
            state.skew[rows] = directions(gram[rows], keys[rows], padding, self.ratio)
            learned[rows] = real[rows]
            if state.indexed:
                self._reserve(table)
                skew, partial = state.index_parts()
                partial[rows, :, : table.seen] = keys[rows] @ skew[rows]
        if table.padding is None:
            state.learn_next = GROWTH * table.seen
        else:
            state.learn_next = int((table.padding + torch.maximum(GROWTH * learned, budget)).min())

    def _reserve(self, table: SlotTable) -> None:
        state = table.state_of(self.State)
        assert state.skew is not None
        present = state.skew[:, :, :0] if state.partial is None else state.partial
        if present.shape[2] < table.seen:
            state.partial = filled(present, table.seen + max(64, table.seen // 8) - present.shape[2])

    def index_bytes(self, shape: LayerShape) -> int:
        directions = math.ceil(self.ratio * shape.size)
        partial = shape.tokens + max(64, shape.tokens // 8)
        return shape.all_heads * shape.itemsize * directions * (partial + shape.size) + 8 * shape.batch

    def rows_chosen(self, table: SlotTable, query: Tensor) -> Tensor | None:  # [B, Hq, rows_read] int32
        """The tokens each query head reads, best first, -1 behind the last."""
        if not self.is_indexed(table):
            return None
        # The step's own token needs a place among the scores.
        self._reserve(table)
        skew, partial = table.state_of(self.State).index_parts()
        rotated = query.view(query.shape[0], skew.shape[1], -1, query.shape[3]) @ skew
        scores = (rotated @ partial.mT).float().flatten(1, 2) * table.forward.scale  # [B, Hq, N]
        token = torch.arange(scores.shape[-1], device=scores.device)
        newest = table.seen_on_device() - 1
        hidden = token >= newest
        if table.padding is not None:
            hidden = hidden | left_padding.hides(table.padding, token)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        promising = (scores > scores.amax(-1, keepdim=True) - self.alpha).sum(-1).float()  # [B, Hq]
        # The query's own token is not in the index yet and is always read.
        scores = torch.where(token == newest, float("inf"), scores)
        most = min(self.rows_read(table), scores.shape[-1])
        count = (mean_over_heads(promising, table).round().long() + 1).clamp_max(most)
        budgets = table.state_of(self.State).budgets
        if budgets is not None:
            count = torch.minimum(count, budgets.long())
        if table.padding is not None:
            # A row that fits its budget reads all it has, as it does alone.
            budget = most if budgets is None else budgets.long()
            count = torch.where(table.real_tokens().flatten() <= budget, most, count)
        best = scores.topk(most, dim=-1)
        wanted = (torch.arange(most, device=scores.device) < count.view(-1, 1, 1)) & (best.values > float("-inf"))
        return torch.where(wanted, best.indices, -1).int()


def gram_of(table: SlotTable, queries: Tensor) -> Tensor:  # [B, H, D, D] float32
    """The sum of q q^T over the queries [B, Hq, n, D] of the newest tokens; left padding does not count."""
    q = queries.float().unflatten(1, (table.shape[1], -1))  # [B, H, G, n, D]
    if table.padding is not None:
        token = torch.arange(table.seen - q.shape[3], table.seen, device=q.device)
        q = q.masked_fill(left_padding.hides(table.padding, token)[:, None, None, :, None], 0.0)
    q = q.flatten(2, 3)
    return q.mT @ q


def directions(gram: Tensor, keys: Tensor, padding: Tensor | None, ratio: float) -> Tensor:  # [B, H, D, p]
    """The p = ceil(ratio * D) first singular vectors of the queries with this gram, in the dtype of keys [B, H, n, D].

    A head with a nan among its queries or keys gets meaningless directions; other heads are not affected.
    """
    wide = keys.float()
    if padding is not None:
        hidden = left_padding.hides(padding, torch.arange(keys.shape[2], device=keys.device))
        wide = wide.masked_fill(hidden[:, None, :, None], 0.0)
    other = wide.mT @ wide
    traces = [g.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-20)[..., None, None] for g in (gram, other)]
    # Fewer queries than channels leave directions undecided; there the keys decide.
    both = gram / traces[0] + 1e-4 * other / traces[1]
    sound = both.isfinite().flatten(2).all(2)[..., None, None]
    vectors = torch.linalg.eigh(torch.where(sound, both, 0.0)).eigenvectors
    return vectors[..., -math.ceil(ratio * keys.shape[-1]) :].to(keys.dtype)
