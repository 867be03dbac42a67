"""The directions along which the queries of a prompt are longest: InfiniGen's skewing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvsketch.slots import SlotTable


def directions(table: SlotTable, queries: Tensor, ratio: float) -> Tensor:  # [B, H, D, p]
    """The p = ceil(ratio * D) first right singular vectors of the queries [B, Hq, n, D] that read each KV head."""
    keys = table.key_slots()[:, :, : table.seen].float()
    q = queries.float().unflatten(1, (keys.shape[1], -1))  # [B, H, G, n, D]
    if table.padding is not None:
        real = torch.arange(table.seen, device=keys.device) >= table.padding.view(-1, 1)
        keys = keys * real[:, None, :, None]
        q = q * real[:, None, None, -q.shape[3] :, None]
    q = q.flatten(2, 3)
    gram, other = q.mT @ q, keys.mT @ keys
    # Fewer queries than channels leave directions undecided; there the keys decide.
    traces = [g.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-20)[..., None, None] for g in (gram, other)]
    vectors = torch.linalg.eigh(gram / traces[0] + 1e-4 * other / traces[1]).eigenvectors
    return vectors[..., -math.ceil(ratio * keys.shape[-1]) :].to(queries.dtype)
