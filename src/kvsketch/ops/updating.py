"""Operations that write slots: single tokens, samples, balanced halves.

Each goes to its Triton kernel where that serves the call, else to its torch reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsketch.ops import balance_walk as balance_walk_checks
from kvsketch.ops.balance_walk.reference import balance_walk as balance_walk_reference
from kvsketch.ops.common.dispatch import kernel_for
from kvsketch.ops.fold_token import Layout, State
from kvsketch.ops.fold_token import reference as fold_token_reference
from kvsketch.ops.reservoir import reference as reservoir_reference
from kvsketch.ops.slot_update import reference as slot_update_reference


def write_token(keys: Tensor, *arguments: Tensor | None) -> None:
    """Writes one token into its slot, in place; see `slot_update.reference.write_token`."""
    with torch.cuda.device_of(keys):
        (kernel_for("slot_update", keys.device) or slot_update_reference).write_token(keys, *arguments)


def free_lowest(scores: Tensor | None, index: Tensor, *arguments: Any) -> None:
    """Frees the lowest-ranked slot of each row and head, in place; see `slot_update.reference.free_lowest`."""
    with torch.cuda.device_of(index):
        (kernel_for("slot_update", index.device) or slot_update_reference).free_lowest(scores, index, *arguments)


def reservoir(
    state: Tensor, positions: Tensor, threshold: Tensor, slots: int, labels: Tensor | None = None, reservoirs: int = 1
) -> Tensor:
    """The last token that fired in each slot, [B, H, reservoirs, slots] int64, -1 where none did.

    state [B, H] int64, a hash state (`ops.random`); positions [B, n] of the tokens; threshold [B, H, n] int64: a token
    fires in a slot when its draw in [0, 2^32) lies below; labels [B, H, n]: the reservoir of each token, any for tokens
    whose threshold is 0; None: one reservoir for all.
    """
    kernel = kernel_for("reservoir", state.device) or reservoir_reference
    return kernel.reservoir(state, positions, threshold, slots, labels, reservoirs)


def fold_token(state: State, layout: Layout, coalesce: bool) -> None:
    """Folds the token that leaves each row's window into SubGen's structure, in place, and frees its slot for the next.

    The numerator's samples take it with probability |v|^2 / mu each; it opens a cluster or joins the nearest, whose
    slots take it with probability 1 / n each; the weights of all samples follow. With `coalesce` the first of several
    copies of a token carries the weight of all. Draws depend on (streams, position, slot) alone.
    """
    kernel = kernel_for("fold_token", state.keys.device)
    if kernel is None or not kernel.supported(state):
        fold_token_reference.fold_token(state, layout, coalesce)
    else:
        kernel.fold_token(state, layout, coalesce)


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
    balance_walk_checks.check_arguments(k, v, slots, weights, walk, c, on_fail)
    run = balance_walk_reference
    kernel = kernel_for("balance_walk", k.device)
    if kernel is not None and kernel.supported(k, v, slots):
        run = kernel.balance_walk
    walked = run(
        k, v, slots, scale,
        weights=weights, state=state, first_head=first_head, ids=ids, walk=walk, c=c, temp=temp, center=center,
        constant=constant,
    )  # fmt: skip
    if on_fail == "raise" and bool(walked.failed.any()):
        count = int(walked.failed.sum())
        raise RuntimeError(
            f"the balancing walk failed on {count} of {walked.failed.numel()} blocks: a partial sum exceeded c={c:g}; "
            "use a larger c, another seed, or on_fail='clip'."
        )
    return walked.signs
