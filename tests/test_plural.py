"""Counts in messages."""

from __future__ import annotations

import pytest

from kvsketch.plural import counted


@pytest.mark.parametrize(("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (2000, "2,000 files")])
def test_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "file") == said
