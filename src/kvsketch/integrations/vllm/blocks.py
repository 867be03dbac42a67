"""Attention of one layer over blocks of quantised tokens, which requests share; knows nothing of vLLM.

New tokens are written first. Single tokens of many requests are one batch, and read blocks alone. Several tokens, a
prompt or a chunk of it, attend to each other as they are, and to those before them as the blocks hold them; chunks of
many requests are read together.

A block may serve any request, so that the centers belong to the layer and not to a text: they are the mean of the
first prompt that is read. What is common to keys is the model's, and a text is centered almost as well by another one
as by itself. A short prompt is a poor mean. The centers move when a prompt comes that is much longer, until one of
ENOUGH tokens has come; what lies in blocks by then is coded anew.

Legend: B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.causal import Flash, causal_attention
from kvsketch.ops.token_blocks import TOKENS, BlockShape, Reading, TokenBlocks, block_attention, write_tokens
from kvsketch.slots.codes import EXACT
from kvsketch.slots.tensors import uploaded

ENOUGH = 512  # tokens after which the centers stay
ALONE = 64  # queries of a turn that comes alone
GROWTH = 4  # a prompt moves the centers if it has so many times the tokens that they are the mean of


@dataclass
class Chunks:
    """Several tokens of each of B requests, one request behind the other."""

    starts: list[int]  # [B + 1], the first token of each, and the one behind the last
    seen: list[int]  # [B], tokens of each before them
    table: Tensor  # [B, M], blocks of each, as many as hold the tokens before
    begin: Tensor  # `starts` on the device
    before: Tensor  # `seen` there
    first: Tensor  # [B] int64, the first block of each
    by_head: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what all layers of so many heads ask for

    @classmethod
    def of(cls, starts: list[int], seen: list[int], table: Tensor, rows: Sequence[int] | None = None) -> Chunks:
        """Chunks of the requests in `rows` of a table, which may have room for longer ones. Waits for no GPU."""
        blocks = max(1, -(-max(seen) // TOKENS))
        which = torch.arange(len(seen)) if rows is None else torch.tensor(rows, dtype=torch.int64)
        begin, before = (torch.tensor(each, dtype=torch.int32) for each in (starts, seen))
        begin, before, which = uploaded([begin, before, which], [table.device] * 3)
        there = table[:, :blocks].index_select(0, which)
        return cls(starts, seen, there, begin, before, there[:, 0].long())

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Tokens before them [B, H], and zeros [B, H, 1] int32: where the exact slot of each head lies."""
        if heads not in self.by_head:
            lengths = self.before.unsqueeze(1).expand(-1, heads).contiguous()
            self.by_head[heads] = lengths, torch.zeros_like(lengths, dtype=torch.int32).unsqueeze(-1)
        return self.by_head[heads]

    @property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.starts))


@dataclass
class BlockLayer:
    """One layer, and the centers that its blocks are coded around."""

    shape: BlockShape
    scale: float
    key_center: Tensor  # [H, D] float32
    value_center: Tensor  # [H, Dv] float32
    flash: Flash | None = None  # what reads new tokens faster than ours
    known: int = 0  # tokens that the centers are the mean of

    @classmethod
    def of(cls, shape: BlockShape, scale: float, device: torch.device, flash: Flash | None = None) -> BlockLayer:
        """A layer that has read nothing: its centers are zero."""
        # vLLM loads a model under the default dtype of that model.
        key, value = (
            torch.zeros(shape.heads, codec.size, dtype=torch.float32, device=device)
            for codec in (shape.key, shape.value)
        )
        return cls(shape, scale, key, value, flash)

    def blocks(self, pool: Tensor) -> TokenBlocks:
        """The blocks in `pool` [P, bytes of a block]: views of it."""
        return TokenBlocks.of(self.shape, pool, self.key_center, self.value_center)

    def learns_from(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens, the first ones not counted, moves the centers."""
        return tokens > 0 and self.known < ENOUGH and tokens >= min(ENOUGH, GROWTH * self.known)

    def learn(self, blocks: TokenBlocks, seen: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Moves the centers to the mean of tokens k [n, H, D], v [n, H, Dv] of a request that has `seen` others.

        The first tokens of a text are unlike all others and do not count. Nothing is learnt from tokens that are not
        finite, or that go nowhere: those of a test. Synchronises with the GPU only where there is something to learn.
        """
        first = max(0, EXACT - seen)
        if not self.learns_from(len(k) - first) or not bool((slots >= TOKENS).all()):
            return
        centers = [x[first:].mean(0, dtype=torch.float32) for x in (k, v)]
        if all(bool(center.isfinite().all()) for center in centers):
            blocks.move(*centers)
            self.known = len(k) - first

    def write(self, blocks: TokenBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Puts tokens k [n, H, D], v [n, H, Dv] into their slots [n]; -1: nowhere. Never synchronises with the GPU."""
        write_tokens(blocks, k, v, slots)

    def decode(self, blocks: TokenBlocks, reading: Reading, q: Tensor) -> Tensor:
        """One token of each of B requests, which is written: q [B, Hq, D]; returns [B, Hq, Dv].

        Never synchronises with the GPU.
        """
        return block_attention(q, blocks, reading, self.scale)

    def read_chunks(self, blocks: TokenBlocks, chunks: Chunks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens of each of some requests, all that are given: q [n, Hq, D], k [n, H, D], v [n, H, Dv].

        Returns [n, Hq, Dv]. What lies in blocks is read as it is: no copy of a request's tokens is made.
        """
        attended = causal_attention(self.flash, q, k, v, self.scale, chunks.starts)
        if not any(chunks.seen):
            return attended.out[0].transpose(0, 1)
        lengths, at_begin = chunks.of_heads(self.shape.heads)
        keys, values = (part.in_place(chunks.first, at_begin) for part in blocks.parts)
        past = ops.past_attention(
            q.transpose(0, 1).unsqueeze(0), keys, values, None, None, self.scale,
            starts=chunks.begin, longest=chunks.longest, lengths=lengths, blocks=chunks.table,
        )  # fmt: skip
        return ops.join_attention(attended, past)[0].transpose(0, 1)

    def measure(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """As many tokens as are read at once are a prompt, and chunks behind it.

        q [n, Hq, D], k [n, H, D], v [n, H, Dv] lie in blocks of nobody's. No request then takes more memory, or waits
        for a kernel to be compiled.
        """
        trial, count = BlockLayer.of(self.shape, self.scale, k.device, self.flash), len(k)
        table = torch.arange(1, 1 - (-count // TOKENS), dtype=torch.int32, device=k.device).unsqueeze(0)
        pool = torch.zeros(1 + table.shape[1], self.shape.nbytes, dtype=torch.uint8, device=k.device)
        slots = torch.arange(TOKENS, TOKENS + count, device=k.device)
        blocks = trial.blocks(pool)
        trial.write(blocks, k, v, slots)
        trial.learn(blocks, 0, k, v, slots)
        # Few queries are one tile, and more of them several, whose slots are still shared by programs.
        for seen, new in ((0, count), (count, count), (count, min(ALONE, count)), (count, min(2, count))):
            trial.read_chunks(blocks, Chunks.of([0, new], [seen], table), q[:new], k[:new], v[:new])
