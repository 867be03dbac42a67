"""Attention of new tokens to the slots stored before them: a question behind a document, a later chunk of a prompt, the
next turn of a conversation.

Every query reads every slot of its row, with a running softmax: nothing is held for each query and slot. The result
joins exactly with the causal attention of the new tokens to each other (`ops.join_attention`).

Legend: B rows (requests), Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, S slots, D key
size, Dv value size, T tokens of a block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.checks import check, check_dtypes, check_groups
from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.common.ragged import Ragged
from kvsketch.ops.join_attention import Part
from kvsketch.ops.weighted_attention import Arguments as WeightedArguments

__all__ = ["MOST_PARTIAL_BYTES", "Arguments", "past_attention"]

MOST_PARTIAL_BYTES = 64 << 20  # that a call takes beside its result


def past_attention(
    q: Tensor,
    k: Tensor | CodedSlots,
    v: Tensor | CodedSlots,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    starts: Tensor | None = None,
    longest: int | None = None,
    softcap: float | None = None,
    lengths: Tensor | None = None,
    ragged: Ragged | None = None,
    blocks: Tensor | None = None,
) -> Part:
    """Attention over the weighted slots of each row, for query head h with KV head h // G:

        out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

    q [B, Hq, N, D]. With starts [B + 1] integers q is [1, Hq, N, D], and row b has the queries [starts[b],
      starts[b + 1]) of it; longest: the most queries of a row, None: N. starts is read on the device.
    k [B, H, S, D], v [B, H, S, Dv], log_num, log_den [B, H, S], softcap, lengths [B, H] and ragged as in
      `weighted_attention`. Either of k and v may be quantised (`ops.codec`).
    blocks [B, M] integers: k [P, H, T, D] and v [P, H, T, Dv] are in blocks that rows share; slot s of row b is slot
      s % T of block blocks[b, s // T]. Centers and exact slots are those of rows. lengths are needed then.

    Returns out [B or 1, Hq, N, Dv] in the dtype of q, 0 where a row has no slot, and the logarithm of the denominator
    [B or 1, Hq, N] float32, -inf there. Beside them a call takes a bounded number of bytes, whatever N and S
    (`MOST_PARTIAL_BYTES`).
    """
    call = Arguments(
        q, k, v, log_num, log_den, scale, starts, longest, softcap, lengths, ragged, blocks
    )  # fmt: skip
    call.check()
    result: Part = implementation("past_attention", q.device, call).past_attention(call)
    return result


class Arguments(NamedTuple):
    """One call, as `past_attention` describes it."""

    q: Tensor
    k: Tensor | CodedSlots
    v: Tensor | CodedSlots
    log_num: Tensor | None
    log_den: Tensor | None
    scale: float
    starts: Tensor | None = None
    longest: int | None = None
    softcap: float | None = None
    lengths: Tensor | None = None
    ragged: Ragged | None = None
    blocks: Tensor | None = None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.q) if self.starts is None else len(self.starts) - 1

    @property
    def kv_heads(self) -> int:
        """H."""
        return int(self.k.shape[1] if self.ragged is None else self.ragged.start.shape[1])

    @property
    def most_slots(self) -> int:
        """The most slots that a head can have."""
        if self.ragged is not None:
            return self.ragged.most
        return int(self.k.shape[2]) * (1 if self.blocks is None else self.blocks.shape[1])

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.v.shape[-1] if isinstance(self.v, Tensor) else self.v.codec.size

    @property
    def tied(self) -> bool:
        """Whether numerator and denominator have the same weights."""
        return self.log_num is self.log_den

    def check(self) -> None:
        """Raise ValueError when a shape or dtype does not fit the others."""
        q, starts = self.q, self.starts
        check("q", q, ("batch", "heads", "length", "size"))
        if starts is not None:
            check("q", q, (1, *q.shape[1:]))
            if starts.dim() != 1 or not len(starts) or starts.is_floating_point():
                raise ValueError(f"starts must be [rows + 1] integers, got {starts.dtype} {list(starts.shape)}.")
        if self.longest is not None and not 0 <= self.longest <= q.shape[2]:
            raise ValueError(f"longest={self.longest} must be 0 to {q.shape[2]}, the queries of q.")
        if self.blocks is not None:
            self._check_blocks(self.blocks)
            return
        call = self.weighted()
        call.check()
        if call.sizes.slots != call.sizes.value_slots:
            raise ValueError(
                f"k and v must hold the same slots, got {call.sizes.slots} keys and {call.sizes.value_slots} values; "
                "use chunk_attention for slots that have a key only."
            )

    def weighted(self) -> WeightedArguments:
        """The call whose slots these are; its queries are those of all rows for each row."""
        return WeightedArguments(
            self.q.expand(self.rows, -1, -1, -1), self.k, self.v, self.log_num, self.log_den, self.scale,
            softcap=self.softcap, lengths=self.lengths, ragged=self.ragged,
        )  # fmt: skip

    def _check_blocks(self, blocks: Tensor) -> None:
        q, k, v = self.q, self.k, self.v
        if self.ragged is not None:
            raise ValueError("blocks say where slots lie; ragged heads cannot be given with them.")
        check("blocks", blocks, (self.rows, "blocks of a row"))
        if self.lengths is None:
            raise ValueError("lengths [rows, heads] are needed with blocks: they say where a row ends in its last one.")
        heads, tokens = k.shape[1], k.shape[2]
        for name, part, size in (("k", k, q.shape[3]), ("v", v, self.value_size)):
            if tuple(part.shape[1:]) != (heads, tokens, size):
                raise ValueError(f"{name} must be [blocks, {heads}, {tokens}, {size}], got {[*map(int, part.shape)]}.")
            if isinstance(part, Tensor):
                check_dtypes(**{"q": q, name: part})
        check_groups(q.shape[1], heads)
        check("lengths", self.lengths, (self.rows, heads))
        each = (self.rows, heads, self.most_slots)
        check("log_num", self.log_num, each)
        check("log_den", self.log_den, each)
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}; pass None for no cap.")


def in_blocks(part: Tensor | CodedSlots, blocks: Tensor) -> Tensor | CodedSlots:
    """Keys or values [B, H, M T, ...] of rows whose blocks are `blocks` [B, M]: copies."""

    def gathered(each: Tensor) -> Tensor:
        return each[blocks.long().clamp_min(0)].transpose(1, 2).flatten(2, 3)

    if isinstance(part, Tensor):
        return gathered(part)
    return CodedSlots(
        part.codec, part.center, part.exact, part.exact_at, gathered(part.codes), gathered(part.steps)
    )  # fmt: skip


def queries_of(starts: Tensor) -> list[tuple[int, int]]:
    """The first query of each row and the one behind its last (synchronises with the GPU)."""
    return list(pairwise(starts.tolist()))


def empty_part(call: Arguments) -> Part:
    """Attention to nothing."""
    shape = call.q.shape[:3]
    log_sum = torch.full(shape, float("-inf"), device=call.q.device)
    return Part(call.q.new_zeros(*shape, call.value_size), log_sum)
