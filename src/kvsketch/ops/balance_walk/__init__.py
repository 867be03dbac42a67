"""The balancing walk of BalanceKV: signs that split each block of tokens into two halves of almost equal sums.

For the tokens j = 1..b of a block, in order, with the kernel of softmax attention on their keys and values:

    y_j = sum_{l<j} sign_l g_jl,    g_jl = exp(temp scale <k_j, k_l>) (<v_j, v_l> + constant) / R^2
    greedy: sign_j = -1 if y_j > 0, +1 if y_j < 0, a fair coin if it is zero
    random: sign_j = +1 with probability 1/2 - y_j / (2 c), cut to [0, 1]

R^2 = exp(temp scale max |k|^2) (max |v|^2 + constant) makes |g| <= 1 by Cauchy-Schwarz; it is divided out inside the
exponent, so that nothing overflows, and c has no dimension. Greedy is the walk with c -> 0; a positive factor per token
j changes none of its signs, so there each row j is divided by its own largest exp(temp scale <k_j, k_l>), l < j: with
R^2 whole rows of long keys would underflow. Then for every query q

    sum_{+} exp(scale <q, k>) v  ~  sum_{-} exp(scale <q, k>) v

up to an error that does not grow with b, where random signs give sqrt(b). `center` subtracts the mean key of the block
from every key: both sides of the relation then change by the same factor. `constant` is one more value coordinate, the
same for all tokens: it balances the counts as well as the values. Without values <v, v> is 1, which balances the
softmax denominator.

Legend: B batch rows, H KV heads, S slots, D key size, Dv value size, N blocks, b tokens per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_choice
from kvsketch.ops.common.dispatch import implementation

WALKS = ("greedy", "random")
FAILURES = ("clip", "raise")
# A sum below this share of the sum of its absolute terms is rounding, and counts as zero.
TIE = 1e-6


class Walked(NamedTuple):
    """The signs and, for walks that may fail, where one did."""

    signs: Tensor  # [B, H, N, b] int8: +1, -1, and 0 where there is no token
    failed: Tensor  # [B, H, N] bool: some |y_j| was larger than c


def balance_walk(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    scale: float,
    *,
    weights: Tensor | None = None,
    state: int = 0,
    first_head: int = 0,
    ids: Tensor | None = None,
    walk: str = "greedy",
    c: float = 1.0,
    temp: float = 1.0,
    center: bool = True,
    constant: float = 0.0,
    on_fail: str = "clip",
) -> Tensor:
    """Signs that split each block of tokens into two halves with almost the same attention sums, [B, H, N, b] int8.

        y_j = sum_{l<j} sign_l g_jl,    g_jl = exp(temp scale <k_j, k_l>) (<v_j, v_l> + constant) / R^2,    |g| <= 1

    k [B, H, S, D]; v [B, H, at least the slots named, Dv], None: <v, v> is 1; slots [B, H, N, b] int64: the tokens of
    each block in order, -1 for none, which gets sign 0; weights [B, H, S] multiply the values.
    walk: greedy takes the sign against y_j, random takes +1 with probability 1/2 - y_j / (2 c), cut to [0, 1].
    center: keys relative to the mean key of their block. on_fail: what |y_j| > c does, clip or raise RuntimeError.
    state, ids [B, H, N] int64 (default: the block's number): where draws come from; the draw of a token is the
    random state continued by head, id (all 64 bits) and place in the block. Heads count from first_head.
    """
    call = Arguments(k, v, slots, scale * temp, weights, state, first_head, ids, walk, c, center, constant)
    call.check(on_fail)
    walked: Walked = implementation("balance_walk", k.device, call).balance_walk(call)
    if on_fail == "raise" and bool(walked.failed.any()):
        count = int(walked.failed.sum())
        raise RuntimeError(
            f"the balancing walk failed on {count} of {walked.failed.numel()} blocks: a partial sum exceeded c={c:g}; "
            "use a larger c, another seed, or on_fail='clip'."
        )
    return walked.signs


class Arguments(NamedTuple):
    """One call, as `balance_walk` describes it."""

    k: Tensor
    v: Tensor | None
    slots: Tensor
    exponent: float  # temp * scale
    weights: Tensor | None = None
    state: int = 0
    first_head: int = 0
    ids: Tensor | None = None
    walk: str = "greedy"
    c: float = 1.0
    center: bool = True
    constant: float = 0.0

    def check(self, on_fail: str) -> None:
        """Raise ValueError when a shape or a choice does not fit."""
        k, v, slots, weights = self.k, self.v, self.slots, self.weights
        check("k", k, ("batch", "heads", "slots", "size"))
        check("v", v, (*k.shape[:2], "slots", "size"))
        check("slots", slots, (*k.shape[:2], "blocks", "tokens"), torch.int64)
        check("weights", weights, k.shape[:3])
        check_choice("walk", self.walk, WALKS)
        check_choice("on_fail", on_fail, FAILURES)
        if not self.c > 0:
            raise ValueError(f"c={self.c} must be positive; smaller is greedier.")
