"""The operations every method is built from. This module is the single place that chooses between kernel and reference.

Each operation has a package of its own: `reference.py` in torch, the truth, beside `kernel.py` in Triton. A CUDA tensor
goes to the kernel when the kernel serves the call, everything else to the reference. `KVSKETCH_KERNELS=reference` turns
the kernels off, for a second opinion on a result.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kvsketch.ops.random import gumbel, uniform
from kvsketch.ops.weighted_attention import check_arguments
from kvsketch.ops.weighted_attention.reference import weighted_attention as weighted_attention_reference

__all__ = ["gumbel", "kernel_for", "uniform", "weighted_attention"]

KERNEL_CHOICES = ("auto", "reference")


def kernel_for(operation: str, device: torch.device) -> ModuleType | None:
    """The module with the Triton kernel of an operation, or None where the reference is to be used."""
    choice = os.environ.get("KVSKETCH_KERNELS", "auto")
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"KVSKETCH_KERNELS={choice!r} is not one of {', '.join(KERNEL_CHOICES)}; unset it or use one.")
    if choice == "reference" or device.type != "cuda":
        return None
    return _load_kernel(operation)


@functools.cache
def _load_kernel(operation: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): {operation} runs its slower torch reference. Install triton.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return importlib.import_module(f"kvsketch.ops.{operation}.kernel")


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[False] = ...,
    return_logits: Literal[False] = ...,
) -> Tensor: ...


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    return_state: bool = ...,
    return_logits: bool = ...,
) -> Any: ...


def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    return_state: bool = False,
    return_logits: bool = False,
) -> Any:
    """Attention over weighted slots, for query head h with KV head h // G:

        out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

    q [B, Hq, N, D]; k [B, H, S, D]; v [B, H, Sv, Dv], Sv <= S: later slots count in the denominator only.
    log_num, log_den [B, H, S]: None is zero, -inf is legal; the same object twice (or None twice) needs one sum only.
    bias: added to s_i, or boolean (True: visible), [B or 1, Hq or H or 1, N or 1, S]; the lowest finite number of its
      dtype hides a slot like -inf.
    softcap: s_i becomes softcap * tanh(s_i / softcap). sink_logits [Hq]: one more logit in the denominator.
    lengths [B, H] integers: slots from there on are not read and may hold anything; other slots must be finite even
      when their weights are -inf.
    An empty numerator or denominator gives 0. Internally float32 (float64 for float64); the result has the dtype of q.

    Returns out [B, Hq, N, Dv]. With return_state, (out, (log of the numerator's weights, log of the denominator)), each
    [B, Hq, N] float32. With return_logits, s_i [B, Hq, N, S] float32 (after softcap, without bias and weights, -inf
    beyond lengths) comes last.
    """
    check_arguments(q, k, v, log_num, log_den, bias, softcap, sink_logits, lengths)
    attend = weighted_attention_reference
    kernel = kernel_for("weighted_attention", q.device)
    if kernel is not None and kernel.supported(q, k, v):
        attend = kernel.weighted_attention
    result = attend(
        q, k, v, log_num, log_den, scale,
        bias=bias, softcap=softcap, sink_logits=sink_logits, lengths=lengths, return_logits=return_logits,
    )  # fmt: skip
    extras: list[Any] = []
    if return_state:
        extras.append((result.log_sum_num, result.log_sum_den))
    if return_logits:
        extras.append(result.logits)
    return (result.out, *extras) if extras else result.out
