"""Token blocks in torch: blocks are gathered, and attention is weighted attention over what they hold."""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.codec.reference import encode
from kvsketch.ops.token_blocks import TOKENS, Reading, TokenBlocks
from kvsketch.ops.weighted_attention import Arguments
from kvsketch.ops.weighted_attention.reference import weighted_attention


def write_tokens(blocks: TokenBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """See `kvsketch.ops.token_blocks.write_tokens` (synchronises with the GPU)."""
    there = (slots >= 0).nonzero().flatten()
    block, slot = slots[there] // TOKENS, slots[there] % TOKENS
    begins = (slot == 0).nonzero().flatten()
    for x, part in ((k, blocks.key), (v, blocks.value)):
        rows, center = x[there].transpose(0, 1).unsqueeze(0), part.center.unsqueeze(0)  # [1, H, n, D], [1, H, D]
        codes, steps = encode(rows, center, part.codec)
        part.codes[block, :, slot], part.steps[block, :, slot] = codes[0].transpose(0, 1), steps[0].T
        if part.first is not None and part.first_step is not None:
            codes, steps = encode(rows[:, :, begins], center, part.first_codec)
            part.first[block[begins]], part.first_step[block[begins]] = codes[0].transpose(0, 1), steps[0].T


def block_attention(q: Tensor, blocks: TokenBlocks, reading: Reading, scale: float) -> Tensor:
    """See `kvsketch.ops.token_blocks.block_attention` (synchronises with the GPU)."""
    most = -(-int(reading.lengths.max()) // TOKENS) if len(reading.lengths) else 0
    if not most:
        return q.new_zeros(*q.shape[:2], blocks.value.codec.size)
    table = reading.table[:, :most].long()
    lengths = reading.lengths.unsqueeze(1).expand(-1, blocks.shape.heads)
    call = Arguments(
        q.unsqueeze(2), blocks.key.of_requests(table), blocks.value.of_requests(table), None, None, scale,
        lengths=lengths,
    )  # fmt: skip
    return weighted_attention(call).out[:, :, 0]
