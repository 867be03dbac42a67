"""How SubGen's structure lies in a slot table, and how a table that is exact or too long is brought into that form.

A row keeps every token exactly until it exceeds its own budget; then the tokens between its sinks and its recent window
pass into the structure, in order, and from then on each token does as it leaves the window. All of it is keyed by
positions, so a row does the same alone and in a batch. See `ops/fold_token` for the order of the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.subgen.sketch import Sketch, Tokens, fold, merge, used, with_room
from kvsketch.ops.fold_token import Layout, Plan, State
from kvsketch.ops.fold_token.reference import denominator_weights, norms, numerator_shares, numerator_weights, slot_of
from kvsketch.slots import coding, short_rows
from kvsketch.slots import padding as left_padding
from kvsketch.slots.parts import NEG_INF
from kvsketch.slots.state import ANY, Range, TableState, on_host, overwritten, per_row
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import gather_slots

FOREVER = 1 << 62
# The covering radius is itself a distance between two keys. Slightly more, and rounding does not decide whether that
# key lies within delta.
BEYOND_RADIUS = 1.001


@dataclass
class Structure(TableState):
    """SubGen's structure beside the slots; m clusters, s samples. All is there once a table is bounded."""

    # [B, 13] int64: until when a row is kept whole, the layout, the row's plan
    host: Tensor = on_host(lambda t, s: Range((t.shape[0], 1 + len(Layout._fields) + len(Plan._fields)), 0, FOREVER))
    plan: Tensor = per_row(lambda t, s: Range((t.shape[0], len(Plan._fields)), 0, t.length))  # [B, 6] int64
    # [B, H] int64, representatives
    extra_keys: Tensor | None = per_row(lambda t, s: Range(t.shape[:2], 0, max(t.seen, t.length)))
    representatives: Tensor = per_row()  # [B, H, m, D]
    counts: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.representatives.shape[2]), 0, t.seen))  # int32
    delta: Tensor = per_row()  # [B, H]
    mu: Tensor = per_row()  # [B, H] float64
    shares: Tensor = per_row()  # [B, H, s]
    streams: Tensor = per_row(lambda t, s: Range((*t.shape[:2], 3), ANY.min, ANY.max))
    squares: Tensor | None = per_row()  # [B, H, s]; with sampling=mixed, as the next
    folded: Tensor | None = per_row(lambda t, s: Range(t.shape[:2], 0, t.seen))  # [B, H] int64

    def sections(self, table: SlotTable) -> tuple[int, ...]:
        layout = layout_of(table)
        return *layout[:4], layout.clusters * layout.per_cluster

    def put_row(self, row: int, other: TableState, source: int) -> None:
        layout = self.host[row, 1:7].clone()
        super().put_row(row, other, source)
        self.host[row, 1:7] = layout

    def shift_rows(self, rows: slice, count: int) -> None:
        until = self.host[rows, 0]
        until += torch.where(until == FOREVER, 0, count)

    def retire_row(self, row: int) -> None:
        self.host[row, 0] = FOREVER

    def keys_beside(self) -> Tensor | None:
        return self.extra_keys

    def misfit(self, table: SlotTable) -> str:
        """Slots lie where the layout says, and no row uses more of them than there are."""
        if not self.tensors():
            return ""
        rows, split = self.host[:, 1:].tolist(), len(Layout._fields)
        layouts, plans = {tuple(row[:split]) for row in rows}, [row[split:] for row in rows]
        layout = Layout(*layouts.pop())
        # Tokens that may still be rolled back stand behind the samples.
        new, heads = table.length - layout.total, table.shape[:2]
        sound = not layouts and layout.ring > 0 and new >= 0 and layout.valued + new == table.value_slots().shape[2]
        sound &= self.plan.tolist() == plans
        for plan in plans:
            used = Plan(*plan)._replace(recent=plan[1] + 1)
            sound &= all(part <= room for part, room in zip(used, layout, strict=True))
        sound &= self.representatives.shape == (*heads, layout.clusters, table.key_slots().shape[3])
        sound &= self.shares.shape == (*heads, layout.samples) and self.delta.shape == self.mu.shape == heads
        return "" if sound else "the structure of a table does not fit its slots"


