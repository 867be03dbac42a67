"""Operations that read keys and values: attention over weighted slots or chosen rows, and sums of attention.

Each goes to its Triton kernel where that serves the call, else to its torch reference.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from kvsketch.ops import attention_mass as attention_mass_checks
from kvsketch.ops.attention_mass import Noise, Temperature
from kvsketch.ops.attention_mass import reference as attention_mass_reference
from kvsketch.ops.chunk_attention import Arguments as ChunkArguments
from kvsketch.ops.chunk_attention import Past
from kvsketch.ops.chunk_attention import reference as chunk_attention_reference
from kvsketch.ops.dispatch import kernel_for
from kvsketch.ops.indexed_attention import Arguments as IndexedArguments
from kvsketch.ops.indexed_attention import Extra, Spans
from kvsketch.ops.indexed_attention import reference as indexed_attention_reference
from kvsketch.ops.turn_keys import check_arguments as check_turn_keys
from kvsketch.ops.turn_keys import reference as turn_keys_reference
from kvsketch.ops.weighted_attention import check_arguments
from kvsketch.ops.weighted_attention.reference import weighted_attention as weighted_attention_reference


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    clip: float | None = ...,
    return_state: Literal[False] = ...,
    return_logits: Literal[False] = ...,
) -> Tensor: ...


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    clip: float | None = ...,
    return_state: bool = ...,
    return_logits: bool = ...,
) -> Any: ...


def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    clip: float | None = None,
    return_state: bool = False,
    return_logits: bool = False,
) -> Any:
    """Attention over weighted slots, for query head h with KV head h // G:

        out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

    q [B, Hq, N, D]; k [B, H, S, D]; v [B, H, Sv, Dv], Sv <= S: later slots count in the denominator only.
    log_num, log_den [B, H, S]: None is zero, -inf is legal; the same object twice (or None twice) needs one sum only.
    bias: added to s_i, or boolean (True: visible), [B or 1, Hq or H or 1, N or 1, S]; the lowest finite number of its
      dtype hides a slot like -inf.
    softcap: s_i becomes softcap * tanh(s_i / softcap). sink_logits [Hq]: one more logit in the denominator.
    lengths [B, H] integers: slots from there on are not read and may hold anything; other slots must be finite even
      when their weights are -inf.
    clip: the denominator is moved to within a factor exp(clip) of the numerator's sum of weights, before the sink logit
      joins it; the sums returned are those before.
    An empty numerator or denominator gives 0. Internally float32 (float64 for float64); the result has the dtype of q.

    Returns out [B, Hq, N, Dv]. With return_state, (out, (log of the numerator's weights, log of the denominator)), each
    [B, Hq, N] float32. With return_logits, s_i [B, Hq, N, S] float32 (after softcap, without bias and weights, -inf
    beyond lengths) comes last.
    """
    check_arguments(q, k, v, log_num, log_den, bias, softcap, sink_logits, lengths, clip)
    attend = weighted_attention_reference
    kernel = kernel_for("weighted_attention", q.device)
    if kernel is not None and kernel.supported(q, k, v):
        attend = kernel.weighted_attention
    result = attend(
        q, k, v, log_num, log_den, scale,
        bias=bias, softcap=softcap, sink_logits=sink_logits, lengths=lengths, clip=clip, return_logits=return_logits,
    )  # fmt: skip
    extras: list[Any] = []
    if return_state:
        extras.append((result.log_sum_num, result.log_sum_den))
    if return_logits:
        extras.append(result.logits)
    return (result.out, *extras) if extras else result.out


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


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    past: Past | None = None,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    clip: float | None = None,
    return_state: bool = False,
) -> Any:
    """Attention of q [B, Hq, N, D] to tokens k [B, H, L, D], v [B, H, L, Dv], and to the weighted slots of `past`:

        out(q_i) = (sum_s exp(x_is + log_num_s) v_s + sum_j exp(x_ij) v_j)
                 / (sum_s exp(x_is + log_den_s)     + sum_j exp(x_ij)),        x = scale * <q, k>

    The queries are those of the last N of the L tokens; a query sees every slot and, of the tokens, none that comes
    later and none of the first `hidden` [B] of its row. softcap, sink_logits and clip as in `weighted_attention`.

    Returns out [B, Hq, N, Dv] in the dtype of q, 0 where nothing is seen. With return_state, (out, (log of the
    numerator's weights, log of the denominator)), each [B, Hq, N] float32. Memory is that of the output.
    """
    call = ChunkArguments(q, k, v, scale, past, hidden, softcap, sink_logits, clip)
    call.check()
    kernel = kernel_for("chunk_attention", q.device)
    chosen = kernel if kernel is not None and kernel.supported(call) else chunk_attention_reference
    result = chosen.chunk_attention(call)
    return (result.out, (result.log_sum_num, result.log_sum_den)) if return_state else result.out


def turn_keys(keys: Tensor, index: Tensor, seen: Tensor, turns: Tensor) -> Tensor:
    """Keys [B, H, S, D] turned by the tokens that are gone after each, so that rotary distances skip them.

    index [B, H, S]: the tokens in the slots, each in one slot only; negative for empty slots, whose keys stay. seen
    [1]: tokens seen. turns [half] int64: the angle of one position in channels c and c + half (`whole_turns`).
    Computed in float32 and rounded once to the dtype of the keys; nothing is read back by the host.
    """
    check_turn_keys(keys, index, seen, turns)
    kernel = kernel_for("turn_keys", keys.device)
    chosen = kernel if kernel is not None and kernel.supported(keys) else turn_keys_reference
    return chosen.turn_keys(keys, index, seen, turns)


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
    slots in any order that hold the tokens index (negative: empty), `seen` [1] or a number then telling how many tokens
    were seen. A query sees no later token. padding [B]: left-padding tokens, which neither see nor are seen.
    temperature: tau, a number or a schedule. noise: g_ij is Gumbel noise, fresh for every row and column but the same
    at every call; None: 0. row_lse [B, Hq, N]: log of the inner sums if known (plain attention only): saves a pass.
    reduce: how the query heads of one KV head become one number: their sum, mean or max over these N queries.
    into: [B, H, S] float32 that becomes fade * into + mass, in place; it is returned.

    Memory is that of a few numbers per token and head; with one query nothing is read back by the host.
    """
    tau = _schedule(temperature)
    attention_mass_checks.check_arguments(q, k, scale, seen, index, padding, tau, noise, row_lse, reduce, into)
    kernel = kernel_for("attention_mass", q.device)
    chosen = kernel if kernel is not None and kernel.supported(q, k) else attention_mass_reference
    return chosen.attention_mass(
        q, k, scale,
        seen=k.shape[2] if seen is None else seen, index=index, padding=padding, temperature=tau, noise=noise,
        row_lse=row_lse, reduce=reduce, into=torch.zeros(k.shape[:3], device=q.device) if into is None else into,
        fade=fade,
    )  # fmt: skip


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
    """What `attention_mass` gives for one query in a row, from the logits that attention has left, [B, H, S] float32:

        mass_j = exp((s_j + g_j) / tau) / sum_j' exp((s_j' + g_j') / tau)

    logits: s_j, [B, Hq, S] float32, as `weighted_attention` returns them; anything where the slot is empty. index
    [B, H, S]: the tokens in the slots, negative for empty ones. row_lse [B, Hq]: log of the sum if known (plain
    attention only). The rest as in `attention_mass`. No key is read, and nothing is read back by the host.
    """
    tau = _schedule(temperature)
    attention_mass_checks.check_logits(logits, index, row_lse, padding, tau, noise, reduce, into)
    kernel = kernel_for("attention_mass", logits.device) if logits.numel() > 0 else None
    return (kernel or attention_mass_reference).mass_from_logits(
        logits, seen=seen, index=index, row_lse=row_lse, padding=padding, temperature=tau, noise=noise, reduce=reduce,
        into=torch.zeros(index.shape, device=logits.device) if into is None else into, fade=fade,
    )  # fmt: skip


def _schedule(temperature: float | Temperature) -> Temperature:
    return temperature if isinstance(temperature, Temperature) else Temperature(float(temperature), float(temperature))
