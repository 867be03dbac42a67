"""The programs that take levels out of words of codes, in the instructions of a GPU, run here number by number."""

from __future__ import annotations

import re
from collections.abc import Callable

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
    from kvsketch.ops.common import quantised

    kind = {4: "NIBBLES", 3: "TRIPLES", 2: "PAIRS"}[bits]
    program = getattr(quantised, f"{kind}_{'BFLOAT16' if dtype == torch.bfloat16 else 'FLOAT16'}").value
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


class Machine:
    """Runs the few instructions of `byte_vectors` for registers [n] of 32 bits, each of two numbers in float16."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.held = inputs

    def run(self, program: str) -> dict[str, Tensor]:
        for line in (each.strip().rstrip(";") for each in program.splitlines()):
            name, _, rest = line.partition(" ")
            kind, *_ = name.split(".")
            if kind in ("mov", "prmt", "shl", "shr", "lop3", "add", "mul", "fma"):
                target, *given = rest.split(", ")
                self.held[target] = getattr(self, kind)(*(self.value(each) for each in given))
            else:
                assert kind in ("{", "}", ""), line
        return self.held

    def value(self, operand: str) -> Tensor:
        return self.held[operand] if operand in self.held else torch.tensor(int(operand, 0))

    def mov(self, a: Tensor) -> Tensor:
        return a

    def prmt(self, a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
        result, both = torch.zeros_like(a), a | b << 32
        for i in range(4):
            result |= (both >> 8 * int(selector >> 4 * i & 7) & 255) << 8 * i
        return result

    def shl(self, a: Tensor, by: Tensor) -> Tensor:
        return a << by & 0xFFFFFFFF

    def shr(self, a: Tensor, by: Tensor) -> Tensor:
        return a >> by

    def lop3(self, a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
        assert table == 0xEA
        return a & b | c

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.halves(lambda x, y: x + y, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.halves(lambda x, y: x * y, a, b)

    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.halves(lambda x, y, z: x * y + z, a, b, c)

    def halves(self, what: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        low, high = (
            what(*((x >> shift & 0xFFFF).to(torch.uint16).view(torch.float16).double() for x in operands)).half()
            for shift in (0, 16)
        )
        return low.view(torch.uint16).long() | high.view(torch.uint16).long() << 16


@needs_triton
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_instructions_make_vectors_of_four_bytes(bits: int) -> None:
    from kvsketch.ops.common import quantised

    program = getattr(quantised, f"VECTORS_{bits}").value
    places, number = quantised.places_of(bits), torch.arange(1 << 16)
    low = [(number + shift) & 255 for shift in (0, 77, 131, 200)]
    high = [(number >> 8) + shift & 255 for shift in (0, 1, 4, 5)]
    step = (number / 1e4).half()
    held = {f"${2 * places + i}": packed_bytes(each) for i, each in enumerate([low, high] if bits == 3 else [low])}
    twice = step.view(torch.uint16).long() * 0x10001
    held = Machine(held | {f"${2 * places + len(held)}": twice}).run(program)
    for place, at in ((place, at) for place in range(places) for at in range(4)):
        read = (held[f"${2 * place + at // 2}"] >> 16 * (at % 2) & 0xFFFF).to(torch.uint16).view(torch.float16)
        byte, width = (0, 2, 1, 3)[at], 2 if bits == 3 else bits
        level = low[byte] >> width * place & (1 << width) - 1
        if bits == 3:
            level = level + 4 * (high[byte] >> 2 * place & 1)
        z = (level.double() - (2**bits - 1) / 2) * quantised.share_of(bits)
        assert torch.equal(read, (z * step.double()).half())


def packed_bytes(each: list[Tensor]) -> Tensor:
    return each[0] | each[1] << 8 | each[2] << 16 | each[3] << 24
