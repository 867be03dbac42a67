"""Keys of a bounded table rotated by the number of dropped tokens: rotary distances become distances in the cache.

    gone_i = (tokens seen after i) - (tokens stored after i)
    k_i'   = k_i rotated by gone_i positions:    k[c] + i k[c + half]  times  exp(i gone_i angle_c),     c < half

A rotary logit depends only on the distance between query and key. So the distance from slot i to the newest token
becomes the number of stored tokens between them. Channels from 2 half on are not rotary and stay.

Angles come as whole numbers of 2^-40 turns. Products of integers wrap around as angles do, so a rotation by a million
positions is as exact as by one; a float32 product would be off by hundredths of a radian.

Legend: B batch rows, H KV heads, S slots, D head size.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation

TURN = 1 << 40  # one full turn


def rotate_keys(keys: Tensor, index: Tensor, seen: Tensor, turns: Tensor) -> Tensor:
    """Keys [B, H, S, D] rotated by the number of tokens dropped after each, so that rotary distances skip these.

    index [B, H, S]: the tokens in the slots, each in one slot only; negative for empty slots, whose keys stay. seen
    [1]: tokens seen. turns [half] int64: the angle of one position in channels c and c + half (`whole_turns`). Computed
    in float32 and rounded once to the dtype of the keys; the host never waits for the device.
    """
    if keys.dim() != 4 or index.shape != keys.shape[:3] or index.is_floating_point():
        raise ValueError(
            f"index must hold a whole number for each slot of keys [B, H, S, D], got {index.dtype} "
            f"{list(index.shape)} for {list(keys.shape)}."
        )
    check_turns(turns, keys.shape[3])
    if seen.numel() != 1 or seen.is_floating_point():
        raise ValueError(f"seen must be one whole number, the tokens seen, got {seen.dtype} {list(seen.shape)}.")
    return implementation("rotate_keys", keys.device, keys).rotate_keys(keys, index, seen, turns)


@functools.lru_cache(maxsize=256)
def whole_turns(angles: tuple[float, ...], device: torch.device) -> Tensor:  # [half] int64
    """Radians per position as whole numbers of 1 / TURN turns, on the device; made once."""
    return torch.tensor([round(angle / (2 * math.pi) * TURN) for angle in angles], dtype=torch.int64, device=device)


def angles_of(positions: Tensor, turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [B, P, half] each
    """Cosine and sine of the angles of positions [B, P], for `rotate_by` of vectors of a dtype."""
    phase = positions.unsqueeze(-1) * turns
    phase = ((phase + TURN // 2) & (TURN - 1)) - TURN // 2
    angle = phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / TURN)
    return angle.cos(), angle.sin()


def check_turns(turns: Tensor, size: int) -> None:
    """Raise ValueError unless the turns fit heads of a size."""
    if turns.dim() != 1 or turns.dtype != torch.int64 or 2 * turns.shape[0] > size:
        raise ValueError(
            f"turns must be int64 [half] with half at most {size // 2} for heads of size {size}, "
            f"got {turns.dtype} {list(turns.shape)}; see rotate_keys.whole_turns."
        )
