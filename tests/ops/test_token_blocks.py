"""Blocks of quantised tokens: kernels against references, references against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops import token_blocks
from kvsketch.ops.codec import Codec, encode
from kvsketch.ops.token_blocks import TOKENS, BlockShape, Reading, TokenBlocks, pieces_of, reference
from tests.ops.formula import needs_triton, poison, relative_error
from tests.ops.test_codec import NORMAL_ERROR

HEADS, BLOCKS = 2, 24


class Filled:
    """Blocks that lie apart in memory full of nan, and requests of these lengths in them, in no order."""

    def __init__(
        self, lengths: list[int], device: torch.device, bits: tuple[int, int] = (4, 4), size: int = 64,
        dtype: torch.dtype = torch.float32, common: float = 5.0,
    ) -> None:  # fmt: skip
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(size), device, dtype
        self.shape = BlockShape(HEADS, *(Codec(each, size) for each in bits))
        self.pool = torch.full((BLOCKS, self.shape.nbytes + 256), 255, dtype=torch.uint8, device=device)
        self.centers = [common * self.normal(HEADS, size).float(), self.normal(HEADS, size).float()]
        self.blocks = TokenBlocks.of(self.shape, self.pool, *self.centers)
        # Blocks of different requests beside each other; 0 stands for none.
        order = (torch.randperm(BLOCKS - 1, generator=self.generator) + 1).tolist()
        most = max(1, -(-max(lengths) // TOKENS))
        owned = [[order.pop() for _ in range(-(-length // TOKENS))] for length in lengths]
        self.table = torch.tensor([row + [0] * (most - len(row)) for row in owned], dtype=torch.int32, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.tokens = [self.vectors(length) for length in lengths]
        keys, values = (torch.cat([pair[i] for pair in self.tokens]) for i in range(2))
        slots = [
            self.table[i, t // TOKENS].item() * TOKENS + t % TOKENS for i, n in enumerate(lengths) for t in range(n)
        ]
        self.slots = torch.tensor(slots, device=device)
        reference.write_tokens(self.blocks, keys, values, self.slots)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def vectors(self, count: int) -> list[Tensor]:
        return [(self.normal(count, *c.shape).float() + c).to(self.dtype) for c in self.centers]

    def reading(self) -> Reading:
        return Reading(self.table, self.lengths, pieces_of(self.lengths, self.shape, self.table.shape[1] * TOKENS))


@pytest.mark.parametrize(("bits", "size"), [((4, 4), 64), ((8, 8), 32), ((8, 4), 64), ((3, 2), 64)])
def test_a_request_reads_what_it_has_written(bits: tuple[int, int], size: int, device: torch.device) -> None:
    filled = Filled([1, 130, 64], device, bits, size)
    for part, which in ((filled.blocks.key, 0), (filled.blocks.value, 1)):
        result = part.of_requests(filled.table.long()).decoded(torch.float32)
        for i, tokens in enumerate(filled.tokens):
            x = tokens[which].transpose(0, 1).float()  # [H, n, D]
            alone = encode(x.unsqueeze(0), part.center.unsqueeze(0), part.codec)
            steps = part.steps[filled.table[i].long()].transpose(0, 1).flatten(1)
            assert torch.equal(steps[:, : x.shape[1]], alone.steps[0])
            error = (result[i, :, : x.shape[1]] - x).square().mean(2)
            if x.shape[1] > 1:
                assert 0.5 < error[:, 1:].mean() / NORMAL_ERROR[part.codec.bits] < 1.2
            assert error[:, 0].max() < 3 * NORMAL_ERROR[8], "a text does not begin in 8 bits"


@pytest.mark.parametrize("bits", [(4, 4), (8, 8)])
def test_attention_is_attention_over_the_tokens(bits: tuple[int, int], device: torch.device) -> None:
    filled = Filled([1, 130, 0, 64], device, bits)
    q = filled.normal(4, 2 * HEADS, 64)
    result = reference.block_attention(q, filled.blocks, filled.reading(), 0.1)
    assert not result[2].any()
    for i in (0, 1, 3):
        decoded = [
            part.of_requests(filled.table[i : i + 1].long()).decoded(torch.float64) for part in filled.blocks.parts
        ]
        k, v = (x[0, :, : filled.lengths[i]].repeat_interleave(2, 0) for x in decoded)
        weights = (0.1 * (q[i].double().unsqueeze(1) @ k.mT)).softmax(-1)
        assert relative_error(result[i], (weights @ v)[:, 0]) < 1e-5


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("bits", "size", "count", "dtype"),
    [((4, 4), 128, 63, torch.bfloat16), ((8, 4), 64, 100, torch.float32), ((3, 2), 32, 1, torch.float16),
     ((8, 8), 16, 1100, torch.bfloat16)],
)  # fmt: skip
def test_kernel_writes_the_same_bytes(
    bits: tuple[int, int], size: int, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    from kvsketch.ops.token_blocks import kernel

    filled = Filled([70], device, bits, size, dtype)
    slots = TOKENS + torch.randperm((BLOCKS - 1) * TOKENS, generator=filled.generator)[:count].to(device)
    slots[3::7] = -1
    k, v = filled.vectors(count)
    k[-1, 0, 3] = float("nan")
    # Keys of a forward lie beside queries.
    k = torch.cat([k, k], 1)[:, HEADS:]
    ours, other = filled.blocks, TokenBlocks.of(filled.shape, filled.pool.clone(), *filled.centers)
    kernel.write_tokens(ours, k, v, slots)
    reference.write_tokens(other, k, v, slots)
    assert (ours.pool[0] == 255).all(), "a negative slot was written"
    for part in (*ours.parts, *other.parts):
        for steps in (part.steps, part.first_step):
            if steps is not None:
                steps.nan_to_num_(-1.0)  # nan has several bit patterns
    assert torch.equal(ours.pool, other.pool)
    assert (ours.pool[:, filled.shape.nbytes :] == 255).all(), "bytes between the blocks were written"


@needs_triton
@pytest.mark.parametrize(
    ("bits", "size", "group", "dtype"),
    [
        ((4, 4), 128, 4, torch.bfloat16),
        ((4, 4), 64, 7, torch.float16),
        ((4, 4), 32, 20, torch.bfloat16),
        ((8, 4), 64, 4, torch.bfloat16),
        ((3, 2), 16, 3, torch.float32),
    ],
)
def test_kernel_attends_as_the_reference(
    bits: tuple[int, int], size: int, group: int, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvsketch.ops.token_blocks import kernel

    # Blocks of no request hold nan; so do the slots behind the last token of each.
    filled = Filled([1, 140, 0, 64, 65], device, bits, size, dtype)
    q = filled.normal(5, HEADS * group, size)
    wanted = reference.block_attention(q, filled.blocks, filled.reading(), size**-0.5)
    poison(monkeypatch)
    result = kernel.block_attention(q, filled.blocks, filled.reading(), size**-0.5)
    assert not result[2].any()
    assert relative_error(result, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_moved_blocks_hold_the_same_tokens(device: torch.device) -> None:
    """Around the new center, with the error of a second code; blocks that nobody wrote stay zero."""
    filled = Filled([130, 64], device, common=0.5)
    filled.pool.masked_fill_(filled.pool == 255, 0)
    reference.write_tokens(filled.blocks, *(torch.cat(x) for x in zip(*filled.tokens, strict=True)), filled.slots)
    untouched = [i for i in range(BLOCKS) if i not in filled.table.flatten().tolist()] + [0]
    new = [c + 0.1 * torch.randn_like(c) for c in filled.centers]
    filled.blocks.move(*new)
    assert not filled.pool[untouched].any()
    for part, center, which in zip(filled.blocks.parts, new, (0, 1), strict=True):
        assert torch.equal(part.center, center)
        result = part.of_requests(filled.table.long()).decoded(torch.float32)
        for i, tokens in enumerate(filled.tokens):
            x = tokens[which].transpose(0, 1).float()
            error = (result[i, :, : x.shape[1]] - x).square().mean(2)
            assert error[:, 1:].mean() < 2.4 * NORMAL_ERROR[4]
            assert error[:, 0].max() < 6 * NORMAL_ERROR[8]


def test_a_long_request_is_read_by_many_programs(device: torch.device) -> None:
    shape = BlockShape(HEADS, Codec(4, 64), Codec(4, 64))
    lengths = torch.tensor([40_000, 10, 10, 10], dtype=torch.int32, device=device)
    pieces = pieces_of(lengths, shape, 65_536)
    entries = [row for row in pieces.work.tolist() if row[1] <= row[2]]
    long = [row for row in entries if row[0] < HEADS]
    assert len(entries) - len(long) == 3 * HEADS
    assert sum(row[2] - row[1] for row in long) == HEADS * 40_000
    assert max(row[2] - row[1] for row in long) < 40_000 / 10


def test_a_block_has_the_bytes_of_its_codes() -> None:
    plain = 2 * 128 * 2  # of a key and a value in half precision
    for bits, least in ((4, 3.7), (8, 1.9)):
        shape = BlockShape(8, Codec(bits, 128), Codec(bits, 128))
        assert plain * 8 * TOKENS / shape.nbytes > least


def test_bad_shapes_are_named() -> None:
    filled = Filled([10], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"k must be \[3, 2, 64\].*got \[3, 1, 64\]"):
        token_blocks.write_tokens(filled.blocks, torch.zeros(3, 1, 64), torch.zeros(3, 2, 64), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"a multiple of 2 heads, 64\], got \[1, 3, 64\]"):
        token_blocks.block_attention(torch.zeros(1, 3, 64), filled.blocks, filled.reading(), 1.0)
    with pytest.raises(ValueError, match="the table has 1 requests"):
        token_blocks.block_attention(torch.zeros(2, 4, 64), filled.blocks, filled.reading(), 1.0)
    with pytest.raises(ValueError, match="do not fit a pool"):
        TokenBlocks.of(filled.shape, filled.pool[:, :64], *filled.centers)
