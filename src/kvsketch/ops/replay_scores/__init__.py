"""How much a text would look at each of its own tokens if it came again: virtual replay.

    A_ij = scale <q~_i, k_j>   for the sinks and every token j of the chunk; q~: the query rotated to a place after it
    B_ij = scale <q_i, k_j>    for the tokens j <= i of the copy that is being read again
    p    = softmax over [A | B],     score_j = max over i and over the query heads of the group of p_ij   (A part)

With `copies`, keys that the tokens have when they really come again, B reads those in place of the first keys.
A rotary logit depends on a difference of positions alone, so a rotated query needs no second forward of the model. What
a token's own copy already explains (B) takes weight away from A, as it does in a real repetition.

Two passes, so that no matrix of tokens by tokens is held: the rows' sums first, then the columns' maxima.
Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H, P chunks of C tokens, E sinks, D head size.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.checks import check, check_groups
from kvsketch.ops.common.dispatch import implementation


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, *, chunks: int = 1, bare: int | Tensor = 0,
    hidden: Tensor | None = None, copies: Tensor | None = None, known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores [B, H, P C] float32, in [0, 1], of tokens in P = `chunks` chunks that know nothing of each other.

    again, q [B, Hq, P C, D]: the rotated queries and those of the first reading; k [B, H, P C, D]; sinks [B, H, E, D]:
    keys before the chunks that everything looks at, E may be 0; the first `bare` chunks do not, as many in all rows or
    [B] int64. hidden [B] int64: the first tokens of a row that are left padding; they ask nothing and score 0. copies:
    like k. known [B, Hq, P C] float32: the logarithm of each row's sum over B, which the first reading has computed; it
    saves a CPU a third of the work, and a GPU does not look at it.
    """
    check("q", q, ("B", "Hq", "n", "D"))
    check("again", again, q.shape)
    check("k", k, (q.shape[0], "H", *q.shape[2:]))
    check("sinks", sinks, (*k.shape[:2], "E", k.shape[3]))
    check("copies", copies, k.shape)
    check("known", known, q.shape[:3])
    check_groups(q.shape[1], k.shape[1])
    if chunks < 1 or q.shape[2] % chunks:
        raise ValueError(f"{q.shape[2]} tokens do not make {chunks} equal chunks.")
    made = implementation("replay_scores", q.device, q, k)
    scores: Tensor = made.replay_scores(again, q, k, sinks, scale, chunks, bare, hidden, copies, known)
    return scores
