"""Left padding: only a row that is all padding so far can get more of it."""

from __future__ import annotations

import torch

from kvsketch.slots import padding


def test_tokens_that_are_hidden_later_are_no_padding() -> None:
    """Row 0 has begun, row 1 is padding so far, row 2 begins with the second new token."""
    before = padding.learned(None, torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]]), 0)
    assert before is not None and before.tolist() == [1, 3, 3]
    after = padding.learned(before, torch.tensor([[0, 0], [0, 0], [0, 1]]), 3)
    assert after is not None and after.tolist() == [1, 5, 4]
    assert padding.learned(None, torch.zeros(3, 2, dtype=torch.int64), 3) is None
