"""The directions along which queries are longest: InfiniGen's skewing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvsketch.slots import padding as left_padding
from kvsketch.slots.table import SlotTable


def gram_of(table: SlotTable, queries: Tensor) -> Tensor:  # [B, H, D, D] float32
    """The sum of q q^T over the queries [B, Hq, n, D] of the newest tokens; left padding does not count."""
    q = queries.float().unflatten(1, (table.shape[1], -1))  # [B, H, G, n, D]
    if table.padding is not None:
        token = torch.arange(table.seen - q.shape[3], table.seen, device=q.device)
        q = q.masked_fill(left_padding.hides(table.padding, token)[:, None, None, :, None], 0.0)
    q = q.flatten(2, 3)
    return q.mT @ q


def directions(gram: Tensor, keys: Tensor, padding: Tensor | None, ratio: float) -> Tensor:  # [B, H, D, p]
    """The p = ceil(ratio * D) first singular vectors of the queries with this gram, in the dtype of keys [B, H, n, D].

    A head with a nan among its queries or keys gets meaningless directions; other heads are not affected.
    """
    wide = keys.float()
    if padding is not None:
        hidden = left_padding.hides(padding, torch.arange(keys.shape[2], device=keys.device))
        wide = wide.masked_fill(hidden[:, None, :, None], 0.0)
    other = wide.mT @ wide
    traces = [g.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-20)[..., None, None] for g in (gram, other)]
    # Fewer queries than channels leave directions undecided; there the keys decide.
    both = gram / traces[0] + 1e-4 * other / traces[1]
    sound = both.isfinite().flatten(2).all(2)[..., None, None]
    vectors = torch.linalg.eigh(torch.where(sound, both, 0.0)).eigenvectors
    return vectors[..., -math.ceil(ratio * keys.shape[-1]) :].to(keys.dtype)
