"""One call of `weighted_attention`: its sizes, and whether they fit together. Legend as there."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.checks import check, check_dtypes, check_groups
from kvsketch.ops.common.ragged import Ragged
from kvsketch.ops.common.tensors import DTYPES


class Sizes(NamedTuple):
    """H, S, Sv and Dv."""

    kv_heads: int
    slots: int
    value_slots: int
    value_size: int


class Arguments(NamedTuple):
    """One call, as `weighted_attention` describes it."""

    q: Tensor
    k: Tensor | CodedSlots
    v: Tensor | CodedSlots
    log_num: Tensor | None
    log_den: Tensor | None
    scale: float
    bias: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    lengths: Tensor | None = None
    clip: float | None = None
    return_logits: bool = False
    ragged: Ragged | None = None
    pages: Tensor | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of what is read."""
        keys, values = self._shapes()
        return Sizes(keys[1], keys[2], *values[2:])

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of keys and values, [B, H, S, D]; S is the largest head of ragged ones."""
        ragged = self.ragged
        if self.pages is not None:
            return (len(self.pages), *self.k.shape[1:]), (len(self.pages), *self.v.shape[1:])
        if ragged is None:
            return tuple(self.k.shape), tuple(self.v.shape)
        sizes = (part.shape[1] if isinstance(part, Tensor) else part.codec.size for part in (self.k, self.v))
        keys, values = ((*ragged.start.shape, ragged.most, size) for size in sizes)
        return keys, values

    @property
    def tied(self) -> bool:
        """Whether one sum serves as numerator's and denominator's."""
        sizes = self.sizes
        return self.log_num is self.log_den and sizes.value_slots == sizes.slots

    def by_row(self) -> Arguments:
        """The same call with keys and values row by row, and equal heads, whose lengths are those of the heads."""
        ragged = self.ragged
        if self.pages is not None:
            k, v = (rows_in(part, self.pages.clamp_min(0)) for part in (self.k, self.v))
            return self._replace(k=k, v=v, pages=None)
        if ragged is None:
            return self
        k, v = (
            ragged.unpacked(part) if isinstance(part, Tensor) else
            replace(part, codes=ragged.unpacked(part.codes), steps=ragged.unpacked(part.steps))
            for part in (self.k, self.v)
        )  # fmt: skip
        log_num = None if self.log_num is None else ragged.unpacked(self.log_num, float("-inf"))
        log_den = log_num
        if self.log_den is not self.log_num:
            log_den = None if self.log_den is None else ragged.unpacked(self.log_den, float("-inf"))
        return self._replace(k=k, v=v, log_num=log_num, log_den=log_den, lengths=ragged.capacity, ragged=None)

    def check(self) -> None:
        """Raise ValueError when a shape or dtype does not fit the others."""
        q, k, v = self.q, self.k, self.v
        for name, part in (("q", q), ("k", k), ("v", v)):
            if isinstance(part, CodedSlots):
                continue
            if self.ragged is not None and name != "q":
                check(name, part, (self.ragged.total, "size"))
            elif part.dim() != 4:
                check(name, part, ("batch", "heads", "length", "size"))
            if part.dtype != q.dtype or part.dtype not in DTYPES:
                check_dtypes(**{"q": q, name: part})
        batch, query_heads, _, size = q.shape
        keys, values = self._shapes()
        kv_heads, slots = keys[1:3]
        if keys[0] != batch or keys[3] != size:
            raise ValueError(f"k must be [{batch}, heads, slots, {size}] to match q {list(q.shape)}, got {list(keys)}.")
        if not kv_heads or query_heads % kv_heads:
            check_groups(query_heads, kv_heads)
        if values[:2] != keys[:2] or values[2] > slots:
            raise ValueError(f"v must be [{batch}, {kv_heads}, at most {slots}, size], got {list(values)}.")
        each = (batch, kv_heads, slots) if self.ragged is None else (self.ragged.total,)
        beside_slots = ("log_num", self.log_num, each), ("log_den", self.log_den, each)
        by_head = ("lengths", self.lengths, each[:2]), ("sink_logits", self.sink_logits, (query_heads,))
        for name, tensor, shape in (*beside_slots, *by_head):
            # One that does not fit is told by the check.
            if tensor is not None and tensor.shape != shape:
                check(name, tensor, shape)
        if self.pages is not None and self.ragged is not None:
            raise ValueError("pages hold heads of one size; ragged heads say themselves where they lie.")
        coded = [part for part in (k, v) if isinstance(part, CodedSlots)]
        beside = [part for each in coded for part in (each.center, each.exact, each.exact_at)]
        apart = {part.stride(0) for part in beside if part.numel()}
        if self.pages is not None and len(apart) > 1:
            raise ValueError("centers and exact slots of pages lie in the pages, equally far apart.")
        if self.ragged is not None and self.lengths is not None:
            raise ValueError("lengths belong to heads of one size; a ragged head has its capacity.")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}; pass None for no cap.")
        if self.clip is not None and not self.clip >= 0:
            raise ValueError(f"clip must be 0 or more, got {self.clip}; pass None to take the sums as they are.")
        self._check_bias()

    def _check_bias(self) -> None:
        bias = self.bias
        if bias is None:
            return
        batch, query_heads, queries, _ = self.q.shape
        kv_heads, slots = self.sizes[:2]
        fits = bias.dim() == 4 and bias.shape[3] == slots
        fits = fits and bias.shape[0] in (1, batch) and bias.shape[2] in (1, queries)
        if not fits or bias.shape[1] not in (1, kv_heads, query_heads):
            valid = f"[1 or {batch}, 1 or {kv_heads} or {query_heads}, 1 or {queries}, {slots}]"
            raise ValueError(f"bias must be {valid}, got {list(bias.shape)}.")
        if bias.dtype != torch.bool and not bias.is_floating_point():
            raise ValueError(f"bias must be boolean (True: visible) or floating point (added), got {bias.dtype}.")


def rows_in(part: Tensor | CodedSlots, pages: Tensor) -> Tensor | CodedSlots:
    """Keys or values [B, H, S, D] of pages [B]."""
    if isinstance(part, Tensor):
        return part[pages]
    center, exact, exact_at = (each[pages] for each in (part.center, part.exact, part.exact_at))
    return replace(
        part, center=center, exact=exact, exact_at=exact_at, codes=part.codes[pages], steps=part.steps[pages]
    )
