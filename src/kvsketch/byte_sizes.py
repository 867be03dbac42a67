"""Sizes in bytes as people write them. Does not import torch, so that commands can refuse a wrong one at once."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1} | {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("KMGT", 1)
    for rest, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
FORMS = "a number of bytes, or one with kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 2GB"


def parsed(memory: float | str, name: str = "memory=") -> int:
    """Bytes of `2GB`, `1.5 GiB` or a number of bytes, also as 2e9; ValueError begins with `name`."""
    if isinstance(memory, float) and memory.is_integer():
        memory = int(memory)
    result = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    if isinstance(memory, bool) or not isinstance(memory, (int, str)) or result is None:
        raise ValueError(f"{name}{memory!r} is not a size; use {FORMS}")
    if result[2].upper() not in UNITS:
        raise ValueError(f"{name}{memory!r}: {result[2]} is no unit; use {FORMS}")
    size = int(float(result[1]) * UNITS[result[2].upper()])
    if size < 1:
        raise ValueError(f"{name}{memory!r} is nothing; use {FORMS}")
    return size


def text_of(size: int) -> str:
    """`1.50 GB`."""
    unit, scale = next(((u, s) for u, s in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if size >= s), ("B", 1))
    return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size} B"
