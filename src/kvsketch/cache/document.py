"""A text that others continue: its slots are read where they lie, beside the tokens that each of them has.

    out(q) = attention to the document and to the own tokens, joined by their denominators (`ops.join_attention`)

Rows of a batch that continue one document read it as queries of one row, so that it is read once for several of them;
where rows come and go, those that read the same one are found in groups (`slots.documents`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.slots.table import SlotTable

AT_ONCE = 16  # single queries that read the slots together; kernels keep sums for each of them and each piece of a head


def joined(
    table: SlotTable, query: Tensor, out: Tensor, log_sum: Tensor, scale: float, softcap: float | None = None
) -> Tensor:  # [B, Hq, n, Dv]
    """Attention of [B, Hq, n, D] queries to the document of a table and to what they have read of the table.

    out, log_sum [B, Hq, n]: the latter, and the logarithm of its denominator.
    """
    assert table.document is not None
    own = ops.Part(out, log_sum)
    if table.document.groups is None:
        return ops.join_attention(own, attention_to(table.document, query, scale, softcap))
    members, at = table.document.groups
    queries = query[:, :, 0].index_select(0, members.flatten()).unflatten(0, members.shape)  # [G, n, Hq, D]
    return ops.join_attention(own, read_rows(table.document, queries.transpose(1, 2), scale, softcap), at)


def attention_to(document: SlotTable, query: Tensor, scale: float, softcap: float | None) -> ops.Part:
    """Attention of [B, Hq, n, D] queries to all slots of a document of one row."""
    batch, heads, new, size = query.shape
    if batch == new == 1:
        return read_rows(document, query, scale, softcap)
    queries = query.transpose(0, 1).reshape(1, heads, batch * new, size)
    if new > 1:
        read = _read_by_many(document, queries, scale, softcap)
    else:
        parts = [read_rows(document, part, scale, softcap) for part in queries.split(AT_ONCE, 2)]
        read = ops.Part(torch.cat([part.out for part in parts], 2), torch.cat([part.log_sum for part in parts], 2))
    out, log_sum = read.out.view(heads, batch, new, -1), read.log_sum.view(heads, batch, new)
    return ops.Part(out.transpose(0, 1), log_sum.transpose(0, 1))


def read_rows(document: SlotTable, queries: Tensor, scale: float, softcap: float | None) -> ops.Part:
    """Attention of [B, Hq, n, D] queries to the slots of their own rows, as they are stored."""
    keys, values, log_num, log_den, layout = document.as_stored()
    out, (_, log_sum) = ops.weighted_attention(
        queries, keys, values, log_num, log_den, scale, softcap=softcap, ragged=layout, return_state=True
    )
    return ops.Part(out, log_sum)


def _read_by_many(document: SlotTable, queries: Tensor, scale: float, softcap: float | None) -> ops.Part:
    """The same for the queries of a prompt: slots are decoded once, and the kernel holds one tile of logits."""
    past = ops.Past(document.key_slots(), document.value_slots(), *document.log_weights())
    count = queries.shape[2]
    # The operation reads tokens of the queries too; here these are none.
    keys, values = (part.new_zeros(*part.shape[:2], count, part.shape[3]) for part in past[:2])
    hidden = torch.full((1,), count, device=queries.device)
    out, (_, log_sum) = ops.chunk_attention(
        queries, keys, values, scale, past=past, hidden=hidden, softcap=softcap, return_state=True
    )
    return ops.Part(out, log_sum)
