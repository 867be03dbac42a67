"""BalanceKV: halve the tokens so that both halves attend alike, and keep one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.balancekv import blocks as balance_blocks
from kvsketch.methods.balancekv import schedule as row_schedule
from kvsketch.methods.balancekv import stream as balance_stream
from kvsketch.methods.balancekv.merge_reduce import theory_c
from kvsketch.methods.balancekv.schedule import Balanced, Recipe, RowPlan
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.parameters import SEED, option
from kvsketch.ops.balance_walk import WALKS
from kvsketch.slots import in_place
from kvsketch.slots import padding as left_padding
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.table import SlotTable

DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class BalanceKV(BudgetedMethod):
    """Splits the tokens into two halves with almost equal attention sums and keeps one, with twice the weight.

    The balancing walk (ops.balance_walk) gives the tokens of a block signs with sum_+ exp(s) v ~ sum_- exp(s) v for
    every query; the difference does not grow with the block, where a random half errs by its square root.

    form=block, the practical algorithm: runs of neighbours are halved in blocks of `block` tokens, keys relative to the
    block's mean, until the budget holds; the last halving takes only as many of the oldest tokens as needed. A kept
    token weighs 2^l in both sums; den_weight=pow2 counts every halving in the denominator but in the numerator only
    those that doubled the token. select=weighted doubles what it keeps up to where half of the run is dropped,
    select=strict all of it. A common factor near 1 gives the kept the weight of the whole run, so that the weights of
    a row sum to the tokens it has seen. rounds=T halves everything T times, as published.
    form=stream, the theorem's algorithm within the budget: MergeAndReduce (merge_reduce.py) for each bucket of value
    norms, and over the keys alone for the denominator. A halving keeps just half of a batch. The two sums are kept
    within a factor `rho` of each other (none: as published), since a heavy key may be in one only. form=paper, as
    published: batches of `block` tokens, of which the smaller class stays; its memory grows with the logarithm of the
    context, whatever the budget.

    Guarantee (stream, paper, c=theory): |out - exact| <= eps |softmax|_2 |V|_F with sets of O*(exp(2 scale r^2) / eps)
    tokens; independent samples need 1 / eps^2. The block form has none: one sample serves both sums.

    Papers: Han et al., arXiv 2502.07861, and its NeurIPS 2025 version, whose code has the weighted selection.
    Differs from the authors' code: the same weights in both sums, as in Algorithm 1 (their code has den_weight=pow2 for
    LongBench); each halving conserves the sum of the weights; places without a token are masked, not zeros; the Gram
    matrix is normalised, which neither overflows nor underflows, and float32; the first sign is a fair coin; any budget
    is met, not only powers of two; generated tokens are compressed too; no needle detection. Differs from the paper's
    listings: buckets are 2^i <= |v| < 2^(i+1), negligible ones go at eps / (2n), and line 6 of MergeAndReduce tests j.
    """

    name: ClassVar[str] = "balancekv"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2502.07861"
    look: ClassVar[tuple[str, ...]] = ("#a86200", "^")
    random: ClassVar[bool] = True
    State: ClassVar[type[Balanced]] = Balanced
    sinks: int = option(DEFAULT_WINDOW, "first tokens that stay exact; left at 32, at most an eighth of the budget")
    recent: Size | int | str = option(
        DEFAULT_WINDOW, "last tokens that stay exact; left at 32, at most an eighth of the budget"
    )
    seed: int = option(0, SEED)
    form: str = option(
        "block",
        "block halves runs of tokens; stream is the theorem's algorithm within the budget, paper without one",
        ("block", "stream", "paper"),
    )
    block: int = option(256, "tokens of one walk (form=block) or of one batch (form=paper)")
    rounds: int | None = option(None, "form=block: number of halvings, as published, or fail; none: as many as needed")
    walk: str = option("auto", "how signs are chosen; auto: greedy for blocks, random for streams", ("auto", *WALKS))
    c: float | str = option(1.0, "how far the random walk may drift, in its largest term; theory: 30 ln(n / delta)")
    temp: float = option(
        1.0, "balances exp(temp s); best is the ratio of query norm to key norm, 0.1 in the authors' notebook"
    )
    center: bool = option(True, "keys relative to the mean of their block")
    select: str = option(
        "weighted",
        "weighted doubles kept tokens until half is dropped; strict doubles one whole half",
        ("weighted", "strict"),
    )
    den_weight: str = option(
        "same", "weight in the denominator: as in the numerator, or 2 for every halving", ("same", "pow2")
    )
    count_term: float = option(
        0.025, "added to inner products of values, so that counts are balanced as well as values"
    )
    rho: float | None = option(4.0, "streams: the two sums stay within this factor of each other; none: as published")
    epsilon: float = option(0.1, "streams: the error at which a bucket of value norms is negligible")
    delta: float = option(0.01, "streams: the failure probability of c=theory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("block", least=2, unit="tokens")
        halvings = self.rounds is None or (self.rounds >= 0 and self.form == "block")
        self._require("rounds", halvings, "none, or with form=block a number of halvings, 0 or more")
        theory = self.c == "theory" and self.form != "block"
        ok = theory if isinstance(self.c, str) else self.c > 0
        self._require("c", ok, "a positive number or, unless form=block, theory")
        for name in ("temp", "epsilon", "delta"):
            self._require(name, getattr(self, name) > 0, "a positive number")
        self._require("count_term", self.count_term >= 0, "a number, 0 or more")
        self._require("rho", self.rho is None or self.rho >= 1, "none or a number of 1 or more")

    @property
    def declared(self) -> Capabilities:
        grows = self.form == "paper"
        bounded = no("with form=paper its tables grow with the text; use form=stream") if grows else SUPPORTED
        return replace(super().declared, batched=bounded, memory=bounded)

    @property
    def clip(self) -> float | None:
        return None if self.form == "block" or self.rho is None else math.log(self.rho)

    @property
    def tied(self) -> bool:
        """Whether numerator and denominator have the same weights."""
        return self.form == "block" and (self.select == "strict" or self.den_weight == "same")

    @property
    def recipe(self) -> Recipe:
        """The parameters as the algorithms take them."""
        automatic = "greedy" if self.form == "block" else "random"
        longest = self.block if self.form == "paper" else balance_stream.LARGEST_BATCH
        return Recipe(
            self.form, self.block, self.rounds,
            walk=automatic if self.walk == "auto" else self.walk,
            c=theory_c(longest, self.delta) if self.c == "theory" else float(self.c),
            temp=self.temp, center=self.center, select=self.select, den_weight=self.den_weight, tied=self.tied,
            count_term=self.count_term, epsilon=self.epsilon,
            on_fail="raise" if self.c == "theory" else "clip",
            seed=self.seed,
        )  # fmt: skip

    def stored_bytes(self, shape: LayerShape) -> int | None:
        if self.form == "paper":
            return None
        streams, budget = self.form == "stream", self.budget_tokens(shape.table)
        # Bucket and rank of each slot; arrivals, batch sizes and norms of each head.
        held = shape.bounded(budget + 1, 5 if streams else 0, two_sums=not self.tied)
        if shape.tokens <= budget:
            held = max(held, shape.everything()) + (shape.all_heads * shape.vector() * (budget // 3) if streams else 0)
        rows = shape.batch * 8 * (4 + 5 + 2)  # schedule, limits, capacity
        return held + rows + (shape.all_heads * (4 * (row_schedule.ZERO_VALUE + 1) + 16) if streams else 0)

    def exact_tokens(self, budget: int) -> tuple[int, int]:
        sinks, recent = super().exact_tokens(budget)
        return _within(sinks, budget), _within(recent, budget)

    def rows(self, table: SlotTable) -> list[RowPlan]:
        """What each row of the table may hold."""
        rows = []
        for pad in left_padding.of_rows(table.padding, table.shape[0]):
            tokens = self.budget_size.of(max(1, table.prompt_tokens - pad))
            sinks, recent = self.exact_tokens(tokens)
            first = min(sinks, tokens - 1)
            last = min(recent, tokens - first)
            freed = max(1, min(self.block // 2, (tokens - first - last) // 16))
            rows.append(RowPlan(table.seen - pad, tokens, first, last, freed))
        return rows

    def maintenance_due(self, table: SlotTable) -> bool:
        return not table.exact and row_schedule.due(table, ahead=1)

    def bound(self, table: SlotTable, max_length: int) -> None:
        if self.form == "block":
            balance_blocks.bound(self.recipe, table, self.rows(table))
        elif self.form == "stream":
            balance_stream.compress(self.recipe, table, self.rows(table), None)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if row_schedule.in_place(table):
            if row_schedule.due(table):
                if self.form == "block":
                    balance_blocks.make_room(self.recipe, table)
                elif self.form == "stream":
                    balance_stream.make_room(self.recipe, table, queries)
                else:
                    balance_stream.compress(self.recipe, table, self.rows(table), queries)
            # Names an empty slot as the next to be written: some slot is, and empty slots rank lowest.
            in_place.free_lowest(table, None, 0, 0)
            return
        rows = self.rows(table)
        over = [row.seen > row.budget for row in rows]
        if self.form == "paper":
            over = [row.seen - row.sinks - row.recent >= self.block for row in rows]
        if table.exact and not any(over):
            return
        if self.form == "block":
            balance_blocks.compress(self.recipe, table, rows)
        else:
            balance_stream.compress(self.recipe, table, rows, queries)


def _within(size: int, budget: int) -> int:
    """A size that was left at its default shrinks to an eighth of a small budget; any other stays."""
    return min(size, budget // 8) if size == DEFAULT_WINDOW else size
