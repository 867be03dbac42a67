"""How many tokens a method may keep, as a number of tokens or as a share of something.

    Size.parse(1024)     1,024 tokens
    Size.parse("25%")    a quarter of the whole (of the prompt for a budget, of the budget for a recent window)
    Size.parse("1/8")    an eighth of the whole

Left padding makes the prompts of a batch differ in length, and so their shares: a number of tokens is then a tensor
with one number for each row, computed on the device. Which layer or head gets how much is decided in `allot` of a
method.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from kvsketch.plural import counted
from kvsketch.slots.table import SlotTable

Tokens: TypeAlias = int | Tensor  # one number for all rows, or [B, 1, 1] int64, one for each
FORMS = "a number of tokens such as 1024, a share such as 25% or a fraction such as 1/8"


@dataclass(frozen=True)
class Size:
    """A number of tokens, or a share of a whole that is known only later."""

    tokens: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, value: Size | int | float | str, name: str = "budget", smallest: int = 1) -> Size:
        """Reads `value`; raises ValueError with the valid forms when it is none of them."""
        if isinstance(value, Size):
            return value
        text = value.strip() if isinstance(value, str) else ""
        if re.fullmatch(r"[+-]?\d+", text):
            value = int(text)
        if isinstance(value, int) and not isinstance(value, bool):
            if value < smallest:
                raise ValueError(f"{name}={value} is too small; use at least {counted(smallest, 'token')}, or {FORMS}")
            return cls(tokens=value)
        share: Fraction | None = None
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            share = Fraction(match[1]) / 100
        elif match := re.fullmatch(r"(\d+)\s*/\s*(\d+)", text):
            share = Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
        if share is None:
            raise ValueError(f"{name}={text or value!r} is not a size; use {FORMS}")
        if not 0 < share <= 1:
            raise ValueError(f"{name}={text!r} is outside (0, 100%]; use {FORMS}")
        return cls(share=share)

    @overload
    def of(self, whole: int) -> int: ...

    @overload
    def of(self, whole: Tokens) -> Tokens: ...

    def of(self, whole: Tokens) -> Tokens:
        """The size in tokens, given the whole that a share refers to; a share never rounds down to nothing."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return clamp(whole * self.share.numerator // self.share.denominator, 1)

    def __str__(self) -> str:
        if self.tokens is not None:
            return str(self.tokens)
        assert self.share is not None
        percent = self.share * 100
        if percent.denominator == 1:
            return f"{percent.numerator}%"
        if self.share.denominator > 64 and (10 * percent).denominator == 1:
            return f"{float(percent):.1f}%"
        return f"{self.share.numerator}/{self.share.denominator}"


class Budget(NamedTuple):
    """What a row may hold in one KV head of one layer; the sinks and the recent window are part of the total."""

    total: Tokens
    sinks: int
    recent: Tokens


def row_prompts(table: SlotTable) -> Tokens:
    """Tokens of each row's prompt without its left padding, the whole that a budget's share refers to."""
    if table.padding is None:
        return table.prompt_tokens
    prompts = table.prompt_tokens if table.prompts is None else table.prompts
    return (prompts - table.padding).clamp_min(1).view(-1, 1, 1)


def clamp(tokens: Tokens, least: int, most: int | None = None) -> Tokens:
    """`tokens`, at least `least` and at most `most`."""
    if isinstance(tokens, Tensor):
        return tokens.clamp(least, most)
    return max(least, tokens if most is None else min(tokens, most))


def where(condition: bool | Tensor, yes: Tokens, no: Tokens) -> Tokens:
    """`yes` in the rows where the condition holds, else `no`."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no
