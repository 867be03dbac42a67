"""Attention mass from the logits of a decode step, in C; whole prompts are the reference's own."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.attention_mass import REDUCTIONS, Options, reference
from kvsketch.ops.attention_mass.reference import attention_mass
from kvsketch.ops.common.native import address, on_cpu, program

__all__ = ["attention_mass", "mass_from_logits", "supported"]


def supported(*call: object) -> bool:
    """Every call; `mass_from_logits` looks at its options."""
    return True


def mass_from_logits(logits: Tensor, options: Options) -> Tensor:
    index, row_lse, into = options.index, options.row_lse, options.into
    assert index is not None
    if row_lse is None or not on_cpu(logits, index, row_lse) or index.dtype != torch.int32:
        return reference.mass_from_logits(logits, options)
    (batch, heads, slots), padding = index.shape, options.padding
    padding = None if padding is None else padding.long()
    program("kvsketch_mass_from_logits")(
        batch * heads, heads, logits.shape[1] // heads, slots, logits.data_ptr(), row_lse.data_ptr(),
        index.data_ptr(), address(padding), REDUCTIONS.index(options.reduce), options.fade, into.data_ptr(),
    )  # fmt: skip
    return into
