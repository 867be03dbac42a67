"""Steps of refits in C, which reads everything once; what is not a step is the reference's own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops.common.native import LANES, program
from kvsketch.ops.refit_steps import Descent, Dual
from kvsketch.ops.refit_steps.reference import errors, stepped_values, value_step, weighed

__all__ = ["dual_step", "errors", "stepped_values", "supported", "value_step", "weighed", "weight_steps"]


def supported(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.shape[-1] % LANES == 0 and x.stride()[-2:] == (x.shape[-1], 1)


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """See `kvsketch.ops.refit_steps`."""
    gram, *others = descent
    slope = torch.empty(gram.shape[2])
    program("kvsketch_weight_steps")(
        *gram.shape, gram.data_ptr(), gram.stride(0), *(x.data_ptr() for x in (*others, slope)),
        len(speeds), (ctypes.c_float * len(speeds))(*speeds),
    )  # fmt: skip


def dual_step(state: Dual, product: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    sums = torch.empty(4, product.shape[2])
    program("kvsketch_dual_step")(*product.shape, *(x.data_ptr() for x in (product, *state, sums)))