def rewrite(
    table: SlotTable,
    budgets: list[int],
    plans: list[Plan],
    policy: str,
    delta: float | None,
    coalesce: bool,
    seed: int,
    mixed: bool = False,
) -> None:
    """Folds what has to leave the exact slots of a table in any state, and writes the table anew."""
    layout = None if table.exact else layout_of(table)
    if table.context.bits:
        # Draws and weights are those of the vectors that will be read: the sums stay unbiased.
        coding.code(table)
    padding = left_padding.of_rows(table.padding, table.shape[0])
    if table.padding is not None and short_rows.are_there(table):
        outgrown = [
            row for row, (pad, size) in enumerate(zip(padding, budgets, strict=True)) if table.seen - pad > size
        ]
        short_rows.code_rows(table, short_rows.exact_rows(table, outgrown))
    tokens = exact_tokens(table, layout)
    batch, heads = tokens.keys.shape[:2]
    device = tokens.keys.device
    before = [0] * batch if layout is None else exact_until(table)
    until = [
        FOREVER if old == FOREVER or table.seen - pad > budget else pad + budget
        for old, pad, budget in zip(before, padding, budgets, strict=True)
    ]
    plans = [p._replace(hold=0) if n == FOREVER else p for p, n in zip(plans, until, strict=True)]
    plan = torch.tensor(plans, device=device)
    real = table.real_tokens()[:, 0]  # [B, 1]

    room = layout if layout is not None and table.shared else common_layout(plans)
    if layout is None:
        sketch = Sketch.empty(tokens, *room[3:], seed, table.context.layer_idx, table.context.first_head, mixed)
        sketch = replace(sketch, sizes=plan[:, 3:])
    else:
        sketch = sketch_of(table, layout)
        if [p[3:] for p in plans] != [p[3:] for p in plans_of(table)]:
            sketch = resized(sketch, plan[:, 3:], room[3:], real.expand(batch, heads), policy == "grow")
    structured = torch.tensor([[n == FOREVER and p.samples > 0] for n, p in zip(until, plans, strict=True)])
    leaves = (tokens.positions >= plan[:, :1]) & (tokens.positions < real - plan[:, 1:2]) & structured.to(device)
    leaving = replace(tokens, valid=leaves)
    started = [n == FOREVER != old for old, n in zip(before, until, strict=True)]
    if any(started) and sketch.den_keys.shape[3]:
        radius = torch.full_like(sketch.delta, delta or 0.0)
        if delta is None:
            radius = covering_radii(leaving, plans)
        sketch = replace(sketch, delta=torch.where(torch.tensor(started, device=device)[:, None], radius, sketch.delta))
    sketch = fold(sketch, leaving, policy)
    write(table, tokens, sketch, plans, until, coalesce, room if table.shared else None)


def covering_radii(leaving: Tokens, plans: list[Plan]) -> Tensor:  # [B, H]
    """delta: a hair above the radius at which greedy k-center covers all leaving keys, one centre per cluster.

    These are all keys of the prompt between sinks and window where it is read at once, so its clusters cover it; read
    in chunks, those of the first chunk that exceeds the budget.
    """
    device = leaving.keys.device
    valid = leaving.valid[:, None].expand(leaving.keys.shape[:3])
    radius = torch.zeros(leaving.keys.shape[:2], device=device)
    for clusters in {p.clusters for p in plans} - {0}:
        rows = torch.tensor([i for i, p in enumerate(plans) if p.clusters == clusters], device=device)
        radius[rows] = ops.farthest_first(leaving.keys[rows], clusters, valid=valid[rows]).radius
    return BEYOND_RADIUS * radius


def layout_of(table: SlotTable) -> Layout:
    """The layout of a bounded table, from the host."""
    return Layout(*table.state_of(Structure).host[0, 1:7].tolist())


def exact_until(table: SlotTable) -> list[int]:
    """How many tokens seen each row keeps whole, from the host; FOREVER once it does not any more."""
    return table.state_of(Structure).host[:, 0].tolist()


def plans_of(table: SlotTable) -> list[Plan]:
    """The plan of each row of a bounded table, from the host."""
    return [Plan(*row) for row in table.state_of(Structure).host[:, 7:].tolist()]


def state_of(table: SlotTable) -> State:
    """The tensors of a bounded table as the decode step takes them."""
    state, held = table.state_of(Structure), table
    return State(
        table.keys.read, table.values.read, held.index, held.log_num, held.log_den, held.next_slot, held.clock,
        table.padding, state.plan, state.representatives, state.counts, state.delta, state.mu, state.shares,
        state.streams, state.squares, state.folded,
    )  # fmt: skip


