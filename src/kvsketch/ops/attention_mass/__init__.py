"""How much attention each token received: column sums of the softmax, without the matrix.

    mass_j = sum over rows i that see j of  exp((s_ij + g_ij) / tau) / sum_j' exp((s_ij' + g_ij') / tau)

with s_ij = scale * <q_i, k_j> and, on request, Gumbel noise g_ij. `reference.py` is the definition in torch, a block
of rows at a time. `kernel.py` launches the Triton programs of `device.py` (one pass for the logarithm of each row's
sum, one that draws the same noise again and adds up the columns) and of `decode.py` (a single query, from its keys or
from the logits that attention has left). Memory grows with the number of tokens, not with its square.
`kvsketch.ops.attention_mass` and `kvsketch.ops.mass_from_logits` choose; this module holds what is shared.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, S columns (keys), D
head size. A row is one query of one query head. A place is a logical index, a position is that without left padding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.random import hash_combine, initial_state

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("sum", "mean", "max")
HIDDEN = 2**30  # the place of a column that no query sees


class Noise(NamedTuple):
    """Gumbel noise, a function of (seed, layer, query head, row position, column position) and of nothing else."""

    seed: int
    layer: int
    first_head: int = 0  # number of the first KV head; query heads count from there


class Temperature(NamedTuple):
    """A temperature that goes from `start` to `end` in `steps` tokens after the first `since` ones, and stays there."""

    start: float = 1.0
    end: float = 1.0
    steps: int = 1
    since: int = 0

    @property
    def slope(self) -> float:
        return (self.end - self.start) / self.steps


class RowLogits(NamedTuple):
    """What the attention of one query per row leaves: s_j = scale * <q, k_j>, anything at empty slots."""

    logits: Tensor  # [B, Hq, S] fp32
    row_lse: Tensor | None  # [B, Hq] fp32, log of the sum of exp(s_j) over the slots in use; None: not known


def stream(noise: Noise) -> int:
    """The state that the noise of one layer starts from, before the query head."""
    return _stream(noise.seed, noise.layer)


@functools.lru_cache(maxsize=4096)
def _stream(seed: int, layer: int) -> int:
    return int(hash_combine(torch.tensor(initial_state(seed), dtype=torch.int64), layer))


def is_plain(temperature: Temperature, noise: Noise | None) -> bool:
    """Whether the softmax is that of plain attention, so that its row sums serve."""
    return noise is None and temperature.start == temperature.end == 1.0


def reduce_group(mass: Tensor, kv_heads: int, reduce: str) -> Tensor:  # [B, H, S] fp32
    """One number per column for the query heads of each KV head, from one per query head [B, Hq, S]."""
    grouped = mass.unflatten(1, (kv_heads, -1))
    if reduce == "max":
        return grouped.amax(2).float()
    return (grouped.sum(2) if reduce == "sum" else grouped.mean(2)).float()


def check_arguments(
    q: Tensor,
    k: Tensor,
    scale: float,
    seen: int | Tensor | None,
    index: Tensor | None,
    padding: Tensor | None,
    temperature: Temperature,
    noise: Noise | None,
    row_lse: Tensor | None,
    reduce: str,
    into: Tensor | None,
) -> None:
    """Raise ValueError when a shape, a dtype or a choice does not fit the others."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, length, size], got {list(tensor.shape)}.")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(
            f"q and k must share one dtype of float32, bfloat16, float16, float64; "
            f"got q {q.dtype}, k {k.dtype}. Cast them first."
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}.")
    batch, query_heads, queries, size = q.shape
    kv_heads, columns = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(
            f"k must be [{batch}, heads, columns, {size}] to match q {list(q.shape)}, got {list(k.shape)}."
        )
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"q has {query_heads} heads, which is not a multiple of the {kv_heads} heads of k.")
    if index is None and (seen is not None or queries > columns):
        raise ValueError(
            f"without index, k holds every token seen: {queries} queries need as many columns or more, not {columns}, "
            f"and seen follows from k; pass index [{batch}, {kv_heads}, {columns}] for slots in any order."
        )
    if index is not None and seen is None:
        raise ValueError("index needs seen, the number of tokens seen including those of q: slots do not tell it.")
    per_column = [batch, kv_heads, columns]
    _check_shapes(index=(index, per_column), into=(into, per_column), padding=(padding, [batch]))
    _check_shapes(row_lse=(row_lse, [batch, query_heads, queries]))
    _check_softmax(temperature, noise, row_lse, reduce, into)


def check_logits(
    logits: Tensor,
    index: Tensor,
    row_lse: Tensor | None,
    padding: Tensor | None,
    temperature: Temperature,
    noise: Noise | None,
    reduce: str,
    into: Tensor | None,
) -> None:
    """The same for logits [B, Hq, S] of slots index [B, H, S]."""
    for name, tensor in (("logits", logits), ("index", index)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions [batch, heads, slots], got {list(tensor.shape)}.")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}; ops.weighted_attention returns them so.")
    batch, query_heads, columns = logits.shape
    kv_heads = index.shape[1]
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"logits has {query_heads} heads, which is not a multiple of the {kv_heads} heads of index.")
    per_column = [batch, kv_heads, columns]
    _check_shapes(index=(index, per_column), into=(into, per_column), padding=(padding, [batch]))
    _check_shapes(row_lse=(row_lse, [batch, query_heads]))
    _check_softmax(temperature, noise, row_lse, reduce, into)


def _check_shapes(**expected: tuple[Tensor | None, list[int]]) -> None:
    for name, (given, shape) in expected.items():
        if given is not None and list(given.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {list(given.shape)}.")


def _check_softmax(
    temperature: Temperature, noise: Noise | None, row_lse: Tensor | None, reduce: str, into: Tensor | None
) -> None:
    if into is not None and (into.dtype != torch.float32 or not into.is_contiguous()):
        raise ValueError(f"into must be contiguous float32, got {into.dtype} with strides {into.stride()}.")
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r} is not one of {', '.join(REDUCTIONS)}.")
    if not (temperature.start > 0 and temperature.end > 0 and temperature.steps >= 1):
        raise ValueError(f"{temperature} must have positive temperatures and at least one step.")
    if row_lse is not None and not is_plain(temperature, noise):
        raise ValueError(
            "row_lse holds the sums of plain attention: it serves temperature 1 without noise only; pass None."
        )
