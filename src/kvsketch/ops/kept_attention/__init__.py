"""What queries see of the slots that are kept, beside what they see of all.

    x_ij = scale <q_i, k_j>,   p_i = softmax over all slots j of x_ij,   O_i = sum_j p_ij v_j,   A = p[:, kept]

Many small problems of the same size at once, as `methods.rehearse` fits them. No [Q, C] matrix is held on a GPU.
Legend: N problems, Q queries, C slots, K the most that any problem keeps, D, Dv sizes.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A [N, Q, K] in bfloat16, or float32 for such queries, and O [N, Q, Dv] float32.

    q [N, Q, D], k [N, C, D], v [N, C, Dv]. kept [N, K] int64: numbers of slots, -1 for none, where A is 0. hidden
    [N, C] bool: slots that are not there.
    """
    count, _, size = q.shape
    if k.shape[::2] != (count, size) or v.shape[:2] != k.shape[:2] or kept.shape[:1] != (count,):
        raise ValueError(
            f"q, k, v and kept must be [N, Q, D], [N, C, D], [N, C, Dv] and [N, K], got {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)} and {list(kept.shape)}."
        )
    if hidden is not None and hidden.shape != k.shape[:2]:
        raise ValueError(f"hidden {list(hidden.shape)} must be [N, C], with k {list(k.shape)}.")
    a, out = implementation("kept_attention", q.device, q, v).kept_attention(q, k, v, kept, scale, hidden)
    return a, out
