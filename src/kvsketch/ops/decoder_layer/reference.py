"""The pieces in torch, as transformers' Llama-like models write them."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension."""
    normal = x.float()
    normal = normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its norm."""
    total = residual + x
    return total, rms_norm(total, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, n, D] rotated by the angles of its position; cos, sin [B, n, D] hold each angle twice."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated * sin


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up"""
    return torch.nn.functional.silu(gate) * up
