"""Attention to chosen rows, by its Triton kernel where that serves the call, else by its torch reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsketch.ops.common.dispatch import kernel_for
from kvsketch.ops.indexed_attention import Arguments as IndexedArguments
from kvsketch.ops.indexed_attention import Extra, Spans
from kvsketch.ops.indexed_attention import reference as indexed_attention_reference


def indexed_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    rows: Tensor,
    scale: float,
    *,
    spans: Tensor | None = None,
    max_span: int = 0,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_log_weight: Tensor | None = None,
    extra_cut: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Attention of q [B, Hq, 1, D] to chosen rows of k_store [B, H, N, D] and v_store [B, H, N, Dv], where they lie:

        out = (sum_i exp(s_i) v_i + sum_c exp(s_c + w_c) v_c) / (sum_i exp(s_i) + sum_c exp(s_c + w_c))

    with s = scale * <q, k>. rows int32 [B, Hq, M], or [B, H, M] for lists that a group shares: slots, negative to skip.
    spans int32 [B, R, 2]: slots [start, end) that every query reads as well, together at most max_span in a row.
    extra_k [B, H, C, D], extra_v [B, H, C, Dv], extra_log_weight [B, Hq or H, C]: the second sums; -inf leaves a slot
    out. extra_cut int32 [B, L, 3], for each list: the extra slot whose cluster was read in part, and the places
    [start, end) of its rows in the list; the slot then stands for the mean value of what was not read. -1: none.
    softcap and sink_logits as in `weighted_attention`. The stores may lie in pinned host memory while the rest is on a
    GPU.

    Returns out [B, Hq, 1, Dv] in the dtype of q, 0 where nothing is read. With return_state, (out, (log of the
    numerator's weights, log of the denominator)), each [B, Hq, 1] float32.
    """
    always = None if spans is None else Spans(spans, max_span)
    extra = None
    if extra_k is not None and extra_v is not None and extra_log_weight is not None:
        extra = Extra(extra_k, extra_v, extra_log_weight, extra_cut)
    elif any(part is not None for part in (extra_k, extra_v, extra_log_weight, extra_cut)):
        raise ValueError("extra_k, extra_v and extra_log_weight belong together: pass all three or none.")
    call = IndexedArguments(q, k_store, v_store, rows, scale, always, extra, softcap, sink_logits)
    call.check()
    kernel = kernel_for("indexed_attention", q.device)
    chosen = kernel if kernel is not None and kernel.supported(call) else indexed_attention_reference
    result = chosen.indexed_attention(call)
    return (result.out, (result.log_sum_num, result.log_sum_den)) if return_state else result.out
