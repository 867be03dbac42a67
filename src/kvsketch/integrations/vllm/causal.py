"""Causal attention of new tokens to each other, before they are joined with what is stored.

It is vLLM's own flash attention where that is faster than `ops.chunk_attention`: version 3, on Hopper.

Legend: n new tokens, L tokens of which they are the last, Hq query heads, H KV heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.slots.tensors import uploaded

FASTER = 3  # version of flash attention
# Queries [n, Hq, D], keys and values [L, H, D] of requests one behind the other, where each begins among queries and
# among keys, and the scale; gives [n, Hq, D] and the logarithms of the denominators [Hq, n].
Flash = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int], float], tuple[Tensor, Tensor]]


def flash_attention(head_size: int, value_size: int, dtype: torch.dtype) -> Flash | None:
    """vLLM's, if this machine has one that is faster than ours for these layers."""
    if not torch.cuda.is_available() or dtype not in (torch.bfloat16, torch.float16) or head_size != value_size:
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        version = get_flash_attn_version(head_size=head_size)
    except (ImportError, TypeError):  # a build without it, or an older vLLM
        return None
    if version != FASTER or head_size > 256 or head_size % 8:
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], key_starts: Sequence[int], scale: float
    ) -> tuple[Tensor, Tensor]:
        (begin, most), (key_begin, most_keys) = (_on(tuple(each), q.device) for each in (starts, key_starts))
        out, log_sum = flash_attn_varlen_func(
            q, k, v, max_seqlen_q=most, cu_seqlens_q=begin, max_seqlen_k=most_keys, cu_seqlens_k=key_begin,
            softmax_scale=scale, causal=True, return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return out, log_sum

    return attend


@functools.lru_cache(maxsize=16)
def _on(starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Where requests begin, and the longest one: all layers of a forward ask for the same."""
    longest = max(end - start for start, end in pairwise(starts))
    return uploaded([torch.tensor(starts, dtype=torch.int32)], [device])[0], longest


def causal_attention(
    flash: Flash | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    starts: Sequence[int],
    key_starts: Sequence[int] | None = None,
    **options: Any,
) -> ops.Part:
    """Attention of q [n, Hq, D] to k [L, H, D], v [L, H, Dv].

    starts: where each request begins, and the last one ends; key_starts: the same of keys, if these are more. options:
    softcap and sink_logits, as in `ops.chunk_attention`.
    Returns out [1, Hq, n, Dv] and its denominators [1, Hq, n].
    """
    key_starts = starts if key_starts is None else key_starts
    if flash is not None and all(each is None for each in options.values()):
        out, log_sum = flash(q, k, v, starts, key_starts, scale)
        return ops.Part(out.transpose(0, 1).unsqueeze(0), log_sum.unsqueeze(0))
    parts = []
    for (start, end), (key_start, key_end) in zip(pairwise(starts), pairwise(key_starts), strict=True):
        query, keys, values = (
            x[a:b].transpose(0, 1).unsqueeze(0)
            for x, a, b in ((q, start, end), (k, key_start, key_end), (v, key_start, key_end))
        )
        out, (_, log_sum) = ops.chunk_attention(query, keys, values, scale, return_state=True, **options)
        parts.append(ops.Part(out, log_sum))
    return parts[0] if len(parts) == 1 else ops.Part(*(torch.cat(each, 2) for each in zip(*parts, strict=True)))
