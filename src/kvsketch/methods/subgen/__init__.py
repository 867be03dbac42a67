"""SubGen / ClusterGen, Algorithm 1: samples of values for the numerator, clusters of keys for the denominator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.parameters import SEED, Removed, option
from kvsketch.methods.subgen import slots
from kvsketch.methods.subgen.sketch import POLICIES
from kvsketch.ops.fold_token import Plan
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.table import SlotTable

NORMALIZERS = ("paper", "self", "clipped")
SAMPLES_PER_CLUSTER = 16
SAMPLINGS = ("norms", "mixed")


@dataclass(frozen=True)
class SubGen(BudgetedMethod):
    """Samples tokens by the squared norm of their values; their weights, or clusters of keys, give the denominator.

        z   = sum over s pairs (k, v) drawn with probability p = |v|^2 / mu of  1 / (s p) exp(scale <q, k>) v
        tau = sum over the same pairs of  1 / (s p) exp(scale <q, k>)                                  normalizer=self
        tau = sum over clusters i, and t keys k drawn uniformly from its n_i members, of  n_i / t exp(scale <q, k>)
        out = z / tau

    Each sum is unbiased; sinks and recent window are exact and in both, and a token enters Algorithm 1 when it leaves
    the window. `normalizer=clipped` and `paper` are the paper's two sums: a key farther than delta from all
    representatives opens a cluster, others join the nearest, and budget = sinks + recent + s + clusters (t + 1), half
    of what the exact tokens leave for each sum. `self`, the default, has no clusters and gives all of it to s.

    `sampling=mixed` is ours: every second sample is drawn uniformly and all weigh by p = (|v|^2 / mu + 1 / n) / 2 (the
    balance heuristic of Veach and Guibas). No weight then exceeds 2 n / s, while by norms alone a heavy key with a
    small value is rarely drawn and weighs much. Zero values count in tau.

    Paper: Zandieh, Han, Mirrokni, Karbasi, SubGen (arXiv 2402.06082), later named ClusterGen. With t of order
    eps^-2 e^(2 delta r scale) log n and s of order eps^-2 d the error is at most eps |softmax| |V|_op for |q| <= r.
    Their experiments run another algorithm: see the method kcenter. No code of theirs is public; the paper leaves open:
    - delta: here the radius at which greedy k-center covers the prompt's middle keys with `clusters` centres.
    - capacity: `policy=absorb` lets far keys join the nearest cluster once there is no room, `double` doubles delta and
      merges clusters, `grow` is the paper's unbounded form, whose clusters exceed the budget. With the last two every
      step synchronises with the GPU.
    - normalizer: z / tau can be scaled arbitrarily when a heavy key is in one sum only. `clipped` bounds the ratio of
      the sums to [1 / rho, rho], `self` keeps the output among the values, `paper` does neither.
    - scale: the paper omits 1 / sqrt(d). Samples follow |v|^2, as in its proof; its text says |k|^2.
    """

    name: ClassVar[str] = "subgen"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2402.06082"
    look: ClassVar[tuple[str, ...]] = ("#c0432b", "o")
    random: ClassVar[bool] = True
    State: ClassVar[type[slots.Structure]] = slots.Structure
    recent: Size | int | str = "25%"
    seed: int = option(0, SEED)
    s: int | None = option(None, "samples; none: what sinks and window leave, half of it where there are clusters")
    t: int | None = option(None, "keys sampled from each cluster; none: 16, fewer in small budgets")
    clusters: int | None = option(None, "clusters of keys; none: as many as the budget leaves room for")
    delta: float | None = option(
        None, "radius of a cluster; none: the radius at which `clusters` centres cover the prompt"
    )
    policy: str = option(
        "absorb",
        "a far key without room for a cluster: grow anyway, absorb it into the nearest, or double delta",
        POLICIES,
    )
    normalizer: str = option(
        "self", "denominator: the samples' own weights, or clusters, plain or clipped", NORMALIZERS
    )
    rho: float = option(1.5, "with normalizer=clipped: the ratio of the two sums stays within [1 / rho, rho]")
    coalesce: bool = option(True, "copies of one sampled token share a slot; the output is the same")
    sampling: str = option("norms", "mixed draws every second sample uniformly, the others by squared norm", SAMPLINGS)
    removed: ClassVar[Mapping[str, Removed]] = {
        **BudgetedMethod.removed, "form": Removed("stream", "the papers' experiments are the method kcenter"),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("s", "t", "clusters"):
            size = getattr(self, name)
            self._require(name, size is None or (isinstance(size, int) and size > 0), "a whole number above 0, or none")
        self._require("delta", self.delta is None or _between(0, self.delta), "a distance of 0 or more, or none")
        self._require("rho", _between(1, self.rho), "a number of 1 or more")
        if self.budget_size.tokens is not None:
            self._require_room(self.budget_size.tokens)

    @property
    def clip(self) -> float | None:
        return math.log(self.rho) if self.normalizer == "clipped" else None

    @property
    def _in_place(self) -> bool:
        """Whether the structure keeps its shape and delta, so that a step needs nothing from the host."""
        return self.policy == "absorb" or self.normalizer == "self"

    @property
    def declared(self) -> Capabilities:
        fixed = SUPPORTED
        if not self._in_place:
            fixed = no(f"with policy={self.policy} and clusters its tables change their shape; use policy=absorb")
        number = SUPPORTED
        if self.budget_size.share is not None:
            number = no("a share of the prompt gives each row another number of samples; use a number, as budget=1024")
        places = no("it holds a token in several slots, whose weights estimate sums over the whole text")
        return replace(super().declared, batched=fixed and number, memory=fixed, cache_positions=places)

    def bound(self, table: SlotTable, max_length: int) -> None:
        if self._in_place:
            self._rewrite(table)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        if not self._in_place:
            return None
        budget = self.budget_tokens(shape.table)
        plan = self.plan(budget)
        exact = plan.sinks + plan.recent + 1 + (plan.hold if shape.tokens <= budget else 0)
        slots = exact + plan.samples + plan.clusters * plan.per_cluster
        # Representatives and their counts, shares and squares of samples, and numbers of each head and row.
        beside = plan.clusters * (shape.vector() + 4) + 8 * plan.samples + 8 + 4 + 8 + 24 + 8
        held = shape.bounded(slots, two_sums=True) + shape.all_heads * beside
        return max(held, shape.everything() if shape.tokens <= budget else 0) + shape.batch * 8 * (13 + 6)

    def maintenance_due(self, table: SlotTable) -> bool:
        return not table.exact and (not self._in_place or table.seen + 1 > min(slots.exact_until(table)))

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if table.exact:
            if table.length > self.budget_tokens(table):
                self._rewrite(table)
            return
        layout = slots.layout_of(table)
        whole = table.length == layout.total and table.seen <= min(slots.exact_until(table))
        if table.in_place and whole and self._in_place:
            ops.fold_token(slots.state_of(table), layout, self.coalesce)
        else:
            self._rewrite(table)

    def health(self, table: SlotTable, queries: Tensor) -> Tensor:  # [B, Hq, n]
        """log of the numerator's weights over the denominator, for each query: near 0 when both sums agree."""
        _, (log_num, log_den) = ops.weighted_attention(
            queries,
            table.key_slots(),
            table.value_slots(),
            *table.log_weights(),
            table.forward.scale,
            return_state=True,
        )
        return log_num - log_den

    def plan(self, budget: int) -> Plan:
        """How a budget divides: budget = sinks + recent + s + clusters (t + 1).

        What does not fit shrinks: window, then sinks, then the rest. `hold` is what remains beside sinks and window.
        """
        least = 1 if self.normalizer == "self" else 3
        if budget < least + 2:
            kept = min(self.sinks, budget - 1)
            return Plan(kept, budget - kept, 0, 0, 0, 0)
        sinks = min(self.sinks, budget - least - 1)
        recent = min(self.recent_size.of(budget), budget - sinks - least)
        rest = budget - sinks - recent
        if self.normalizer == "self":
            return Plan(sinks, recent, rest, min(self.s or rest, rest), 0, 0)
        return Plan(sinks, recent, rest, *self._split(rest))

    def _split(self, rest: int) -> tuple[int, int, int]:
        """(s, clusters, t) within `rest` slots, at least 3.

        A cluster costs its t keys and its representative. Half goes to each sum: the error of the numerator falls with
        s, that of the denominator with clusters times t, and z / tau is as wrong as the worse of the two. t is 16, or
        less where fewer than 17 clusters would be left, so that small budgets still tell keys apart.
        """
        s, clusters, t = self.s, self.clusters, self.t
        den = rest // 2 if s is None else rest - s
        if s is None and t is not None and clusters is not None:
            den = clusters * (t + 1)
        den = max(2, min(den, rest - 1))
        if t is None:
            t = math.isqrt(den) - 1 if clusters is None else den // clusters - 1
            t = max(1, min(t, SAMPLES_PER_CLUSTER))
        t = min(t, den - 1)
        clusters = den // (t + 1) if clusters is None else min(clusters, den // (t + 1))
        room = rest - clusters * (t + 1)
        return min(s or room, room), clusters, t

    def _require_room(self, budget: int) -> None:
        plan = self.plan(budget)
        asked = [(self.sinks, plan.sinks), (self.recent_size.of(budget), plan.recent), (self.s, plan.samples)]
        if self.normalizer != "self":
            asked += [(self.clusters, plan.clusters), (self.t, plan.per_cluster)]
        if any(wanted not in (None, got) for wanted, got in asked):
            raise ValueError(
                f"{self.name}: budget={budget} cannot hold sinks + recent + s + clusters (t + 1) for "
                f"sinks={self.sinks}, recent={self.recent}, s={self.s}, clusters={self.clusters}, t={self.t}; "
                "use a larger budget or smaller sizes"
            )

    def _rewrite(self, table: SlotTable) -> None:
        """Brings a table into form that is exact, or too long, or holds a row that outgrew its budget."""
        total = self.row_budget(table).total
        budgets = total.flatten().tolist() if isinstance(total, Tensor) else [total] * table.shape[0]
        plans = [self.plan(budget) for budget in budgets]
        seed, mixed = self.seed + table.context.seed, self.sampling == "mixed"
        slots.rewrite(table, budgets, plans, self.policy, self.delta, self.coalesce, seed, mixed)


def _between(least: float, value: object) -> bool:
    return isinstance(value, (int, float)) and least <= value < math.inf
