"""The products in torch, with the roundings of a model's own modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from kvsketch.ops.decoder_layer.reference import gated_silu


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x W^T + b for each weight W [out, in]; x [..., in]."""
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def linear_onto(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + (x W^T + b)"""
    return residual + functional.linear(x, weight, bias)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T)"""
    return gated_silu(functional.linear(x, gate), functional.linear(x, up))
