"""Queries as they would be at later positions: what a virtual repetition of a text asks.

    q_i' = q_i rotated by the positions of its chunk:   q[c] + i q[c + half]  times  exp(i positions angle_c),  c < half

Channels from 2 half on are not rotary and stay. Angles are whole numbers of turns, as in `rotate_keys`.
Legend: B batch rows, Hq query heads, P chunks of C tokens, D head size.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.rotate_keys import angles_of, check_turns


def rotate_queries(q: Tensor, positions: Tensor, turns: Tensor) -> Tensor:
    """Queries [B, Hq, P C, D], each chunk moved `positions` [B, P] int64 further, rounded once to their dtype.

    turns [half] int64: the angle of one position in channels c and c + half (`rotate_keys.whole_turns`).
    """
    if positions.dim() != 2 or len(positions) != len(q) or q.shape[2] % positions.shape[1]:
        raise ValueError(
            f"positions must be [B, P] for P equal chunks of q [B, Hq, n, D], got {list(positions.shape)} for "
            f"{list(q.shape)}."
        )
    check_turns(turns, q.shape[3])
    return rotate_by(q, *angles_of(positions, turns, q.dtype))


def rotate_by(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [B, Hq, P C, D] rotated by angles that several calls share; keys are rotated alike."""
    return implementation("rotate_queries", q.device, q).rotate_queries(q, cos, sin)
