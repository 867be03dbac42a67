"""Slot tables fed with random tokens, for the tests of the method SubGen."""

from __future__ import annotations

import torch
from torch import Tensor

import kvsketch
from kvsketch import ops
from kvsketch.methods import SubGen
from kvsketch.slots import SlotTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 16


def tokens(count: int, heads: int = 2, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, heads, count, SIZE, generator=generator) for _ in range(2))
    return (keys * 1.5).to(DEVICE), values.to(DEVICE)


def feed(table: SlotTable, method: SubGen, keys: Tensor, values: Tensor, chunks: list[int]) -> None:
    start = 0
    for chunk in chunks:
        table.append(keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
        table.forward.scale = SIZE**-0.5
        method.compress(table, keys[:, :, start : start + chunk])
        start += chunk


def read(table: SlotTable, query: Tensor, clip: float | None = None) -> Tensor:
    return ops.weighted_attention(
        query, table.key_slots(), table.value_slots(), *table.log_weights(), table.forward.scale, clip=clip
    )


def subgen(text: str) -> SubGen:
    method = kvsketch.parse_method("subgen:" + text)
    assert isinstance(method, SubGen)
    return method
