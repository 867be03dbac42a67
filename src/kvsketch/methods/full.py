"""The full cache: keeps every token. The truth that the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """Keeps every token and reads every token: exact attention, memory that grows with the context."""

    name: ClassVar[str] = "full"
    family: ClassVar[str] = "full"
