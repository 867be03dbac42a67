"""A slot table whose tokens moved to host memory; what every step reads stays on the device, in one pair of buffers:

    slots    [0, sinks)                          the sinks of each row
             [sinks, sinks + tail_tokens)        the tail: tokens that the host store does not hold yet
             [sinks + tail_tokens, ...)          the hot set

A recall method asks `look_up` for the slots of the tokens it wants and attends to them as if everything were there.
The host store holds the tokens [0, table.host.length), sinks and left padding included, each at the number of the slot
that it has in a table on the device: its own, unless the method has arranged them otherwise (`arrange`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.hot_rows import Buffer, Store
from kvsketch.slots import codes
from kvsketch.slots.codes import SlotCodes, Slots
from kvsketch.slots.host import HostStore, require_host_memory
from kvsketch.slots.parts import NEG_INF, VECTORS, SlotParts
from kvsketch.slots.state import overwritten
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import gather_slots


def is_offloaded(table: SlotTable) -> bool:
    """Whether the device holds only a part of the table's tokens."""
    return table.host is not None and not table.exact and table.hot.tokens > 0


def require_on_device(table: SlotTable, model_name: str) -> None:
    """Raises ValueError where attention reads every token, and the device holds only a part of them."""
    if is_offloaded(table):
        where = "which offload=host keeps in host memory; use offload=none"
        raise ValueError(f"the attention of {model_name} reads every token, {where}")


