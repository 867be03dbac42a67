"""Reservoirs: slots that each hold one random token of a stream, with the right distribution after every token.

Token i fires in slot j when a 32-bit draw for (state, position of i, j) lies below its threshold; a slot holds the last
token that fired in it. With threshold 2^32 w_i / (w_1 + ... + w_i) a slot holds token i with probability w_i over the
total of all weights, whatever the length of the stream, and slots are independent. A stream split into blocks gives the
same slots. 32 bits, not the 23 of a float32: the probability of a late token is one over the length of the stream.

Legend: B batch rows, H KV heads, n tokens in stream order, S slots of a reservoir, C reservoirs per head.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation

CERTAIN = 1 << 32  # the threshold below which every draw lies


def reservoir(
    state: Tensor, positions: Tensor, threshold: Tensor, slots: int, labels: Tensor | None = None, reservoirs: int = 1
) -> Tensor:
    """The last token that fired in each slot, [B, H, reservoirs, slots] int64, -1 where none did.

    state [B, H] int64, a hash state (`ops.random`); positions [B, n] of the tokens; threshold [B, H, n] int64: a token
    fires in a slot when its draw in [0, 2^32) lies below; labels [B, H, n]: the reservoir of each token, any for tokens
    whose threshold is 0; None: one reservoir for all.
    """
    return implementation("reservoir", state.device).reservoir(state, positions, threshold, slots, labels, reservoirs)