def sketch_of(table: SlotTable, layout: Layout) -> Sketch:
    """The structure inside a bounded table, which may hold new tokens after the samples."""
    keys, values, index = table.key_slots(), table.value_slots(), table.index_slots()
    state, samples = table.state_of(Structure), slice(layout.exact, layout.valued)
    clusters = (layout.clusters, layout.per_cluster)
    return Sketch(
        keys=keys[:, :, samples],
        values=values[:, :, samples],
        index=index[:, :, samples],
        mu=state.mu,
        representatives=state.representatives,
        counts=state.counts.long(),
        den_keys=keys[:, :, values.shape[2] :].unflatten(2, clusters),
        den_index=index[:, :, values.shape[2] :].unflatten(2, clusters),
        delta=state.delta,
        streams=state.streams,
        sizes=state.plan[:, 3:],
        folded=state.folded,
    )


def exact_tokens(table: SlotTable, layout: Layout | None) -> Tokens:
    """The tokens a table holds exactly, in order of position; empty slots, at position -1, come first."""
    positions = table.position_slots()[:, 0].contiguous()
    index, keys, values = table.index_slots()[:, 0], table.key_slots(), table.value_slots()
    if layout is not None:
        new = torch.arange(layout.valued, values.shape[2], device=positions.device)
        columns = torch.cat([torch.arange(layout.exact, device=positions.device), new])
        order = positions[:, columns].argsort(dim=-1, stable=True)
        columns = columns[order]  # [B, n]
        positions, index = positions.gather(1, columns), index.gather(1, columns)
        at = columns[:, None].expand(-1, keys.shape[1], -1)
        keys, values = gather_slots(keys, at), gather_slots(values, at)
    return Tokens(keys, values, index, positions, positions >= 0)


def resized(sketch: Sketch, sizes: Tensor, room: tuple[int, int, int], event: Tensor, grows: bool) -> Sketch:
    """The structure for other sizes (s, m, t) [B, 3], as when a share of a longer prompt allows more.

    A further slot repeats an earlier one, of the same parity where there are two, which keeps every slot's law;
    clusters beyond the limit pour into the nearest. `room`: the largest sizes.
    """
    samples, clusters, per_cluster = sizes.unbind(1)
    sketch = with_room(sketch, max(room[1], sketch.counts.shape[2]))
    number, held = torch.arange(room[0], device=sizes.device), sketch.sizes[:, :1].clamp_min(1)
    pick = torch.where(number < held, number, number % (held - held % 2).clamp_min(1))
    pick = pick[:, None].expand(*sketch.mu.shape, -1)
    within = (torch.arange(room[2], device=sizes.device) % sketch.sizes[:, 2:].clamp_min(1))[:, None, None]
    within = within.expand(*sketch.counts.shape, -1)
    # One more empty slot, so that there is something to repeat where there was none.
    pad = torch.nn.functional.pad
    den_keys = pad(sketch.den_keys, (0, 0, 0, 1))
    index = pad(sketch.index, (0, 1), value=-1).gather(2, pick)
    den_index = pad(sketch.den_index, (0, 1), value=-1).gather(3, within)
    sketch = replace(
        sketch,
        keys=gather_slots(pad(sketch.keys, (0, 0, 0, 1)), pick),
        values=gather_slots(pad(sketch.values, (0, 0, 0, 1)), pick),
        index=torch.where(used(samples, room[0]), index, -1),
        den_keys=den_keys.gather(3, within[..., None].expand(-1, -1, -1, -1, den_keys.shape[4])),
        den_index=torch.where(used(per_cluster, room[2])[:, None], den_index, -1),
        sizes=sizes,
    )
    if grows or room[2] == 0:
        return sketch
    number = torch.arange(sketch.counts.shape[2], device=sizes.device)
    points = sketch.representatives.float()
    nearest = torch.where(used(clusters, len(number))[:, None], torch.cdist(points, points), float("inf")).argmin(-1)
    labels = torch.where(used(clusters, len(number)), number, nearest)
    return with_room(merge(sketch, labels, sketch.representatives, event), room[1])