def host_capacity(tokens: int) -> int:
    """Tokens that a store has room for when it must hold `tokens`: more, so that it seldom grows."""
    return tokens + max(512, tokens // 8)


def require_room(table: SlotTable, keys: Tensor, values: Tensor, layers: int) -> None:
    """Raises MemoryError unless the stores of `layers` layers have room for the table's tokens and these new ones."""
    tokens = table.seen + keys.shape[2]
    if table.host is None or tokens > table.host.capacity:
        of_token = sum(
            codes.vector_bytes(t, bits) for t, bits in zip((keys, values), table.context.bits.pair, strict=True)
        )
        require_host_memory(layers * keys.shape[0] * keys.shape[1] * of_token * host_capacity(tokens))


def offload(table: SlotTable, start: int, sinks: int, tail_tokens: int, hot_places: int) -> None:
    """Moves the tokens before `start` to the host; the table holds all its tokens, in order."""
    (keys, values), seen = table.equal_slots(), table.seen
    store = _own_store(table, start)
    store.length = min(store.length, start)
    moved = slice(store.length, start)
    # Only a prompt is worth a side stream. A step that is captured next could not wait for one.
    store.write(store.length, [part[:, :, moved] for part in parts_of(table)], side_stream=table.new_tokens > 1)

    batch, heads = keys.shape[:2]
    if coded := _coded(table):
        table.hot.exact = (coded[0].exact_at >= 0).int()
    length, table.hot.sinks = sinks + tail_tokens, sinks
    end = sinks + seen - start
    token = torch.arange(length, device=keys.device).expand(batch, -1)
    own_sinks = token if table.padding is None else token + table.padding[:, None]
    token = torch.where(token < sinks, own_sinks, token - sinks + start)  # [B, slots]
    used = (token < seen) & ((token < start) | (torch.arange(length, device=keys.device) >= sinks))
    source = token[:, None, :end, None].clamp_max(seen - 1)
    for name, slots in (("keys", keys), ("values", values)):
        parts = []
        for far in codes.row_parts(slots):
            # Zeros: a slot that nothing was written to may be read with weight 0.
            near = far.new_zeros(batch, heads, length + hot_places, far.shape[3])
            near[:, :, :end] = far.gather(2, source.expand(-1, heads, -1, far.shape[3]))
            parts.append(near)
        table.parts[name] = codes.of_parts(slots, parts)
    table.hold(
        index=torch.where(used, token, -1).int()[:, None].repeat(1, heads, 1),
        log_den=torch.where(used, 0.0, NEG_INF)[:, None].repeat(1, heads, 1),
        log_num=None,
        next_slot=torch.full((batch, heads, 1), end, device=keys.device),
        length=length,
    )
    _set_tail(table, start)
    table.hot.attach(batch, heads, store.capacity, hot_places, keys.device)
    _place_exact(table)


def store_tail(table: SlotTable) -> None:
    """Moves the tail to the host; the next token begins a new one."""
    assert table.host is not None
    store, sinks, start = _own_store(table, table.seen), table.hot.sinks, table.host.length
    tail = slice(sinks, sinks + table.seen - start)
    if table.padding is not None:
        _take_late_sinks(table, start)
    store.write(start, [part[:, :, tail] for part in parts_of(table)])
    table.index[:, :, sinks:], table.log_den[:, :, sinks:] = -1, NEG_INF
    table.next_slot.fill_(sinks)
    _set_tail(table, table.seen)
    table.hot.lengthen(store.capacity)
    _place_exact(table)


def restore(table: SlotTable, coming: int) -> None:
    """Brings every token back to the device, with room for the `coming` ones; the table is exact again, or holds all
    its quantised tokens, in order.
    """
    seen, (batch, heads, _) = table.seen, table.shape
    coded = bool(_coded(table))
    parts = _in_order(table, parts_of(table), seen + (0 if coded else coming))
    keys, values = table.equal_slots()
    count = len(keys.slot_parts())
    ordered = _coded_in_order(table, keys, parts[:count]), _coded_in_order(table, values, parts[count:])
    table.parts["keys"], table.parts["values"] = ordered
    table.length = seen
    if coded:
        index = torch.arange(seen, device=table.device, dtype=torch.int32).repeat(batch, heads, 1)
        if (order := table.state.slot_order()) is not None:
            index[:, :, : order.shape[2]] = order
        pads = 0 if table.padding is None else table.padding.view(-1, 1, 1)
        table.parts["index"] = torch.where(index >= pads, index, -1)
        table.parts["log_den"] = torch.where(index >= pads, 0.0, NEG_INF)
        table.next_slot.fill_(seen)
    else:
        table.parts = SlotParts({name: table.parts[name] for name in VECTORS}, table.state)
        table.exact, table.next_slot, table.clock = True, None, None
    table.hot.detach()


def look_up(table: SlotTable, rows: Tensor) -> Tensor:
    """Slots where the tokens `rows` [B, L, M] lie once those that are missing have come from the host."""
    assert table.host is not None
    table.host.wait()
    hot = table.hot
    (far, far_steps), (near, near_steps) = (
        _keys_and_values(table, parts) for parts in (table.host.parts, parts_of(table))
    )
    store = Store(keys=far[0], values=far[1], row=hot.host_row, steps=far_steps)
    buffer = Buffer(near[0], near[1], hot.sinks, table.length, near_steps)
    slots = ops.hot_rows(rows, hot.tail_start, hot.maps(), store, buffer)
    if hot.sinks < codes.EXACT:
        _place_exact(table)
    return slots


def arrange(table: SlotTable, start: int, order: Tensor) -> None:
    """Moves the tokens from `start` on, which lie in the slots of their numbers, into the order [B, H, n] of these.

    None of them stays exact.
    """
    shift = 0
    if is_offloaded(table):
        assert table.host is not None and start >= table.host.length
        shift = table.hot.sinks - table.host.length
    elif table.host is not None:
        # What a store holds of them lies as they did.
        table.host.length = min(table.host.length, start)
    assert table.log_num is None and table.layout is None
    start, source = start + shift, order.long() + shift
    for slots in (table.keys, table.values):
        codes.arrange(slots, start, source)
    for held in (table.index, table.log_den, *table.state.slot_tensors()):
        held[:, :, start : start + source.shape[2]] = gather_slots(held, source)


def newest(table: SlotTable, start: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens from `start` on, [B, H, n, D]; when offloaded, of tokens of the tail."""
    shift = 0 if table.host is None or not is_offloaded(table) else table.hot.sinks - table.host.length
    keys, values = (slots.part(start + shift, table.seen + shift) for slots in table.equal_slots())
    return keys, values


def all_keys(table: SlotTable) -> Tensor:  # [B, H, seen, D]
    """The keys of all tokens, in order; when offloaded, a copy that lives as long as the caller holds it."""
    if not is_offloaded(table):
        return table.key_slots()[:, :, : table.seen]
    assert table.host is not None
    keys = table.equal_slots()[0]
    return _coded_in_order(table, keys, _in_order(table, codes.row_parts(keys), table.seen)).plain()


def _own_store(table: SlotTable, tokens: int) -> HostStore:
    """The table's store, with room for `tokens` tokens, in which every batch row has a row of its own."""
    batch, store = table.shape[0], table.host
    if store is None:
        store = HostStore(parts_of(table), batch, host_capacity(tokens))
    else:
        rows = table.hot.host_row.tolist()
        if tokens > store.capacity:
            store = store.moved(rows, host_capacity(tokens))
        elif rows != list(range(store.rows)):
            store = store.moved(rows, store.capacity)
    own = torch.arange(batch, dtype=torch.int32, device=table.device)
    table.hot.host_row = overwritten(table.hot.host_row, own)
    table.host = store
    return store


def _in_order(table: SlotTable, parts: list[Tensor], room: int) -> list[Tensor]:
    """The first parts of an offloaded table with all its tokens at their numbers, [B, H, room, n]."""
    assert table.host is not None
    store, first, seen = table.host, table.hot.sinks, table.seen
    result = [t.new_empty(t.shape[0], t.shape[1], room, t.shape[3]) for t in parts]
    # The store has keys first, as `parts` do.
    store.read(table.hot.host_row.tolist(), result)
    for near, all_tokens in zip(parts, result, strict=True):
        all_tokens[:, :, store.length : seen] = near[:, :, first : first + seen - store.length]
    return result


def _coded_in_order(table: SlotTable, like: Slots, parts: list[Tensor]) -> Slots:
    """Slots of parts in the order of the tokens."""
    slots = codes.of_parts(like, parts)
    if not isinstance(slots, SlotCodes):
        return slots
    assert table.hot.exact is not None
    at = torch.arange(codes.EXACT, device=table.device).view(1, 1, -1)
    at = at if table.padding is None else at + table.padding.view(-1, 1, 1)
    return replace(slots, exact_at=torch.where(table.hot.exact > 0, at, -1).int())


def _coded(table: SlotTable) -> list[SlotCodes]:
    return [slots for slots in table.equal_slots() if isinstance(slots, SlotCodes)]


def parts_of(table: SlotTable) -> list[Tensor]:
    """What keys and values consist of, [B, H, S, n] each."""
    keys, values = table.equal_slots()
    return [*codes.row_parts(keys), *codes.row_parts(values)]


Pair: TypeAlias = tuple[Tensor, Tensor]


def _keys_and_values(table: SlotTable, parts: list[Tensor]) -> tuple[Pair, Pair | None]:
    """Parts as keys and values, and the steps of those that are coded; one of them serves where the other has none."""
    count = len(table.equal_slots()[0].slot_parts())
    keys, values = parts[:count], parts[count:]
    steps = [*keys[1:], *values[1:]]
    return (keys[0], values[0]), (steps[0], steps[-1]) if steps else None


def _place_exact(table: SlotTable) -> None:
    """Tells codes where the tokens lie that they keep exact: a sink slot, the tail, a hot place, or nowhere near."""
    coded, hot = _coded(table), table.hot
    if not coded:
        return
    assert hot.exact is not None
    token = torch.arange(codes.EXACT, device=table.device).view(1, 1, -1)
    token = (token if table.padding is None else token + table.padding.view(-1, 1, 1)).expand(hot.exact.shape)
    place = hot.place_of.gather(2, token.clamp_max(hot.tokens - 1)).long()
    slot = torch.where(place >= 0, place + table.length, -1)
    start = hot.tail_start.view(-1, 1, 1)
    slot = torch.where(token >= start, token - start + hot.sinks, slot)
    own = torch.arange(codes.EXACT, device=table.device)
    if hot.sinks:
        held = table.index[:, :, : codes.EXACT].long()
        held = torch.nn.functional.pad(held, (0, codes.EXACT - held.shape[2]), value=-1)
        slot = torch.where((own < hot.sinks) & (held == token), own, slot)
    slot = torch.where((hot.exact > 0) & (token < table.seen_on_device()), slot, -1).int()
    for slots in coded:
        slots.exact_at.copy_(slot)


def _set_tail(table: SlotTable, start: int) -> None:
    tail = torch.full((table.keys.shape[0],), start, dtype=torch.int32, device=table.keys.device)
    table.hot.tail_start = overwritten(table.hot.tail_start, tail)


def _take_late_sinks(table: SlotTable, start: int) -> None:
    """Rows that had fewer tokens than sinks when they were offloaded take their other sinks from the tail."""
    assert table.padding is not None
    sinks = table.hot.sinks
    token = torch.arange(sinks, device=table.padding.device) + table.padding[:, None]  # [B, sinks]
    late = ((token >= start) & (token < table.seen))[:, None]
    place = (token - start + sinks).clamp(sinks, table.length - 1)[:, None]
    for near in parts_of(table):
        source = place.unsqueeze(-1).expand(-1, near.shape[1], -1, near.shape[3])
        near[:, :, :sinks] = torch.where(late.unsqueeze(-1), near.gather(2, source), near[:, :, :sinks])
    table.index[:, :, :sinks] = torch.where(late, token[:, None].int(), table.index[:, :, :sinks])
    table.log_den[:, :, :sinks].masked_fill_(late, 0.0)
