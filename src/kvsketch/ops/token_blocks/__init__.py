"""Quantised tokens, in blocks that requests share: written by slot, read through a table of blocks.

A block holds TOKENS tokens of all KV heads: the codes of their keys and values, and the steps (`ops.codec`). The center
of a head belongs to the layer, so that a block says the same to every request that reads it.

The first token of a text has a key unlike all others and carries most attention: what its code loses, every query
feels. In less than 8 bits the first token of a block is therefore written a second time, in 8 bits. It is read so where
the block begins a text. 8 bits are enough for it.

Legend: P blocks, T = TOKENS, B requests, M blocks of a request at most, n tokens, Hq query heads, H KV heads, D key
size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kvsketch.ops.codec import STEP_DTYPE, Codec, CodedSlots, encode
from kvsketch.ops.common.checks import check
from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.dispatch import implementation, kernel_for
from kvsketch.ops.common.ragged import CODED_PROGRAMS, UNIT, Ragged, Readers
from kvsketch.ops.work_list import fixed_work_list

TOKENS = UNIT  # of a block: kernels read a block at a time
FIRST_BITS = 8  # of the first token of a text
ALIGNED = 4 * TOKENS  # a token takes whole float32 numbers of a block, for those who count it so
LEVEL_PROGRAMS = 4  # that run at a time on a multiprocessor where codes are read level by level
MOVED = 256  # blocks that get a new center at a time


@dataclass(frozen=True)
class BlockShape:
    """What lies in a block."""

    heads: int
    key: Codec
    value: Codec

    @property
    def has_first(self) -> bool:
        """Whether the first token has a second code."""
        return min(self.key.bits, self.value.bits) < FIRST_BITS

    def planes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what lies there, in order."""
        for name, codec in (("key", self.key), ("value", self.value)):
            yield f"{name}_codes", (self.heads, TOKENS, codec.code_bytes), torch.uint8
        for name in ("key", "value"):
            yield f"{name}_steps", (self.heads, TOKENS), STEP_DTYPE
        if self.has_first:
            for name, codec in (("key", self.key), ("value", self.value)):
                yield f"{name}_first", (self.heads, codec.size), torch.uint8
            for name in ("key", "value"):
                yield f"{name}_first_step", (self.heads,), STEP_DTYPE

    @property
    def nbytes(self) -> int:
        taken = sum(prod(shape) * dtype.itemsize for _, shape, dtype in self.planes())
        return -(-taken // ALIGNED) * ALIGNED


@dataclass
class Part:
    """The keys or the values of all blocks."""

    codec: Codec
    center: Tensor  # [H, D] float32
    codes: Tensor  # [P, H, T, bytes] uint8
    steps: Tensor  # [P, H, T] float16
    first: Tensor | None  # [P, H, D] uint8, codes of 8 bits
    first_step: Tensor | None  # [P, H] float16

    @property
    def first_codec(self) -> Codec:
        return Codec(FIRST_BITS, self.codec.size, self.codec.seed)

    def of_requests(self, table: Tensor) -> CodedSlots:  # [B, H, M T, D]
        """The tokens of requests whose blocks are `table` [B, M]."""
        codes = self.codes[table].transpose(1, 2).flatten(2, 3)
        steps = self.steps[table].transpose(1, 2).flatten(2, 3)
        begins = table[:, 0].long() if table.shape[1] else None
        at_begin = torch.zeros(len(table), len(self.center), 1, dtype=torch.int32, device=table.device)
        return CodedSlots(self.codec, *self._beside(len(table), begins, at_begin), codes, steps)

    def in_place(self, begins: Tensor, at_begin: Tensor) -> CodedSlots:
        """All blocks [P, H, T, D], with the center and the first token of requests: nothing is copied.

        `ops.past_attention` reads them through the table. begins [B] int64: the first block of each request; at_begin
        [B, H, 1] int32: zeros.
        """
        return CodedSlots(self.codec, *self._beside(len(begins), begins, at_begin), self.codes, self.steps)

    def _beside(self, batch: int, begins: Tensor | None, at_begin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centers [B, H, D], first tokens [B, H, 0 or 1, D] where they have a second code, and that these are first."""
        center = self.center.expand(batch, -1, -1)
        if self.first is None or self.first_step is None or begins is None:
            return center, center.new_zeros(batch, len(self.center), 0, self.codec.size), at_begin[:, :, :0]
        levels = self.first.index_select(0, begins).to(torch.float32).sub_(self.first_codec.half_range)
        steps = self.first_step.index_select(0, begins)
        return center, levels.mul_(steps.unsqueeze(-1)).unsqueeze(2), at_begin


@dataclass
class TokenBlocks:
    """All blocks of a layer: views of somebody's memory, and the centers."""

    shape: BlockShape
    pool: Tensor  # [P, at least nbytes] uint8
    key: Part
    value: Part

    @classmethod
    def of(cls, shape: BlockShape, pool: Tensor, key_center: Tensor, value_center: Tensor) -> TokenBlocks:
        """The blocks in `pool` [P, at least nbytes] uint8, around the centers [H, D] and [H, Dv] float32."""
        if pool.shape[1] < shape.nbytes or pool.stride(1) != 1:
            raise ValueError(f"blocks of {shape.nbytes} bytes do not fit a pool {list(pool.shape)}, {pool.stride()}.")
        result: dict[str, Tensor] = {}
        start = 0
        for name, size, dtype in shape.planes():
            end = start + prod(size) * dtype.itemsize
            result[name] = pool[:, start:end].view(dtype).unflatten(1, size)
            start = end
        key, value = (
            Part(
                codec, center, result[f"{name}_codes"], result[f"{name}_steps"],
                result.get(f"{name}_first"), result.get(f"{name}_first_step"),
            )
            for name, codec, center in (("key", shape.key, key_center), ("value", shape.value, value_center))
        )  # fmt: skip
        return cls(shape, pool, key, value)

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.key, self.value

    def move(self, key_center: Tensor, value_center: Tensor) -> None:
        """Codes all tokens anew, around centers [H, D] and [H, Dv]; synchronises with the GPU.

        A block that was never written is zero. The first token that comes to a block takes its first slot.
        """
        written = (self.key.steps[:, :, 0] != 0).any(1).nonzero().flatten()
        for part, center in zip(self.parts, (key_center, value_center), strict=True):
            for blocks in written.split(MOVED):
                _move(part, blocks, center)
            part.center.copy_(center)


def _move(part: Part, blocks: Tensor, center: Tensor) -> None:
    """The tokens of the blocks [m] around another center."""
    near = center.expand(len(blocks), -1, -1)
    x = part.of_requests(blocks.unsqueeze(1)).decoded(torch.float32)  # each block as a text of its own
    part.codes[blocks], part.steps[blocks] = encode(x, near, part.codec)
    if part.first is not None and part.first_step is not None:
        codes, steps = encode(x[:, :, :1], near, part.first_codec)
        part.first[blocks], part.first_step[blocks] = codes[:, :, 0], steps[:, :, 0]


def write_tokens(blocks: TokenBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes keys k [n, H, D] and values v [n, H, Dv] of tokens to the slots [n] int64, in place.

    Slot s is slot s % T of block s // T; a negative one is none.
    """
    for name, x, part in (("k", k, blocks.key), ("v", v, blocks.value)):
        check(name, x, (len(slots), *part.center.shape))
    implementation("token_blocks", k.device, blocks, k.dtype).write_tokens(blocks, k, v, slots)


@dataclass
class Reading:
    """Which blocks the queries of a step read: the same for all layers."""

    table: Tensor  # [B, M] int32
    lengths: Tensor  # [B] int32, tokens of each request
    pieces: Ragged | None  # which program reads what; None: on a CPU

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor, shape: BlockShape) -> Reading:
        """The blocks of each request, and how many tokens it has; long requests are read by more programs.

        Never synchronises with the GPU. Rows of no tokens read nothing.
        """
        if kernel_for("token_blocks", table.device) is None:
            return cls(table, lengths, None)
        return cls(table, lengths, pieces_of(lengths, shape, table.shape[1] * TOKENS))


def pieces_of(lengths: Tensor, shape: BlockShape, longest: int) -> Ragged:
    """A work list over the heads of requests of these lengths [B], at most `longest` tokens each.

    Where a head begins stands in the table of blocks: `start` says nothing.
    """
    capacity = lengths.long().unsqueeze(1).expand(-1, shape.heads).contiguous()
    programs = CODED_PROGRAMS if shape.key.bits == shape.value.bits == 4 else LEVEL_PROGRAMS
    work, first = fixed_work_list(
        capacity.view(1, -1), longest, Readers(programs * device_traits(lengths.device).multiprocessors)
    )
    return Ragged(capacity, capacity, longest, longest, work[0], first[0], -(-longest // UNIT))


def block_attention(q: Tensor, blocks: TokenBlocks, reading: Reading, scale: float) -> Tensor:
    """Attention of one query of each request, q [B, Hq, D], to all of its tokens; returns [B, Hq, Dv].

    Zero where a request has no tokens. What lies behind the last token of a request is not read.
    """
    batch, query_heads, size = q.shape
    heads = blocks.shape.heads
    if size != blocks.key.codec.size or query_heads % heads:
        raise ValueError(
            f"q must be [requests, a multiple of {heads} heads, {blocks.key.codec.size}], got {list(q.shape)}."
        )
    if len(reading.table) != batch or len(reading.lengths) != batch:
        raise ValueError(f"the table has {len(reading.table)} requests, and q {list(q.shape)} has {batch}.")
    return implementation("token_blocks", q.device, blocks, q.dtype).block_attention(q, blocks, reading, scale)
