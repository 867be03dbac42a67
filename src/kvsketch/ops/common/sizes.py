"""Sizes of launches, from plain numbers: Triton's functions of these names take microseconds, at every launch."""

from __future__ import annotations


def cdiv(count: int, each: int) -> int:
    """How many of `each` hold `count`."""
    return -(-count // each)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is no less than a size of 1 or more."""
    return 1 << (size - 1).bit_length()
