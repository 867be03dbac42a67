"""What the whole numbers in a saved table may be.

Kernels take slots, tokens and places from a table as they are: a number that points outside its tensor would make them
read or write memory of others. A checksum does not help against a file that was made on purpose, so every such number
is looked at before the table is used. State that is not named here must consist of floating-point numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.methods import uniform
from kvsketch.methods.balancekv.stream import ZERO_VALUE
from kvsketch.methods.clusterkv import clusters
from kvsketch.methods.infinigen import LEARNED, PARTIAL, speculation
from kvsketch.methods.quest import PAGE_MIN
from kvsketch.methods.recall import BUDGETS
from kvsketch.methods.subgen.slots import FOREVER
from kvsketch.ops.fold_token import Layout, Plan
from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots import hot_set
from kvsketch.slots.offloaded import SINKS
from kvsketch.slots.table import SlotTable

PLACE_OF, TOKEN_OF, LAST_READ, COUNTS = hot_set.MAPS
RECALLED = (clusters.CENTROIDS, PAGE_MIN, PARTIAL)  # state of a table whose tokens are found by their numbers
ANY = torch.iinfo(torch.int64)


class Range(NamedTuple):
    """The shape of a tensor, and the least and the largest number in it."""

    shape: tuple[int, ...]
    least: int
    most: int


def require_in_range(table: SlotTable) -> None:
    """Raises ValueError when a number in the table, whose tensors fit each other, points to nothing."""
    if table.keys is None or table.values is None:
        return
    ranges = _ranges(table)
    for name, tensor in _whole_numbers(table).items():
        wanted = ranges.get(name)
        if wanted is None:
            raise ValueError(f"a table has whole numbers named {name!r}, which this version does not know")
        if tuple(tensor.shape) != wanted.shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)} in place of {list(wanted.shape)}")
        if tensor.numel() and not wanted.least <= int(tensor.min()) <= int(tensor.max()) <= wanted.most:
            raise ValueError(f"{name} holds numbers outside {wanted.least} to {wanted.most}")
    _require_tokens_in_slots(table)
    _require_clusters(table)
    _require_schedule(table)
    _require_sketch(table)


def _whole_numbers(table: SlotTable) -> dict[str, Tensor]:
    own = {name: getattr(table, name) for name in ("index", "next_slot", "clock", "padding")}
    found = {name: t for name, t in own.items() if t is not None} | table.slot_state | table.row_state
    return {name: t for name, t in found.items() if not t.is_floating_point()}


def _ranges(table: SlotTable) -> dict[str, Range]:
    assert table.keys is not None and table.values is not None
    batch, heads, slots = table.keys.shape[:3]
    length, seen = table.length, table.seen
    writable = min(length, table.values.shape[2])
    # After a roll back the clusters may name tokens that are gone; they are then forgotten before they are read.
    indexed = max(seen, table.marks.get(clusters.TAIL, 0))
    count, ordered = (_width(table, name) for name in (clusters.SIZES, clusters.ORDER))
    tokens, places = _width(table, PLACE_OF), _width(table, TOKEN_OF)
    rows = batch if table.host is None else table.host.keys.shape[0]
    return {
        "index": Range((batch, heads, length), CLOSED, seen - 1),
        "next_slot": Range((batch, heads, 1), 0, writable - 1),
        "clock": Range((1,), seen, seen),
        "padding": Range((batch,), 0, seen),
        # balancekv: when each row is full, on the host and on the device; buckets of value norms
        "schedule": Range((batch, 4), 0, ANY.max),
        "limits": Range((batch, 5), 0, ANY.max),
        "capacity": Range((batch, 2), 0, length),
        "bucket": Range((batch, heads, length), 0, ZERO_VALUE),
        "rank": Range((batch, heads, length), 0, seen),
        "arrived": Range((batch, heads, ZERO_VALUE + 1), 0, seen),
        "batch": Range((batch, heads, 2), 1, ANY.max),
        # subgen: sizes on the host and on the device; hash states of its draws
        "host": Range((batch, 1 + len(Layout._fields) + len(Plan._fields)), 0, FOREVER),
        "plan": Range((batch, len(Plan._fields)), 0, length),
        "extra_keys": Range((batch, heads), 0, max(seen, length)),
        "counts": Range((batch, heads, _width(table, "representatives")), 0, seen),
        "streams": Range((batch, heads, 3), ANY.min, ANY.max),
        "folded": Range((batch, heads), 0, seen),
        # uniform: sizes of its rows, and where its strata start
        uniform.SIZES: Range((batch, 2), 0, ANY.max),
        uniform.STRATA: Range((batch, _strata(table)), 0, ANY.max),
        # clusters, and what recall methods share
        clusters.SIZES: Range((batch, heads, count), 0, ordered),
        clusters.OFFSETS: Range((batch, heads, count), 0, ordered),
        clusters.ORDER: Range((batch, heads, ordered), 0, indexed - 1),
        clusters.SPANS: Range((batch, 2, 2), 0, max(slots, indexed)),
        clusters.SHIFT: Range((batch,), -indexed, length),
        BUDGETS: Range((batch,), 1, max(1, table.prompt_tokens)),
        LEARNED: Range((batch,), 0, seen),
        speculation.TOKENS: Range((batch,), 0, speculation.FIT_TOKENS),
        # tokens in host memory
        hot_set.HOST_ROW: Range((batch,), 0, rows - 1),
        hot_set.TAIL: Range((batch,), 0, seen if table.host is None else table.host.length),
        PLACE_OF: Range((batch, heads, tokens), -1, places - 1),
        TOKEN_OF: Range((batch, heads, places), -1, tokens - 1),
        LAST_READ: Range((batch, heads, places), ANY.min, ANY.max),
        COUNTS: Range((batch, heads, 4), 0, ANY.max),
    }


def _strata(table: SlotTable) -> int:
    tensor = table.row_state.get(uniform.STRATA)
    return 1 if tensor is None or tensor.dim() != 2 else tensor.shape[1]


def _width(table: SlotTable, name: str) -> int:
    tensor = table.row_state.get(name)
    return 0 if tensor is None or tensor.dim() < 3 else tensor.shape[2]


def _require_tokens_in_slots(table: SlotTable) -> None:
    """Recall methods find a token by its number: in the slot of that number, or in host memory and its tail."""
    assert table.values is not None
    held = min(table.length, table.values.shape[2])
    if table.host is not None and not table.exact:
        sinks = table.marks.get(SINKS, -1)
        held = table.host.length + table.length - sinks
        places = table.length + _width(table, TOKEN_OF)
        if not 0 <= sinks <= table.length or PLACE_OF not in table.row_state or places > table.values.shape[2]:
            raise ValueError("the sinks or the hot set of a table do not fit its slots")
    recalls = table.host is not None or any(name in table.row_state for name in RECALLED)
    if (table.exact and table.length != table.seen) or (recalls and table.seen > held):
        raise ValueError(f"a table counts {table.seen} tokens and has no place for all of them")


def _require_clusters(table: SlotTable) -> None:
    state, marks = table.row_state, table.marks
    if clusters.CENTROIDS not in state:
        return
    tail = marks.get(clusters.TAIL, -1)
    names = (clusters.SIZES, clusters.OFFSETS, clusters.ORDER, clusters.SPANS, clusters.SHIFT)
    if any(name not in state for name in names) or tail < 0:
        raise ValueError("a part of the clusters of a table is missing")
    sizes, offsets, spans, shift = (state[n].long() for n in names if n != clusters.ORDER)
    sound = bool((sizes + offsets <= _width(table, clusters.ORDER)).all())
    sound &= _width(table, clusters.CENTROIDS) == sizes.shape[2]
    sound &= marks.get(clusters.SIZES, 0) <= sizes.shape[2]
    sound &= marks.get(clusters.ORDER, 0) <= _width(table, clusters.ORDER)
    # Where the tail ends is told from the tokens seen.
    sound &= bool((spans[:, 1, 0] == shift + tail).all())
    sound &= tail > table.seen or bool((shift + table.seen <= table.length).all())
    sound &= tail > table.seen or int(spans.max()) <= table.length
    if not sound:
        raise ValueError("the clusters of a table do not fit each other")


def _require_schedule(table: SlotTable) -> None:
    """BalanceKV: full rows make room for one token or more."""
    for name, freed in (("limits", 3), ("schedule", 2)):
        if name in table.row_state and int(table.row_state[name][:, freed].min()) < 1:
            raise ValueError(f"a row of a table frees no slots ({name})")


def _require_sketch(table: SlotTable) -> None:
    """SubGen: slots lie where the layout says, and no row uses more of them than there are."""
    state = table.row_state
    if not {"host", "plan"} & state.keys():
        return
    assert table.keys is not None and table.values is not None
    rows = state["host"][:, 1:].tolist()
    layouts = {tuple(row[: len(Layout._fields)]) for row in rows}
    layout = Layout(*layouts.pop())
    plans = [row[len(Layout._fields) :] for row in rows]
    # Tokens that may still be rolled back stand behind the samples.
    new = table.length - layout.total
    sound = not layouts and layout.ring > 0 and new >= 0 and layout.valued + new == table.values.shape[2]
    sound &= state["plan"].tolist() == plans
    for plan in plans:
        used = Plan(*plan)._replace(recent=plan[1] + 1)
        sound &= all(part <= room for part, room in zip(used, layout, strict=True))
    heads = tuple(table.keys.shape[:2])
    sound &= tuple(state["representatives"].shape) == (*heads, layout.clusters, table.keys.shape[3])
    sound &= tuple(state["shares"].shape) == (*heads, layout.samples)
    sound &= all(tuple(state[name].shape) == heads for name in ("delta", "mu"))
    if not sound:
        raise ValueError("the structure of a table does not fit its slots")
