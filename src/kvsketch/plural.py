"""Counts as messages say them. Does not import torch."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
