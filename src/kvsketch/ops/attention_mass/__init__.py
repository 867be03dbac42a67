"""How much attention each token received: column sums of the softmax, without the matrix.

Memory grows with the number of tokens, not with its square.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, S columns (keys), D
head size. A row is one query of one query head. A place is a logical index, a position is that without left padding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_choice, check_dtypes, check_groups
from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.random import hash_combine, initial_state

REDUCTIONS = ("sum", "mean", "max")
HIDDEN = 2**30  # the place of a column that no query sees


class Noise(NamedTuple):
    """Gumbel noise, a function of (seed, layer, query head, row position, column position) only."""

    seed: int
    layer: int
    first_head: int = 0  # number of the first KV head; query heads count from there


class Temperature(NamedTuple):
    """A temperature that goes from `start` to `end` in `steps` tokens after the first `since` ones, and stays there.

    `since` may be one number for each batch row, [B] int64.
    """

    start: float = 1.0
    end: float = 1.0
    steps: int = 1
    since: int | Tensor = 0

    @property
    def slope(self) -> float:
        return (self.end - self.start) / self.steps


NO_TEMPERATURE = Temperature()


class RowLogits(NamedTuple):
    """Logits of the attention of one query per row: s_j = scale * <q, k_j>; any number at empty slots."""

    logits: Tensor  # [B, Hq, S] fp32
    row_lse: Tensor | None  # [B, Hq] fp32, log of the sum of exp(s_j) over the slots in use; None: not known


def attention_mass(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    seen: int | Tensor | None = None,
    index: Tensor | None = None,
    padding: Tensor | None = None,
    temperature: float | Temperature = 1.0,
    noise: Noise | None = None,
    row_lse: Tensor | None = None,
    reduce: str = "sum",
    into: Tensor | None = None,
    fade: float = 1.0,
) -> Tensor:
    """Attention that each column received from the queries, the column sums of the softmax, [B, H, S] float32:

        mass_j = sum_i exp((s_ij + g_ij) / tau) / sum_j' exp((s_ij' + g_ij') / tau),     s_ij = scale * <q_i, k_j>

    q [B, Hq, N, D], the last N tokens seen; k [B, H, S, D], all tokens in order (S = seen) or, with index [B, H, S],
    slots in any order that hold the tokens index (negative: empty); then `seen`, a number or [1], is how many tokens
    were seen. A query sees no later token. padding [B]: left-padding tokens, which neither see nor are seen.
    temperature: tau, a number or a schedule. noise: g_ij is Gumbel noise, fresh for every row and column but the same
    at every call; None: 0. row_lse [B, Hq, N]: log of the inner sums if known (plain attention only): saves a pass.
    reduce: how the query heads of one KV head become one number: their sum, mean or max over these N queries.
    into: [B, H, S] float32 that becomes fade * into + mass, in place; it is returned.

    Memory is a few numbers per token and head; with one query there is no synchronisation.
    """
    _check_keys(q, k, scale, seen, index)
    into = torch.zeros(k.shape[:3], device=q.device) if into is None else into
    seen = k.shape[2] if seen is None else seen
    options = Options(into, seen, index, padding, _schedule(temperature), noise, row_lse, reduce, fade)
    options.check(q.shape[:3], k.shape[1], k.shape[2])
    return implementation("attention_mass", q.device, q, k).attention_mass(q, k, scale, options)


def mass_from_logits(
    logits: Tensor,
    index: Tensor,
    seen: int | Tensor,
    *,
    row_lse: Tensor | None = None,
    padding: Tensor | None = None,
    temperature: float | Temperature = 1.0,
    noise: Noise | None = None,
    reduce: str = "sum",
    into: Tensor | None = None,
    fade: float = 1.0,
) -> Tensor:
    """The result of `attention_mass` for one query per row, from the logits of its attention, [B, H, S] float32:

        mass_j = exp((s_j + g_j) / tau) / sum_j' exp((s_j' + g_j') / tau)

    logits: s_j, [B, Hq, S] float32, as `weighted_attention` returns them; any number where the slot is empty.
    index [B, H, S]: the tokens in the slots, negative for empty ones. row_lse [B, Hq]: log of the sum if known (plain
    attention only). The rest as in `attention_mass`. No key is read, and the host never waits for the device.
    """
    each = ("batch", "heads", "slots")
    if logits.dim() != 3 or logits.dtype != torch.float32 or index.dim() != 3 or logits.shape[1] % index.shape[1]:
        check("logits", logits, each, torch.float32)
        check("index", index, each)
        check_groups(logits.shape[1], index.shape[1], "index", "logits")
    into = torch.zeros(index.shape, device=logits.device) if into is None else into
    options = Options(into, seen, index, padding, _schedule(temperature), noise, row_lse, reduce, fade)
    options.check(logits.shape[:2], index.shape[1], logits.shape[2])
    return implementation("attention_mass", logits.device, logits, index).mass_from_logits(logits, options)


def _schedule(temperature: float | Temperature) -> Temperature:
    if isinstance(temperature, Temperature):
        return temperature
    return NO_TEMPERATURE if temperature == 1.0 else Temperature(float(temperature), float(temperature))


@dataclass(slots=True)
class Options:
    """Which softmax is summed up, and where the sums go, as `attention_mass` describes them."""

    into: Tensor
    seen: int | Tensor
    index: Tensor | None = None
    padding: Tensor | None = None
    temperature: Temperature = NO_TEMPERATURE
    noise: Noise | None = None
    row_lse: Tensor | None = None
    reduce: str = "sum"
    fade: float = 1.0

    def check(self, rows: tuple[int, ...], kv_heads: int, columns: int) -> None:
        """Raise ValueError when a shape or a choice does not fit; `rows` is the shape of one number per row."""
        per_column = (rows[0], kv_heads, columns)
        given = ("index", self.index, per_column), ("into", self.into, per_column), ("padding", self.padding, rows[:1])
        for name, tensor, shape in (*given, ("row_lse", self.row_lse, rows)):
            # One that does not fit is told by the check.
            if tensor is not None and tensor.shape != shape:
                check(name, tensor, shape)
        if self.into.dtype != torch.float32:
            check("into", self.into, per_column, torch.float32)
        if not self.into.is_contiguous():
            raise ValueError(f"into must be contiguous, got strides {self.into.stride()}.")
        if self.reduce not in REDUCTIONS:
            check_choice("reduce", self.reduce, REDUCTIONS)
        if not (self.temperature.start > 0 and self.temperature.end > 0 and self.temperature.steps >= 1):
            raise ValueError(f"{self.temperature} must have positive temperatures and at least one step.")
        if self.row_lse is not None and not is_plain(self.temperature, self.noise):
            raise ValueError(
                "row_lse holds the sums of plain attention: it needs temperature 1 and no noise; pass None."
            )

    def add(self, mass: Tensor) -> Tensor:
        """Adds the mass of each query head, [B, Hq, S], to the sums: one number for the query heads of a KV head."""
        grouped = mass.unflatten(1, (self.into.shape[1], -1))
        reduced_over = {"sum": grouped.sum, "mean": grouped.mean, "max": grouped.amax}[self.reduce]
        return self.into.mul_(self.fade).add_(reduced_over(2).float())


def _check_keys(q: Tensor, k: Tensor, scale: float, seen: int | Tensor | None, index: Tensor | None) -> None:
    """Raise ValueError when queries and keys do not fit."""
    check("q", q, ("batch", "heads", "queries", "size"))
    check_dtypes(q=q, k=k)
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}.")
    batch, query_heads, queries, size = q.shape
    check("k", k, (batch, "heads", "columns", size))
    kv_heads, columns = k.shape[1:3]
    check_groups(query_heads, kv_heads)
    if index is None and (seen is not None or queries > columns):
        raise ValueError(
            f"without index, k holds every token seen: {queries} queries need as many columns or more, not {columns}, "
            f"and seen follows from k; pass index [{batch}, {kv_heads}, {columns}] for slots in any order."
        )
    if index is not None and seen is None:
        raise ValueError("index needs seen, the number of tokens seen including those of q: slots do not tell it.")


@functools.lru_cache(maxsize=4096)
def stream(noise: Noise) -> int:
    """The state that the noise of one layer starts from, before the query head."""
    return int(hash_combine(torch.tensor(initial_state(noise.seed), dtype=torch.int64), noise.layer))


def is_plain(temperature: Temperature, noise: Noise | None) -> bool:
    """Whether the softmax is that of plain attention, so that its row sums can be used."""
    return noise is None and temperature.start == temperature.end == 1.0
