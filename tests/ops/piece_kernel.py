"""A kernel around `piece_and_head`, for its tests: Triton reads the globals of a module."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.indexed_attention.kernel import piece_and_head


@triton.jit
def count_kernel(counts_ptr, pieces):
    """Counts the programs of each piece of each head."""
    piece, head = piece_and_head(pieces)
    tl.atomic_add(counts_ptr + head * pieces + piece, 1)
