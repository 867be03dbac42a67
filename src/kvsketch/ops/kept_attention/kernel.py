"""Attention to kept slots on a GPU: a program takes a tile of queries of one problem.

It reads all slots for the sums and the outputs, then the kept keys again for A. Terms are taken relative to the largest
of the first tile, so that nothing is rescaled; where others are larger by more than LIMIT allows, which is rare, the
program begins again with a running maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import LOG2E, NEG_INF, described_rows, dot, load_rows
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.sums import LIMIT, add_terms, finite_or_zero
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, aligned, block_size, contiguous
from kvsketch.ops.kept_attention import Kept


class KeptLaunch(NamedTuple):
    """Tile sizes and resources; every choice gives the same result up to rounding."""

    queries: int
    slots: int
    warps: int
    stages: int


def supported(q: Tensor, v: Tensor) -> bool:
    """True when the kernel serves this call."""
    sizes = (*q.shape, *v.shape)
    return q.dtype in KERNEL_DTYPES and max(q.shape[2], v.shape[2]) <= MAX_HEAD_SIZE and min(sizes) > 0


def launch_for(q: Tensor, v: Tensor) -> KeptLaunch:
    """The launch sizes: as much of a tile as shared memory and registers hold."""
    small = max(block_size(q.shape[2]), block_size(v.shape[2])) <= 128
    roomy = device_traits(q.device).shared_bytes > 170 * 1024
    if q.dtype == torch.float32 or not roomy:
        return KeptLaunch(64, 32, 4 if small else 8, 2 if small or roomy else 1)
    return KeptLaunch(64, 64, 4, 3) if small else KeptLaunch(64, 64, 8, 2)


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None, held: Tensor | None,
    elsewhere: Tensor | None, launch: KeptLaunch | None = None,
) -> Kept:  # fmt: skip
    """See `kvsketch.ops.kept_attention`; `launch` overrides the launch sizes."""
    count, queries, size = q.shape
    slots, value_size = v.shape[1:]
    half = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    a = torch.empty((count, queries, kept.shape[1]), dtype=half, device=q.device)
    out = torch.empty((count, queries, value_size), dtype=torch.float32, device=q.device)
    share = torch.empty((count, queries), dtype=torch.float32, device=q.device)
    if hidden is not None:
        kept = torch.where(hidden.gather(1, kept.clamp_min(0)), -1, kept)
    if held is None:
        rows = kept.clamp_min(0) + torch.arange(count, device=q.device).unsqueeze(1) * slots
        held = k.flatten(0, 1).index_select(0, rows.flatten()).view(*kept.shape, size)
    launch = launch or launch_for(q, v)
    tiles = [(q, launch.queries), (k, launch.slots), (v.to(half), launch.slots), (held, launch.slots)]
    with on(q.device):
        kept_kernel[(cdiv(queries, launch.queries), count)](
            *(described_rows(aligned(tensor.unsqueeze(1)), tile) for tensor, tile in tiles), kept,
            contiguous(hidden), contiguous(elsewhere), a, out, share, scale * LOG2E.value, queries, slots,
            kept.shape[1], *kept.stride(), DV=value_size, BLOCK_D=block_size(size), BLOCK_DV=block_size(value_size),
            BLOCK_M=launch.queries, BLOCK_N=launch.slots, HIDDEN=hidden is not None, ELSEWHERE=elsewhere is not None,
            PRECISION="ieee" if torch.version.hip else "tf32x3", num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return Kept(a, out, share)


@triton.jit
def slot_logits(
    q, k_rows, hidden_ptr, n, first, scale, slots, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HIDDEN: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of slots in base 2; -inf for slots that are not there. WHOLE: all are, but for hidden ones."""
    k = load_rows(k_rows, n, 0, first, BLOCK_N, BLOCK_D)
    x = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32), PRECISION) * scale
    slot = first + tl.arange(0, BLOCK_N)
    if HIDDEN:
        away = tl.load(hidden_ptr + n.to(tl.int64) * slots + slot, mask=slot < slots, other=1)
        x += tl.where(away != 0, NEG_INF, 0.0)[None, :]
    elif not WHOLE:
        x += tl.where(slot < slots, 0.0, NEG_INF)[None, :]
    return x


