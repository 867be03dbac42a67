"""Queries that wait, in Triton: one launch, of one program per query that stays."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import LARGEST_STEP, STEP_DTYPE
from kvsketch.ops.codec.kernel import levels_and_steps, store_codes, supported
from kvsketch.ops.common.device import on
from kvsketch.ops.common.tensors import dense_last
from kvsketch.ops.keep_queries import codec_of

__all__ = ["keep_queries", "supported"]


def keep_queries(
    held: Tensor, q: Tensor, at: Tensor, heads: int, pages: Tensor | None, counts: Tensor | None = None
) -> None:
    """See `kvsketch.ops.keep_queries`."""
    (batch, query_heads, count, size), kept = q.shape, held.shape[1] // heads
    codec, q, steps = codec_of(size), dense_last(q), held.view(STEP_DTYPE)
    if not q.numel():
        return
    # Encoding is a chain of short steps: programs of one warp never wait for other warps.
    with on(q.device):
        keep_queries_kernel[(count, batch * heads * kept)](
            q, held, steps, codec.signs(q.device), at, pages, counts,
            heads, kept, query_heads // heads, count, held.shape[2], size, 0 if at.numel() == 1 else at.stride(0),
            codec.unit, codec.norm, LARGEST_STEP, *q.stride()[:3], *held.stride()[:3], *steps.stride()[:3],
            BITS=codec.bits, D=codec.size, num_warps=1 if codec.size <= 128 else 4,
        )  # fmt: skip


# How many rows there are, and where their numbers lie, differs from step to step; rows of `held` are never aligned.
@triton.jit(
    do_not_specialize=["count", "room", "at_b", "held_b", "held_k", "held_n", "step_b", "step_k", "step_n"],
    do_not_specialize_on_alignment=["held_ptr", "step_ptr", "at_ptr", "page_ptr", "count_ptr"],
)
def keep_queries_kernel(
    q_ptr, held_ptr, step_ptr, sign_ptr, at_ptr, page_ptr, count_ptr, heads, kept, group, count, room, size, at_b,
    unit, norm, largest_step, q_b, q_h, q_n, held_b, held_k, held_n, step_b, step_k, step_n,
    BITS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The query number `i` that stays of one token, batch row and KV head."""
    number, k = tl.program_id(0), tl.program_id(1) % (heads * kept)
    b = (tl.program_id(1) // (heads * kept)).to(tl.int64)
    if count_ptr is not None:
        count = tl.load(count_ptr + b).to(tl.int32)
        if number >= count:
            return
    token = tl.maximum(tl.minimum(tl.load(at_ptr + b * at_b), room - count), 0) + number
    member = (token * kept + k % kept) % group
    column = tl.arange(0, D)
    source = q_ptr + b * q_b + (k // kept * group + member) * q_h + number * q_n
    x = tl.load(source + column[None, :], mask=(column < size)[None, :], other=0.0).to(tl.float32)
    levels, step = levels_and_steps(x, 0.0, tl.load(sign_ptr + column), unit, norm, largest_step, BITS, D, 1)
    row = b
    if page_ptr is not None:
        row = tl.load(page_ptr + b)
    one = tl.zeros((1,), tl.int64)
    tl.store(step_ptr + row * step_b + k * step_k + token * step_n + D * BITS // 16 + one, step.to(tl.float16))
    codes = held_ptr + row * held_b + k * held_k + token * held_n
    store_codes(codes + one[:, None], levels, one == 0, BITS, D, 1)
