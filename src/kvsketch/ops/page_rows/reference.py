"""Rows of pages in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.page_rows import Front, Rows, Worth

NEG_INF = float("-inf")


def open_rows(held: Worth, rows: Rows, front: Front) -> tuple[Worth, Tensor]:
    first = rows.pages[rows.seen == 0]
    front.words[first, : front.zeros] = 0
    front.words[first, front.zeros : front.zeros + front.ones] = -1
    empty = (rows.seen <= 0).view(-1, 1, 1)
    index = held.tokens[rows.pages].masked_fill(empty, -1)
    log_den = held.log_den[rows.pages].masked_fill(empty, NEG_INF)
    score = None if held.score is None else held.score[rows.pages].masked_fill(empty, 0.0)
    shifted = torch.where(index >= 0, index + rows.shift.view(-1, 1, 1), -1).int()
    return Worth(shifted, log_den, score), (index < 0).int().argmax(-1, keepdim=True)


def close_rows(held: Worth, rows: Rows, opened: Worth) -> None:
    live = rows.seen >= 0
    index = torch.where(opened.tokens >= 0, opened.tokens - rows.shift.view(-1, 1, 1), -1).int()
    for plane, new in zip(held, Worth(index, opened.log_den, opened.score), strict=True):
        if plane is not None and new is not None:
            plane[rows.pages[live]] = new[live]
