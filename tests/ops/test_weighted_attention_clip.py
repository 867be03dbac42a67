"""The `clip` of weighted attention: how far the two sums may lie apart when slots are read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from tests.ops.conftest import Attend, by_kernel, needs_triton

NEG_INF = float("-inf")


def table(device: torch.device, shift: float, slots: int = 90, value_slots: int = 61) -> tuple[Tensor, ...]:
    """q, k, v and weights of slots that carry a value, or a key only; the numerator's weights are shifted."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, num, den = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((1, 4, 3, 16), (1, 2, slots, 16), (1, 2, value_slots, 8), (1, 2, slots), (1, 2, slots))
    )
    num[..., 40:] = NEG_INF
    den[..., :20] = NEG_INF
    return q, k, v, num + shift, den


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_ratio_is_bounded_and_sums_are_reported_as_they_are(attend: Attend, device: torch.device, shift: float) -> None:
    arguments = (*table(device, shift), 0.25)
    free, clipped = attend(*arguments), attend(*arguments, clip=math.log(2.0))
    torch.testing.assert_close(clipped.log_sum_num, free.log_sum_num)
    torch.testing.assert_close(clipped.log_sum_den, free.log_sum_den)
    excess = free.log_sum_num - free.log_sum_den
    factor = (excess.clamp(-math.log(2.0), math.log(2.0)) - excess).exp()[..., None]
    torch.testing.assert_close(clipped.out, free.out * factor, atol=1e-5, rtol=1e-4)
    if shift:
        assert (factor != 1).all(), "the sums must lie apart, or nothing is tested"


def test_a_wide_clip_changes_nothing(attend: Attend, device: torch.device) -> None:
    arguments = (*table(device, 1.0), 0.25)
    torch.testing.assert_close(attend(*arguments, clip=50.0).out, attend(*arguments).out, atol=1e-6, rtol=1e-5)


def test_sink_logit_joins_the_clipped_denominator(attend: Attend, device: torch.device) -> None:
    """A large sink may dwarf both sums: that is no disagreement between them, and stays."""
    arguments = (*table(device, 3.0), 0.25)
    sink = torch.full((4,), 6.0, device=device)
    free = attend(*arguments)
    denominator = torch.maximum(torch.minimum(free.log_sum_den, free.log_sum_num + 0.5), free.log_sum_num - 0.5).exp()
    numerator = free.out * free.log_sum_den.exp()[..., None]
    expected = numerator / (denominator + math.exp(6.0))[..., None]
    torch.testing.assert_close(attend(*arguments, sink_logits=sink, clip=0.5).out, expected, atol=1e-5, rtol=1e-4)


def test_empty_sums_stay_zero(attend: Attend, device: torch.device) -> None:
    q, k, v, num, den = table(device, 0.0)
    for weights in ((torch.full_like(num, NEG_INF), den), (num, torch.full_like(den, NEG_INF))):
        out = attend(q, k, v, *weights, 0.25, clip=1.0).out
        assert (out == 0).all()


@needs_triton
def test_one_split_and_many_agree(device: torch.device) -> None:
    one, many = (by_kernel(*table(device, 4.0), 0.25, clip=0.7, splits=splits).out for splits in (1, 3))
    torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-5)


def test_a_negative_clip_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="clip"):
        ops.weighted_attention(*table(device, 0.0), 0.25, clip=-1.0)
