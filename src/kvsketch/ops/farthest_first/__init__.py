"""Greedy k-center: centers chosen one after the other, each the key farthest from those before it.

    S_1 = {first key},   S_{t+1} = S_t + argmax_i D_t(i),   D_t(i) = min over c in S_t of ||k_i - k_c||^2

Ties go to the lowest index. Squared distances are |k_i|^2 + |k_c|^2 - 2 <k_i, k_c> in float32; what lies below the
rounding of that sum counts as 0, so that equal keys have distance 0. The radius, max_i sqrt(D_k(i)), is at most twice
the best possible (Gonzalez 1985). `reference.py` is the definition in torch. `kernel.py` takes many centers per pass
over the keys:

- candidates are the PER_TILE farthest keys of each tile of consecutive keys, tiles being counted from the first key
  that takes part; every other key is at most as far as its tile's runner-up. D only falls, so as long as the farthest
  candidate lies above all runners-up it is the farthest key.
- `exact` replays the greedy choice among the candidates up to that point; the centers are those of the definition.
- `coarse` accepts at once every candidate at least SLACK times as far as the farthest one, unless a farther candidate
  lies within that distance. Centers stay SLACK * radius apart, so the radius is at most 2 / SLACK times the best
  possible.

Legend: B batch rows, H KV heads, N keys, D head size, M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_choice, check_keys
from kvsketch.ops.common.dispatch import implementation

FORMS = ("exact", "coarse")
# With more candidates the exact form finds more centers in a round; the coarse one does not.
PER_TILE = {"exact": 8, "coarse": 4}
MAX_TILES = 64
MIN_TILE = 32
SLACK = 0.9
# A squared distance below this share of |k_i|^2 + |k_c|^2 is rounding.
ROUNDING = 2.0**-16


@dataclass(frozen=True)
class Centers:
    """The chosen keys in the order of choice, and how far the farthest other key is from them."""

    index: Tensor  # [B, H, count] int64, -1 where a row has fewer keys
    radius: Tensor  # [B, H] float32


def farthest_first(
    keys: Tensor, count: int, *, valid: Tensor | None = None, given: int = 1, form: str = "exact"
) -> Centers:
    """Greedy k-center: `count` keys of each head, each the farthest from those chosen before it.

    keys [B, H, N, D]; valid [B, H, N] bool: the keys that take part (None: all). The first `given` valid keys are
    centers from the start. form: `exact`, or `coarse` with fewer passes over the keys and a radius at most 1 / 0.9
    times the bound. Returns the index [B, H, count] int64 of the centers in the order of choice, -1 where there are
    no more keys, and the radius [B, H] float32. A smaller count gives the beginning of the same list.
    """
    check_keys(keys)
    check("valid", valid, keys.shape[:3], torch.bool)
    if count < 0 or given < 1:
        raise ValueError(f"count={count} must be 0 or more and given={given} 1 or more.")
    check_choice("form", form, FORMS)
    if valid is None:
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    return implementation("farthest_first", keys.device, keys).farthest_first(keys, count, valid, given, form)


class Tiles(NamedTuple):
    """Where the tiles of each row and head begin, and how many keys each has: a power of two, for MAX_TILES at most."""

    origin: Tensor  # [B, H] int64, the first key that takes part
    width: Tensor  # [B, H] int64

    @classmethod
    def of(cls, valid: Tensor) -> Tiles:
        """From the row's own keys only, so that left padding changes nothing."""
        origin = valid.byte().argmax(-1)
        least = (valid.shape[2] - origin + MAX_TILES - 1) // MAX_TILES
        powers = MIN_TILE * 2 ** torch.arange(32, device=valid.device)
        return cls(origin, powers[torch.searchsorted(powers, least)])


def widest_tile(keys: int) -> int:
    """The width of a tile when all of `keys` take part; no row has wider ones."""
    return max(MIN_TILE, 1 << (-(-keys // MAX_TILES) - 1).bit_length())
