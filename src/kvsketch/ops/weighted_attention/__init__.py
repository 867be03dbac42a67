"""Attention over weighted slots: what every compressed cache is read with.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, S slots, Sv slots that
carry a value (the last S - Sv carry a key only), D key size, Dv value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.common.ragged import Ragged
from kvsketch.ops.weighted_attention.call import Arguments

__all__ = ["Arguments", "Attended", "weighted_attention"]


def weighted_attention(
    q: Tensor,
    k: Tensor | CodedSlots,
    v: Tensor | CodedSlots,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    clip: float | None = None,
    ragged: Ragged | None = None,
    pages: Tensor | None = None,
    return_state: bool = False,
    return_logits: bool = False,
) -> Any:
    """Attention over weighted slots, for query head h with KV head h // G:

        out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

    q [B, Hq, N, D]; k [B, H, S, D]; v [B, H, Sv, Dv], Sv <= S: later slots count in the denominator only.
      Either may be quantised (`ops.codec`).
    log_num, log_den [B, H, S]: None is zero, -inf is legal; the same object twice (or None twice) needs one sum only.
    bias: added to s_i, or boolean (True: visible), [B or 1, Hq or H or 1, N or 1, S]; the lowest finite number of its
      dtype hides a slot like -inf.
    softcap: s_i becomes softcap * tanh(s_i / softcap). sink_logits [Hq]: one more logit in the denominator.
    lengths [B, H] integers: slots from there on are not read and may have any value; other slots must be finite even
      when their weights are -inf.
    clip: the denominator is moved to within a factor exp(clip) of the numerator's sum of weights, before the sink logit
      joins it; the sums returned are those before.
    ragged: heads of different sizes in one flat store; k, v and the weights are [slots of all heads, ...] then, S the
      largest head, and slots after a head do not exist.
    pages [B] int64: k [P, H, S, D] and v [P, H, Sv, Dv] of row b, and the parts of their codes, are in page
      pages[b]; a negative number reads page 0.
    An empty numerator or denominator gives 0. Internally float32 (float64 for float64); the result has the dtype of q.

    Returns out [B, Hq, N, Dv]. With return_state, (out, (log of the numerator's weights, log of the denominator)), each
    [B, Hq, N] float32. With return_logits, s_i [B, Hq, N, S] float32 (after softcap, without bias and weights, -inf
    beyond lengths) comes last.
    """
    call = Arguments(
        q, k, v, log_num, log_den, scale, bias, softcap, sink_logits, lengths, clip, return_logits, ragged, pages
    )  # fmt: skip
    call.check()
    attended: Attended = implementation("weighted_attention", q.device, call).weighted_attention(call)
    return attended.returned(return_state, return_logits)


class Attended(NamedTuple):
    """The output and what can be asked for beside it."""

    out: Tensor  # [B, Hq, N, Dv], dtype of q
    log_sum_num: Tensor  # [B, Hq, N] fp32, log of the numerator's sum of weights, -inf when empty
    log_sum_den: Tensor  # [B, Hq, N] fp32, log of the denominator, sink logit included, -inf when empty
    logits: Tensor | None = None  # [B, Hq, N, S] fp32, s_i after softcap, before bias and weights; -inf beyond lengths

    def returned(self, state: bool, logits: bool = False) -> Any:
        """The output alone, or a tuple with what was asked for."""
        extras: list[Any] = [(self.log_sum_num, self.log_sum_den)] if state else []
        if logits:
            extras.append(self.logits)
        return (self.out, *extras) if extras else self.out
