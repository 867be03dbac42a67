"""Steps of refits in C, which reads everything once; what is not a step is the reference's own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops.common.native import LANES, parallel_for, program
from kvsketch.ops.refit_steps import Descent, reference
from kvsketch.ops.refit_steps.reference import errors, stepped_values, value_step, weighed

__all__ = [
    "both_errors", "descent_of", "dual_values", "errors", "solved_values", "squared", "stepped_values", "supported",
    "value_step", "weighed", "weight_steps",
]  # fmt: skip


def supported(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.shape[-1] % LANES == 0 and x.stride()[-2:] == (x.shape[-1], 1)


def descent_of(gram: Tensor, a: Tensor, share: Tensor, ridge: float) -> Descent:
    """See `kvsketch.ops.refit_steps`."""
    shape, share = (len(gram), gram.shape[2]), share if share.stride(1) == 1 else share.contiguous()
    if not supported(a):
        return reference.descent_of(gram, a, share, ridge)
    wanted, rate, held = torch.empty(shape), torch.empty(shape), torch.empty(len(gram), 1)

    def begin_descent(begin: int, end: int) -> None:
        room = torch.empty(shape[1])
        program("kvsketch_descent")(
            end - begin, *gram.shape[1:], gram[begin:].data_ptr(), gram.stride(0), a.shape[1], a[begin:].data_ptr(),
            a.stride(0), share[begin:].data_ptr(), share.stride(0), ridge,
            *(x[begin:].data_ptr() for x in (wanted, rate, held)), room.data_ptr(),
        )  # fmt: skip

    parallel_for(begin_descent, len(gram), torch.get_num_threads())
    return Descent(gram, wanted, rate, held, torch.ones(shape), torch.ones(shape))


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

    parallel_for(steps, len(gram), torch.get_num_threads())


def dual_values(
    a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    (rows, count), columns = a.shape[1:], plain.shape[2]
    target, others = _dense(target), [x.contiguous() for x in (w, ridge, plain)]
    result = torch.empty(plain.shape), torch.empty(plain.shape)
    need = program("kvsketch_dual_room")(rows, count)

    def fit(begin: int, end: int) -> None:
        room = torch.empty(need)
        program("kvsketch_dual_values")(
            end - begin, rows, count, columns, a[begin:].data_ptr(), a.stride(0),
            *(x[begin:].data_ptr() for x in (*others, target)), target.stride(0), steps, room.data_ptr(),
            *(x[begin:].data_ptr() for x in result),
        )  # fmt: skip

    parallel_for(fit, len(a), torch.get_num_threads())
    return result


def squared(a: Tensor) -> Tensor:
    """See `kvsketch.ops.refit_steps`."""
    rows, count = a.shape[1:]
    gram = torch.empty(len(a), count, count, dtype=torch.float64)

    def square(begin: int, end: int) -> None:
        room = torch.empty(rows * count, dtype=torch.float64)
        program("kvsketch_squared")(
            end - begin, rows, count, a[begin:].data_ptr(), a.stride(0), room.data_ptr(), gram[begin:].data_ptr()
        )

    parallel_for(square, len(a), torch.get_num_threads())
    return gram


def solved_values(
    gram: Tensor, a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    (rows, count), columns = a.shape[1:], plain.shape[2]
    target, gram, others = _dense(target), gram.contiguous(), [x.contiguous() for x in (w, ridge, plain)]
    result = torch.empty(plain.shape), torch.empty(plain.shape)
    need = program("kvsketch_solved_room")(rows, count, columns)

    def solve(begin: int, end: int) -> None:
        room = torch.empty(need, dtype=torch.float64)
        program("kvsketch_solved_values")(
            end - begin, rows, count, columns, gram[begin:].data_ptr(), a[begin:].data_ptr(), a.stride(0),
            *(x[begin:].data_ptr() for x in (*others, target)), target.stride(0), room.data_ptr(),
            *(x[begin:].data_ptr() for x in result),
        )  # fmt: skip

    parallel_for(solve, len(a), torch.get_num_threads())
    return result


def both_errors(
    a: Tensor, plain: Tensor, parts: Tensor, w: Tensor, target: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    (rows, count), columns = a.shape[1:], plain.shape[2]
    target, share = _dense(target), share if share.stride(1) == 1 else share.contiguous()
    values = [x.float().contiguous() for x in (plain, parts, w)]
    result, need = (torch.empty(len(a)), torch.empty(len(a))), program("kvsketch_errors_room")(rows, count, columns)

    def compare(begin: int, end: int) -> None:
        room = torch.empty(need)
        program("kvsketch_both_errors")(
            end - begin, rows, count, columns, a[begin:].data_ptr(), a.stride(0),
            *(x[begin:].data_ptr() for x in (*values, target)), target.stride(0), share[begin:].data_ptr(),
            share.stride(0), room.data_ptr(), *(x[begin:].data_ptr() for x in result),
        )  # fmt: skip

    parallel_for(compare, len(a), torch.get_num_threads())
    return result


def _dense(x: Tensor) -> Tensor:
    """With rows that lie one behind the other, whatever lies between problems."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