@triton.jit(do_not_specialize=["queries", "slots", "kept_n"])
def kept_kernel(
    q_rows, k_rows, v_rows, chosen_rows, kept_ptr, hidden_ptr, elsewhere_ptr, a_ptr, out_ptr, share_ptr,
    scale, queries, slots, count,
    kept_n, kept_s, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HIDDEN: tl.constexpr, ELSEWHERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes a [N, Q, K], out [N, Q, Dv] and share [N, Q]; `scale` in base 2."""
    start, n = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    row = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_rows, n, 0, start, BLOCK_M, BLOCK_D)
    x = slot_logits(q, k_rows, hidden_ptr, n, 0, scale, slots, BLOCK_D, BLOCK_N, HIDDEN, False, PRECISION)
    origin = finite_or_zero(tl.max(x, 1))
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    whole = slots // BLOCK_N * BLOCK_N
    for first in range(0, whole, BLOCK_N):
        x = slot_logits(q, k_rows, hidden_ptr, n, first, scale, slots, BLOCK_D, BLOCK_N, HIDDEN, True, PRECISION)
        v = load_rows(v_rows, n, 0, first, BLOCK_N, BLOCK_DV)
        terms = tl.exp2(x - origin[:, None])
        total += tl.sum(terms, 1)
        acc = dot(terms.to(v.dtype), v, acc, PRECISION)
    if whole < slots:
        x = slot_logits(q, k_rows, hidden_ptr, n, whole, scale, slots, BLOCK_D, BLOCK_N, HIDDEN, False, PRECISION)
        v = load_rows(v_rows, n, 0, whole, BLOCK_N, BLOCK_DV)
        terms = tl.exp2(x - origin[:, None])
        total += tl.sum(terms, 1)
        acc = dot(terms.to(v.dtype), v, acc, PRECISION)
    if tl.max(total, 0) > LIMIT:
        origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        for first in range(0, slots, BLOCK_N):
            x = slot_logits(q, k_rows, hidden_ptr, n, first, scale, slots, BLOCK_D, BLOCK_N, HIDDEN, False, PRECISION)
            v = load_rows(v_rows, n, 0, first, BLOCK_N, BLOCK_DV)
            origin, total, terms, shrink = add_terms(origin, total, x)
            acc = dot(terms.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    column = tl.arange(0, BLOCK_DV)
    place = (n.to(tl.int64) * queries + row)[:, None]
    inside = (row < queries)[:, None]
    tl.store(out_ptr + place * DV + column[None, :], acc / total[:, None], mask=inside & (column < DV)[None, :])
    log_total = origin + tl.log2(total)
    share = tl.full((BLOCK_M,), 1.0, tl.float32)
    if ELSEWHERE:
        beside = tl.load(elsewhere_ptr + n.to(tl.int64) * queries + row, mask=row < queries, other=0.0) * LOG2E
        share = 1.0 / (1.0 + tl.exp2(beside - log_total))
        log_total = tl.maximum(log_total, beside) + tl.log2(1.0 + tl.exp2(-tl.abs(log_total - beside)))
    tl.store(share_ptr + n.to(tl.int64) * queries + row, share, mask=row < queries)
    for first in range(0, count, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        taken = tl.load(kept_ptr + n.to(tl.int64) * kept_n + slot * kept_s, mask=slot < count, other=-1) >= 0
        k = load_rows(chosen_rows, n, 0, first, BLOCK_N, BLOCK_D)
        x = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION) * scale - log_total[:, None]
        a = tl.where(taken[None, :], tl.exp2(x), 0.0).to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + place * count + slot[None, :], a, mask=inside & (slot < count)[None, :])
