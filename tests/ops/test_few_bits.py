"""The programs that take levels out of words of codes, in the instructions of a GPU, run here number by number."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from kvsketch.ops.codec import Codec, packed
from tests.ops.formula import needs_triton


def registers(program: str, *words: Tensor) -> list[Tensor]:
    """$0 to $3, for words [n] of 32 bits in $4 and behind it."""
    held = {f"${4 + number}": each for number, each in enumerate(words)}
    for name, *operands in re.findall(r"(\w+)\.b32 ([^,;]+), ([^,;]+), ([^,;]+)(?:, ([^,;]+), ([^,;]+))?;", program):
        target, (a, b, *c) = operands[0], [held[x] if x in held else int(x, 0) for x in operands[1:] if x]
        if name == "lop3":
            result = a & b | c[0] if c[1] == 0xEA else a & ~c[0] | b & c[0]
            assert c[1] in (0xEA, 0xD8)
        else:
            result = (a << b if name == "shl" else a >> b) & 0xFFFFFFFF
        held[target] = result
    return [held[f"${number}"] for number in range(4)]


@needs_triton
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_instructions_read_every_level_of_two_words(bits: int, dtype: torch.dtype) -> None:
    from kvsketch.ops.common import few_bits

    kind = {4: "NIBBLES", 3: "TRIPLES", 2: "PAIRS"}[bits]
    program = getattr(few_bits, f"{kind}_{'BFLOAT16' if dtype == torch.bfloat16 else 'FLOAT16'}").value
    first = torch.arange(1 << 16)
    halves = [(first, first.flip(0))] if bits == 4 else [(first & 255, first.flip(0) & 255)]
    if bits == 3:
        high = (first >> 8, first.flip(0) >> 8)
        halves += [
            high,
            (0 * first, 0 * first + 0xFFFF),
        ]  # the first word takes the first of two bits, the second the other
    read = registers(program, *(a | b << 16 for a, b in halves))
    base = 8.0 if dtype == torch.bfloat16 else 64.0
    for place, both in enumerate(read):
        for word in range(2):
            low, half = halves[0][word], both >> (16 * word) & 0xFFFF
            level = low >> (4 * place) & 15 if bits == 4 else low >> (2 * place) & 3
            if bits == 3:
                level += (halves[1][word] >> (2 * place + word) & 1) * 4
            value = half.to(torch.int32).to(torch.uint16).view(dtype)
            assert torch.equal(value.double(), base + level.double() / 2)


@pytest.mark.parametrize(("bits", "size"), [(3, 64), (3, 96), (2, 64), (2, 80)])
def test_a_word_has_the_channels_that_queries_are_read_by(bits: int, size: int) -> None:
    levels = torch.randint(0, 2**bits, (5, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes, quarter, column = packed(levels, Codec(bits, size)).int(), size // 4, torch.arange(size // 4)
    for place in range(4):
        level = codes[:, :quarter] >> (2 * place) & 3
        if bits == 3:
            high = codes[:, quarter + column % (size // 8)] >> (column // (size // 8))
            level += (high >> (2 * place) & 1) * 4
        assert torch.equal(level, levels[:, place * quarter : (place + 1) * quarter].int())
