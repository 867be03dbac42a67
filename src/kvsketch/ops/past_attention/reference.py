"""Past attention in torch: weighted attention row by row (synchronises with the GPU where rows differ in queries)."""

from __future__ import annotations

import torch

from kvsketch.ops.join_attention import Part
from kvsketch.ops.past_attention import Arguments, empty_part, in_blocks, queries_of
from kvsketch.ops.weighted_attention import Arguments as WeightedArguments
from kvsketch.ops.weighted_attention.call import rows_in
from kvsketch.ops.weighted_attention.reference import weighted_attention


def past_attention(call: Arguments) -> Part:
    result = empty_part(call)
    if not call.q.numel() or not call.most_slots:
        return result
    whole = _by_row(call)
    if call.starts is None:
        attended = weighted_attention(whole)
        return Part(attended.out, attended.log_sum_den)
    for row, (start, end) in enumerate(queries_of(call.starts)):
        if start < end:
            attended = weighted_attention(_row(whole, call, row, start, end))
            result.out[:, :, start:end], result.log_sum[:, :, start:end] = attended.out, attended.log_sum_den
    return result


def _by_row(call: Arguments) -> WeightedArguments:
    """The slots as equal heads [B, H, S, D]."""
    if call.blocks is None:
        return call.weighted().by_row()
    k, v = (in_blocks(part, call.blocks) for part in (call.k, call.v))
    return call._replace(k=k, v=v, blocks=None).weighted()


def _row(whole: WeightedArguments, call: Arguments, row: int, start: int, end: int) -> WeightedArguments:
    at = slice(row, row + 1)
    rows = torch.tensor([row], device=call.q.device)
    log_num = None if whole.log_num is None else whole.log_num[at]
    log_den = log_num
    if whole.log_den is not whole.log_num:
        log_den = None if whole.log_den is None else whole.log_den[at]
    return whole._replace(
        q=call.q[:, :, start:end], k=rows_in(whole.k, rows), v=rows_in(whole.v, rows), log_num=log_num, log_den=log_den,
        lengths=None if whole.lengths is None else whole.lengths[at],
    )  # fmt: skip
