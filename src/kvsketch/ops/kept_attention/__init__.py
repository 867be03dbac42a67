"""What queries see of the slots that are kept, beside what they see of all.

    m_i = sum over all slots j of exp(scale <q_i, k_j>),   O_i = sum_j exp(scale <q_i, k_j>) v_j / m_i
    A_ij = exp(scale <q_i, k'_j>) / (m_i + s_i) for the kept slots j,   share_i = m_i / (m_i + s_i)

k' are the keys as stored, s the mass of slots elsewhere, such as sinks. Many small problems of the same size at
once, as `methods.rehearse` fits them. No [Q, C] matrix is held on a GPU.
Legend: N problems, Q queries, C slots, K the most that any problem keeps, D, Dv sizes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.common.checks import check
from kvsketch.ops.common.dispatch import implementation


class Kept(NamedTuple):
    """What queries see."""

    attention: Tensor  # A [N, Q, K] in bfloat16, or float32 for such queries
    outputs: Tensor  # O [N, Q, Dv] float32
    share: Tensor  # [N, Q] float32


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None = None,
    held: Tensor | None = None, elsewhere: Tensor | None = None,
) -> Kept:  # fmt: skip
    """q [N, Q, D], k [N, C, D], v [N, C, Dv].

    kept [N, K] int64: numbers of slots, -1 for none, where A is 0. hidden [N, C] bool: slots that are not there. held
    [N, K, D]: k' of the kept slots, else k. elsewhere [N, Q] float32: log s, else no mass.
    """
    count, _, size = q.shape
    if k.shape[::2] != (count, size) or v.shape[:2] != k.shape[:2] or kept.shape[:1] != (count,):
        raise ValueError(
            f"q, k, v and kept must be [N, Q, D], [N, C, D], [N, C, Dv] and [N, K], got {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)} and {list(kept.shape)}."
        )
    check("hidden", hidden, k.shape[:2])
    check("held", held, (*kept.shape, size))
    check("elsewhere", elsewhere, q.shape[:2])
    chosen = implementation("kept_attention", q.device, q, v)
    result: Kept = chosen.kept_attention(q, k, v, kept, scale, hidden, held, elsewhere)
    return result
