"""Steps of refits in C, which reads everything once; what is not a step is the reference's own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops.common.native import LANES, divide, program
from kvsketch.ops.refit_steps import Descent, Dual
from kvsketch.ops.refit_steps.reference import errors, stepped_values, value_step, weighed

__all__ = ["dual_step", "errors", "stepped_values", "supported", "value_step", "weighed", "weight_steps"]


def supported(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.shape[-1] % LANES == 0 and x.stride()[-2:] == (x.shape[-1], 1)


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """See `kvsketch.ops.refit_steps`. Problems are divided among as many threads as torch uses."""
    gram, *others = descent
    by = (ctypes.c_float * len(speeds))(*speeds)

    def steps(begin: int, end: int) -> None:
        slope = torch.empty(gram.shape[2])
        program("kvsketch_weight_steps")(
            end - begin, *gram.shape[1:], gram[begin:].data_ptr(), gram.stride(0),
            *(x[begin:].data_ptr() for x in others), slope.data_ptr(), len(speeds), by,
        )  # fmt: skip

    divide(steps, len(gram), torch.get_num_threads())


def dual_step(state: Dual, product: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    sums = torch.empty(4, product.shape[2])
    program("kvsketch_dual_step")(*product.shape, *(x.data_ptr() for x in (product, *state, sums)))