def write(
    table: SlotTable,
    tokens: Tokens,
    sketch: Sketch,
    plans: list[Plan],
    until: list[int],
    coalesce: bool,
    layout: Layout | None = None,
) -> None:
    """Fills a table with the exact tokens that the plans keep, and with the structure; None: its layout follows."""
    device = tokens.keys.device
    layout = layout or common_layout(plans, sketch)
    plan = torch.tensor(plans, device=device)
    real = table.real_tokens()[:, 0]  # [B, 1]
    wanted, heads = _wanted_positions(real, plan, layout), tokens.keys.shape[1]
    columns = torch.searchsorted(tokens.positions, wanted).clamp_max(tokens.positions.shape[1] - 1)
    kept = (wanted >= 0) & (tokens.positions.gather(1, columns) == wanted)
    held = torch.where(kept, tokens.index.gather(1, columns), -1)[:, None].expand(-1, heads, -1)
    exact_weight = torch.where(held >= 0, 0.0, NEG_INF)
    shares = numerator_shares(sketch.values, sketch.index, coalesce, mixed=sketch.folded is not None)
    squares = None if sketch.folded is None else norms(sketch.values).square()
    num = numerator_weights(sketch.mu, shares, plan, squares, sketch.folded)
    structured = torch.tensor([[n == FOREVER] for n in until])

    log_num, log_den = None, torch.cat([exact_weight, num], 2)
    if layout.per_cluster:
        den = denominator_weights(sketch.counts, sketch.den_index, plan, coalesce).flatten(2)
        log_den = torch.cat([exact_weight, torch.full_like(num, NEG_INF), den], 2)
        log_num = torch.cat([exact_weight, num, torch.full_like(den, NEG_INF)], 2)
    index = torch.cat([held, sketch.index, sketch.den_index.flatten(2)], 2)
    next_slot = slot_of(real[:, 0], plan, layout).view(-1, 1, 1).expand(-1, heads, 1).contiguous()
    table.write_layout(_sources(table, index, layout.valued), layout.valued, index, log_num, log_den, next_slot)
    _remember(
        table.state_of(Structure),
        table.shared,
        host=torch.tensor([[n, *layout, *row] for n, row in zip(until, plans, strict=True)]),
        plan=plan,
        extra_keys=torch.maximum(sketch.alive, plan[:, 4:5]) * structured.to(device),
        representatives=sketch.representatives.contiguous(),
        counts=sketch.counts.to(torch.int32),
        delta=sketch.delta,
        mu=sketch.mu.contiguous(),
        shares=shares,
        streams=sketch.streams,
        squares=squares,
        folded=sketch.folded,
    )


def _sources(table: SlotTable, wanted: Tensor, valued: int) -> Tensor:  # [B, H, K]
    """Slots of a table that hold the tokens `wanted` [B, H, K], the first `valued` of them with a value; -1: none."""
    index = table.index_slots()
    held = index[:, :, : table.value_slots().shape[2]]
    return torch.cat([_places(held, wanted[:, :, :valued]), _places(index, wanted[:, :, valued:])], 2)


def _places(held: Tensor, wanted: Tensor) -> Tensor:  # [B, H, k]
    ordered, order = held.sort(dim=-1, stable=True)
    at = torch.searchsorted(ordered.contiguous(), wanted.contiguous()).clamp_max(held.shape[2] - 1)
    return torch.where(wanted >= 0, order.gather(2, at), -1)


def _remember(state: Structure, in_place: bool, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        setattr(state, name, overwritten(getattr(state, name), tensor) if in_place and tensor is not None else tensor)


def common_layout(plans: list[Plan], sketch: Sketch | None = None) -> Layout:
    """Room for every row; the structure, where there is one, keeps the room it has."""
    sinks, recent, hold, samples, clusters, per_cluster = (max(column) for column in zip(*plans, strict=True))
    if sketch is not None:
        samples, (clusters, per_cluster) = sketch.keys.shape[2], sketch.den_keys.shape[2:4]
    return Layout(sinks, recent + 1, hold, samples, clusters, per_cluster)


def _wanted_positions(real: Tensor, plan: Tensor, layout: Layout) -> Tensor:  # [B, exact slots]
    """The position each exact slot is to hold, the inverse of `slot_of`; -1 for none."""
    sinks, recent, hold = (plan[:, i : i + 1] for i in range(3))
    sink, ring, held = (torch.arange(count, device=plan.device) for count in (layout.sinks, layout.ring, layout.hold))
    newest = real - 1 - (real - 1 - ring) % (recent + 1)
    in_ring = (ring <= recent) & (newest >= torch.maximum(sinks + hold, real - recent))
    return torch.cat(
        [
            torch.where(sink < sinks, sink, -1),
            torch.where(in_ring, newest, -1),
            torch.where(held < hold, held + sinks, -1),
        ],
        1,
    )
