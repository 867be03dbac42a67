"""What the operations of the recall methods are tested with."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cones(directions: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [n, D] around directions 18 degrees apart, lengths from 1 to 10, and the direction of each."""
    generator = torch.Generator().manual_seed(seed)
    size = directions + 4
    centers = torch.eye(directions + 1, size)[1:]
    centers[:, 0] = 19.0**0.5
    truth = torch.randint(0, directions, (keys,), generator=generator)
    noise = 0.02 * torch.randn(keys, size, generator=generator)
    units = torch.nn.functional.normalize(centers[truth] / 20.0**0.5 + noise, dim=-1)
    return units * 10.0 ** torch.rand(keys, 1, generator=generator), truth


def with_common_part(*shape: int, times: float, channels: int, seed: int = 0) -> Tensor:
    """Normal keys and a vector that all of a head share, `times` as long as they are, in its first `channels`."""
    common = normal(*shape[:2], 1, channels, seed=seed + 1)
    common = common / common.norm(dim=-1, keepdim=True) * times * shape[3] ** 0.5
    return normal(*shape, seed=seed) + torch.nn.functional.pad(common, (0, shape[3] - channels))


def cosine_scores(keys: Tensor, centroids: Tensor) -> Tensor:
    """Cosines [B, H, n, C] in float64; a vector of length 0 has cosine 0 with everything."""
    keys, centroids = (
        tensor.double() / tensor.double().norm(dim=-1, keepdim=True).clamp_min(1e-15) for tensor in (keys, centroids)
    )
    return keys @ centroids.mT
