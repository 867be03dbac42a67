"""One token of a stream folded into SubGen's structure, in place: the decode step of the method `subgen`.

The slots of one head form five sections:

    sinks | ring | hold | samples | clusters x per_cluster

Sinks, ring (the recent window and one place for the next token) and hold carry exact tokens, samples the (key, value)
pairs of the numerator, the clusters' slots the keys of the denominator. Rows of a batch may use only a part of each
section: `plan` says how much. `hold` is for rows that still fit their budget while others no longer do.

Each sample is drawn with probability |v|^2 / mu; with `State.folded` those with an even number are, and those with an
odd number uniformly. A sample then weighs 1 / (a |v|^2 / mu + b / n) for a even and b odd samples of n tokens (the
balance heuristic of Veach and Guibas, 1995), which is unbiased and at most n / b.

Legend: B batch rows, H KV heads, K key slots, V value slots, s samples, m clusters, t slots per cluster, D key size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.dispatch import implementation

NUMERATOR, DENOMINATOR, MERGE = 0, 1, 2  # streams of random draws


class Layout(NamedTuple):
    """How many slots each section has; the same for all rows and heads."""

    sinks: int
    ring: int
    hold: int
    samples: int
    clusters: int
    per_cluster: int

    @property
    def exact(self) -> int:
        """Slots of exact tokens."""
        return self.sinks + self.ring + self.hold

    @property
    def valued(self) -> int:
        """Slots with a value."""
        return self.exact + self.samples

    @property
    def total(self) -> int:
        return self.valued + self.clusters * self.per_cluster


class Plan(NamedTuple):
    """How much of the layout a row uses."""

    sinks: int
    recent: int
    hold: int
    samples: int
    clusters: int
    per_cluster: int


@dataclass(frozen=True)
class State:
    """Everything a step reads and writes."""

    keys: Tensor | CodedSlots  # [B, H, K, D]
    values: Tensor | CodedSlots  # [B, H, V, Dv]
    index: Tensor  # [B, H, K] int32, -1 empty
    log_num: Tensor | None  # [B, H, K] fp32; None: the numerator's weights serve both sums and lie in log_den
    log_den: Tensor  # [B, H, K] fp32
    next_slot: Tensor  # [B, H, 1] int64
    clock: Tensor  # [1] int64, tokens seen
    padding: Tensor | None  # [B] int64
    plan: Tensor  # [B, 6] int64, the fields of Plan
    representatives: Tensor  # [B, H, m, D]
    counts: Tensor  # [B, H, m] int32
    delta: Tensor  # [B, H] fp32
    mu: Tensor  # [B, H] fp64, sum of the squared norms of the values folded so far
    shares: Tensor  # [B, H, s] fp32, log(copies) - log|v|^2; -inf for an empty slot and a copy counted elsewhere
    streams: Tensor  # [B, H, 3] int64, hash states of the draws
    # Samples with an odd number are drawn uniformly where these two are given; shares are then log(copies).
    squares: Tensor | None = None  # [B, H, s] fp32, |v|^2 of each sample
    folded: Tensor | None = None  # [B, H] int64, tokens folded so far


def fold_token(state: State, layout: Layout, coalesce: bool) -> None:
    """Folds the token that leaves each row's window into SubGen's structure, in place, and frees its slot for the next.

    The numerator's samples take it with probability |v|^2 / mu each; it opens a cluster or joins the nearest, whose
    slots take it with probability 1 / n each; the weights of all samples follow. With `coalesce` the first of several
    copies of a token carries the weight of all. Draws depend only on (streams, position, slot).

    Of quantised keys and values the codes are copied, and norms and distances are those of the decoded vectors.
    """
    implementation("fold_token", state.index.device, state).fold_token(state, layout, coalesce)
