"""A slot table whose tokens moved to host memory; what every step reads stays on the device, in one pair of buffers:

    slots    [0, sinks)                          the sinks of each row
             [sinks, sinks + tail_tokens)        the tail: tokens that the host store does not hold yet
             [sinks + tail_tokens, ...)          the hot set

A recall method asks `look_up` for the slots of the tokens it wants and attends to them as if everything were there.
The host store holds the tokens [0, table.host.length), sinks and left padding included, each at its own number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.hot_rows import Buffer, Store
from kvsketch.slots import codes
from kvsketch.slots.host import HostStore, require_host_memory, store_bytes
from kvsketch.slots.state import kept
from kvsketch.slots.table import NEG_INF, SlotTable


def is_offloaded(table: SlotTable) -> bool:
    """Whether the device holds only a part of the table's tokens."""
    return table.host is not None and not table.exact


def host_capacity(tokens: int) -> int:
    """Tokens that a store has room for when it must hold `tokens`: more, so that it seldom grows."""
    return tokens + max(512, tokens // 8)


def require_room(table: SlotTable, keys: Tensor, values: Tensor, layers: int) -> None:
    """Raises MemoryError unless the stores of `layers` layers have room for the table's tokens and these new ones."""
    tokens = table.seen + keys.shape[2]
    if table.host is None or tokens > table.host.capacity:
        require_host_memory(layers * store_bytes(keys, values, keys.shape[0], host_capacity(tokens)))


def offload(table: SlotTable, start: int, sinks: int, tail_tokens: int, hot_places: int) -> None:
    """Moves the tokens before `start` to the host; the table holds all its tokens, in order."""
    (keys, values), seen = table.buffers(), table.seen
    store = _own_store(table, start)
    store.length = min(store.length, start)
    moved = slice(store.length, start)
    # Only a prompt is worth a side stream. A step that is captured next could not wait for one.
    store.write(store.length, keys[:, :, moved], values[:, :, moved], aside=table.new_tokens > 1)

    batch, heads = keys.shape[:2]
    table.length, table.hot.sinks = sinks + tail_tokens, sinks
    end = sinks + seen - start
    token = torch.arange(table.length, device=keys.device).expand(batch, -1)
    own_sinks = token if table.padding is None else token + table.padding[:, None]
    token = torch.where(token < sinks, own_sinks, token - sinks + start)  # [B, slots]
    used = (token < seen) & ((token < start) | (torch.arange(table.length, device=keys.device) >= sinks))
    table.index = torch.where(used, token, -1).int()[:, None].repeat(1, heads, 1)
    table.log_den = torch.where(used, 0.0, NEG_INF)[:, None].repeat(1, heads, 1)
    table.log_num = None
    source = token[:, None, :end, None].clamp_max(seen - 1)
    for name, far in (("keys", keys), ("values", values)):
        # Zeros: a slot that nothing was written to may be read with weight 0.
        near = far.new_zeros(batch, heads, table.length + hot_places, far.shape[3])
        near[:, :, :end] = far.gather(2, source.expand(-1, heads, -1, far.shape[3]))
        setattr(table, name, near)
    table.next_slot = torch.full((batch, heads, 1), end, device=keys.device)
    if table.clock is None:
        table.clock = torch.full((1,), seen, device=keys.device)
    _set_tail(table, start)
    table.hot.attach(batch, heads, store.capacity, hot_places, keys.device)


def store_tail(table: SlotTable) -> None:
    """Moves the tail to the host; the next token begins a new one."""
    assert table.host is not None and table.index is not None
    assert table.log_den is not None and table.next_slot is not None
    keys, values = table.buffers()
    store, sinks, start = _own_store(table, table.seen), table.hot.sinks, table.host.length
    tail = slice(sinks, sinks + table.seen - start)
    if table.padding is not None:
        _take_late_sinks(table, start)
    store.write(start, keys[:, :, tail], values[:, :, tail])
    table.index[:, :, sinks:], table.log_den[:, :, sinks:] = -1, NEG_INF
    table.next_slot.fill_(sinks)
    _set_tail(table, table.seen)
    table.hot.lengthen(store.capacity)


def restore(table: SlotTable, coming: int) -> None:
    """Brings every token back to the device, with room for the `coming` ones; the table is exact again."""
    assert table.host is not None
    store, first, seen = table.host, table.hot.sinks, table.seen
    keys, values = (t.new_empty(t.shape[0], t.shape[1], seen + coming, t.shape[3]) for t in table.buffers())
    store.read(table.hot.host_row.tolist(), keys, values)
    for near, all_tokens in zip(table.buffers(), (keys, values), strict=True):
        all_tokens[:, :, store.length : seen] = near[:, :, first : first + seen - store.length]
    table.keys, table.values, table.length = keys, values, seen
    table.index = table.log_den = table.next_slot = table.clock = None
    table.hot.detach()


def look_up(table: SlotTable, rows: Tensor) -> Tensor:
    """Slots where the tokens `rows` [B, L, M] lie once those that are missing have come from the host."""
    assert table.host is not None
    table.host.wait()
    hot, store = table.hot, Store(table.host.keys, table.host.values, table.hot.host_row)
    return ops.hot_rows(rows, hot.tail_start, hot.maps(), store, Buffer(*table.buffers(), hot.sinks, table.length))


def newest(table: SlotTable, start: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens from `start` on, [B, H, n, D]; when offloaded, of tokens of the tail."""
    shift = 0 if table.host is None or table.exact else table.hot.sinks - table.host.length
    keys, values = (codes.part(slots, start + shift, table.seen + shift) for slots in table.stores())
    return keys, values


def all_keys(table: SlotTable) -> Tensor:  # [B, H, seen, D]
    """The keys of all tokens, in order; when offloaded, a copy that lives as long as the caller holds it."""
    if not is_offloaded(table):
        return table.key_slots()[:, :, : table.seen]
    assert table.host is not None
    store, first, near = table.host, table.hot.sinks, table.buffers()[0]
    keys = near.new_empty(near.shape[0], near.shape[1], table.seen, near.shape[3])
    store.read(table.hot.host_row.tolist(), keys)
    keys[:, :, store.length :] = near[:, :, first : first + table.seen - store.length]
    return keys


def _own_store(table: SlotTable, tokens: int) -> HostStore:
    """The table's store, with room for `tokens` tokens, in which every batch row has a row of its own."""
    batch, store = table.shape[0], table.host
    if store is None:
        store = HostStore(*table.buffers(), batch, host_capacity(tokens))
    else:
        rows = table.hot.host_row.tolist()
        if tokens > store.capacity:
            store = store.moved(rows, host_capacity(tokens))
        elif rows != list(range(store.keys.shape[0])):
            store = store.moved(rows, store.capacity)
    own = torch.arange(batch, dtype=torch.int32, device=table.device)
    table.hot.host_row = kept(table.hot.host_row, own)
    table.host = store
    return store


def _set_tail(table: SlotTable, start: int) -> None:
    assert table.keys is not None
    tail = torch.full((table.keys.shape[0],), start, dtype=torch.int32, device=table.keys.device)
    table.hot.tail_start = kept(table.hot.tail_start, tail)


def _take_late_sinks(table: SlotTable, start: int) -> None:
    """Rows that had fewer tokens than sinks when they were offloaded take their other sinks from the tail."""
    assert table.index is not None and table.log_den is not None and table.padding is not None
    sinks = table.hot.sinks
    token = torch.arange(sinks, device=table.padding.device) + table.padding[:, None]  # [B, sinks]
    late = ((token >= start) & (token < table.seen))[:, None]
    place = (token - start + sinks).clamp(sinks, table.length - 1)[:, None]
    for name in ("keys", "values"):
        near = getattr(table, name)
        source = place.unsqueeze(-1).expand(-1, near.shape[1], -1, near.shape[3])
        near[:, :, :sinks] = torch.where(late.unsqueeze(-1), near.gather(2, source), near[:, :, :sinks])
    table.index[:, :, :sinks] = torch.where(late, token[:, None].int(), table.index[:, :, :sinks])
    table.log_den[:, :, :sinks].masked_fill_(late, 0.0)
