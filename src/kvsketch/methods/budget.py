"""How many tokens a method may keep, as a number of tokens or as a share of something.

    Size.parse(1024)     1,024 tokens
    Size.parse("25%")    a quarter of the whole (of the prompt for a budget, of the budget for a recent window)
    Size.parse("1/8")    an eighth of the whole

This module knows numbers only: which layer or head gets them is the method's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

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
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{name}={value!r} is not a size; use {FORMS}")
        if isinstance(value, int):
            if value < smallest:
                raise ValueError(f"{name}={value} is too small; use at least {smallest} token(s), or {FORMS}")
            return cls(tokens=value)
        return cls._parse_text(value.strip(), name, smallest)

    @classmethod
    def _parse_text(cls, text: str, name: str, smallest: int) -> Size:
        if re.fullmatch(r"[+-]?\d+", text):
            return cls.parse(int(text), name, smallest)
        share: Fraction | None = None
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            share = Fraction(match[1]) / 100
        elif match := re.fullmatch(r"(\d+)\s*/\s*(\d+)", text):
            share = Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
        if share is None:
            raise ValueError(f"{name}={text!r} is not a size; use {FORMS}")
        if not 0 < share <= 1:
            raise ValueError(f"{name}={text!r} is outside (0, 100%]; use {FORMS}")
        return cls(share=share)

    def of(self, whole: int) -> int:
        """The size in tokens, given the whole that a share refers to; a share never rounds down to nothing."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, int(self.share * whole))

    def __str__(self) -> str:
        if self.tokens is not None:
            return str(self.tokens)
        assert self.share is not None
        percent = self.share * 100
        if percent.denominator == 1:
            return f"{percent.numerator}%"
        return f"{self.share.numerator}/{self.share.denominator}"
