"""Format 1, which named what methods remember by strings in three dictionaries: its layers as format 2 has them."""

from __future__ import annotations

from typing import Any

from kvsketch.cache.layer import SlotLayer

# What a new cache brings along, or what lives only during a forward.
LEFT_OUT_OF_LAYERS = {"mask_free", "chunk", "prompt", "aside"}
LEFT_OUT_OF_TABLES = {"seed", "first_head", "extra_keys"}
DICTIONARIES = ("slot_state", "row_state", "marks")
HOT = {
    ("row_state", "host_row"): "host_row",
    ("row_state", "tail_start"): "tail_start",
    ("row_state", "hot_place_of"): "place_of",
    ("row_state", "hot_token_of"): "token_of",
    ("row_state", "hot_last_read"): "last_read",
    ("row_state", "hot_counts"): "counts",
    ("marks", "sink_slots"): "sinks",
}
RENAMED = {
    ("marks", "sizes"): "used",
    ("marks", "order"): "ordered",
    ("marks", "tail_start"): "tail",
    ("row_state", "query_gram"): "gram",
    ("row_state", "partial_keys"): "partial",
    ("row_state", "learned_at"): "learned",
    ("marks", "prompt_queries"): "prompt_seen",
    ("row_state", "speculation_basis"): "basis",
    ("row_state", "speculation_map"): "map",
    ("row_state", "speculation_offset"): "offset",
    ("row_state", "speculation_angles"): "angles",
    ("row_state", "speculation_tokens"): "tokens",
    ("marks", "speculation_tokens"): "fewest_tokens",
}


def upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """The description of one layer in format 2; layers of transformers' own are as they were."""
    if saved["class"] != SlotLayer.__name__:
        return saved
    layer = {name: value for name, value in saved["layer"].items() if name not in LEFT_OUT_OF_LAYERS}
    table = {name: value for name, value in saved["table"].items() if name not in LEFT_OUT_OF_TABLES}
    state: dict[str, Any] = {}
    hot: dict[str, Any] = {}
    for kind in DICTIONARIES:
        for name, value in table.pop(kind)["dict"]:
            if (kind, name) in HOT:
                hot[HOT[kind, name]] = value
            elif name != "row_lse":
                state[RENAMED.get((kind, name), name)] = value
    table |= {"settled": 0, "layout": None}
    table |= {kind: {"version": 1, "fields": held} for kind, held in (("state", state), ("hot", hot))}
    return {**saved, "layer": layer, "table": table}
