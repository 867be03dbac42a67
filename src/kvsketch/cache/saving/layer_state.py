"""The state of a cache layer as JSON and named tensors, and back.

A compressed layer, its table and the state of its method name what is saved of them (`SlotLayer.SAVED`, `SAVED`,
the fields of a `TableState`, which has a version of its own). What transformers' own layers hold is written as it is.
A value is written as JSON where it is plain, else as one of

    {"tensor": name}  {"codes": {...}}  {"layout": name}  {"store": name}  {"dict": [[key, value], ...]}
    {"list": [...]}  {"dtype": name}  {"device": ...}
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvsketch.cache.layer import RECORDINGS, SlotLayer
from kvsketch.methods.base import Method
from kvsketch.ops.codec import Codec
from kvsketch.ops.codec.basis import BASIS_PARTS, Basis, LearnedCodec
from kvsketch.slots.checks import require_ranges, require_shapes
from kvsketch.slots.codes import PARTS, PlainSlots, SlotCodes
from kvsketch.slots.forward import LayerForward
from kvsketch.slots.host import HostStore
from kvsketch.slots.hot_set import HotSet
from kvsketch.slots.layout import Layout
from kvsketch.slots.offloaded import host_capacity, parts_of
from kvsketch.slots.parts import NUMBERS, VECTORS
from kvsketch.slots.state import HOST, NUMBER, TableState
from kvsketch.slots.table import SlotTable, make_room, most_room, stored_vectors

# What a file holds of a table, beside the states and what lies in host memory; its place comes with a new cache.
BOUNDED = ("index", "log_num", "log_den", "next_slot", "clock")
FORWARD = ("appended", "scale")  # of the last forward
SAVED = (
    "keys", "values", *BOUNDED, *FORWARD, "padding", "seen", "length", "new_tokens", "prompt_tokens", "settled",
    "layout", "capacity", "chosen_bits",
)  # fmt: skip
ROOM = "room"  # tokens for which a table that grows has memory; files of earlier releases do not say
S = TypeVar("S", bound=TableState)


def encode_layer(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a layer; its tensors go to `tensors` under names that begin with `name`."""
    if not isinstance(layer, SlotLayer):
        return {"class": type(layer).__name__, "layer": _encode_all(vars(layer), name, tensors)}
    table = layer.table
    values = {name: _saved(table, name) for name in SAVED} | {"host": table.host}
    if table.exact:
        # What lies beyond the tokens in use was never written.
        held = (None, None) if table.empty else stored_vectors(table)
        values |= dict(zip(("keys", "values"), held, strict=True))
        values |= {ROOM: 0 if table.empty else table.keys.shape[2]}
    states = {"state": table.state_of(layer.method.State), "hot": table.hot}
    return {
        "class": type(layer).__name__,
        "layer": _encode_all({field: getattr(layer, field) for field in layer.SAVED}, name, tensors),
        "table": _encode_all(values, f"{name}.table", tensors)
        | {kind: _encode_state(state, f"{name}.table.{kind}", tensors) for kind, state in states.items()},
    }


def _saved(table: SlotTable, name: str) -> Any:
    """A part of a table, or what one of its fields holds."""
    if name in (*VECTORS, *NUMBERS):
        return table.parts.get(name)
    return getattr(table.forward if name in FORWARD else table, name)


def _encode_state(state: TableState, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    held = {f.name: getattr(state, f.name) for f in fields(state)}
    return {"version": state.version, "fields": _encode_all(held, name, tensors)}


def _encode_all(values: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: _encode(value, f"{name}.{key}", tensors) for key, value in values.items()}


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, PlainSlots):
        return _encode(value.read, name, tensors)
    if isinstance(value, SlotCodes):
        tensors.update({f"{name}.{part}": tensor for part, tensor in value.parts().items()})
        codec: dict[str, Any] = {"bits": value.codec.bits, "size": value.codec.size, "seed": value.codec.seed}
        if isinstance(value.codec, LearnedCodec):
            codec["learned"] = True
            tensors.update({f"{name}.{part}": getattr(value.codec.basis, part) for part in BASIS_PARTS})
        kind = {"fresh": value.fresh is not None, "dtype": _encode(value.dtype, name, tensors)}
        kind |= {"tail": value.tail} if value.tail else {}
        return {"codes": {"name": name, **kind, **codec}}
    if isinstance(value, Layout):
        tensors[f"{name}.capacity"] = value.capacity
        return {"layout": f"{name}.capacity"}
    if isinstance(value, HostStore):
        value.synchronize()
        for part, tensor in zip(_part_names(len(value.parts)), value.parts, strict=True):
            tensors[f"{name}.{part}"] = tensor[:, :, : value.length]
        return {"store": name}
    if isinstance(value, dict):
        return {"dict": [[key, _encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "that of the layer"}
    raise ValueError(f"a cache with a {type(value).__name__} at {name} cannot be saved; use copy.deepcopy(cache)")


def _part_names(count: int) -> list[str]:
    """What a host store calls its tensors in a file: keys and values, or the parts of codes in their order."""
    return ["keys", "values"] if count == 2 else [f"part{number}" for number in range(count)]


class LayerReader:
    """Builds the state of a layer from JSON and named tensors; ValueError for what does not fit together."""

    def __init__(self, tensor: Callable[[str], Tensor], device: torch.device, sizes: Collection[int]) -> None:
        """sizes: those that keys and values of the model can have."""
        self._tensor, self._device, self._sizes = tensor, device, sizes

    def fill(self, layer: Any, saved: dict[str, Any]) -> None:
        """Gives a new layer the saved state."""
        if saved["class"] != type(layer).__name__:
            raise ValueError(f"a layer of class {saved['class']} was saved where {type(layer).__name__} belongs")
        if isinstance(layer, SlotLayer):
            _require_names("a layer", saved["layer"], layer.SAVED)
            _require_kinds(layer, saved["layer"])
            layer.table = self._table(layer.table, layer.method, saved["table"])
        for name, value in saved["layer"].items():
            if callable(getattr(type(layer), name, None)):
                raise ValueError(f"{type(layer).__name__} has no state named {name!r}")
            setattr(layer, name, self._decode(value))

    def _table(self, new: SlotTable, method: Method, saved: dict[str, Any]) -> SlotTable:
        _require_names("a table", {*saved} - {ROOM}, (*SAVED, "state", "hot", "host"))
        values = {name: self._decode(saved[name]) for name in SAVED if name != "layout"}
        if (values["keys"] is None) != (values["values"] is None):
            raise ValueError("a table has keys without values")
        for name in ("keys", "values"):
            values[name] = PlainSlots(values[name]) if isinstance(values[name], Tensor) else values[name] or new.keys
        capacity = None if saved["layout"] is None else self._tensor(saved["layout"]["layout"]).to(self._device)
        values["layout"] = None if capacity is None else Layout.of(capacity, bool(new.context.bits))
        values |= {"state": self._state(method.State, saved["state"]), "hot": self._state(HotSet, saved["hot"])}
        own = {name: values.pop(name) for name in BOUNDED}
        values["forward"] = LayerForward(**{name: values.pop(name) for name in FORWARD})
        exact = {own[name] is None for name in BOUNDED if name != "log_num"}
        if len(exact) > 1 or (True in exact and own["log_num"] is not None):
            raise ValueError("the tensors of a table do not fit each other")
        parts = {name: values.pop(name) for name in VECTORS} | {name: own.pop(name) for name in NUMBERS}
        table = new.like(parts, values.pop("state"), exact=True in exact, **own | values)
        require_shapes(table)
        if saved["host"] is not None:
            table = table.like(host=self._store(table, saved["host"]["store"]))
        require_ranges(table)
        _require_sizes(table, self._sizes)
        room = saved.get(ROOM, 0)
        if type(room) is not int:
            raise ValueError(f"a table has memory for {room!r} tokens, which is no whole number")
        if table.exact and not table.empty and room > table.keys.shape[2]:
            # No more than a table has by itself: a file does not decide how much memory is taken.
            make_room(table, min(room, most_room(table.length)))
        return table

    def _state(self, kind: type[S], saved: dict[str, Any]) -> S:
        """A state of the method; a field that the file does not name is absent."""
        if saved["version"] != kind.version:
            raise ValueError(f"{kind.__name__} has version {saved['version']} in the file and {kind.version} here")
        roles = {f.name: f.metadata["role"] for f in fields(kind)}
        if unknown := saved["fields"].keys() - roles.keys():
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))} here")
        state = kind(**{name: self._decode(v, roles[name] == HOST) for name, v in saved["fields"].items()})
        if wrong := [n for n, r in roles.items() if r != NUMBER and not isinstance(getattr(state, n), Tensor | None)]:
            raise ValueError(f"{kind.__name__} holds no tensor at {', '.join(wrong)}")
        return state

    def _store(self, table: SlotTable, name: str) -> HostStore:
        if table.empty:
            raise ValueError("a table has tokens in host memory and counts none")
        near = parts_of(table)
        far = [self._tensor(f"{name}.{part}") for part in _part_names(len(near))]
        alike = all(f.dim() == 4 and f.shape[:3] == far[0].shape[:3] for f in far)
        if not alike or any(
            f.dtype != n.dtype or f.shape[1::2] != n.shape[1::2] for f, n in zip(far, near, strict=True)
        ):
            raise ValueError("the keys and values in host memory do not fit those on the device")
        tokens = far[0].shape[2]
        capacity = table.hot.tokens or host_capacity(tokens)
        if capacity < tokens:
            raise ValueError("the hot set has no place for some tokens in host memory")
        store = HostStore(near, far[0].shape[0], capacity)
        store.write(0, far)
        return store

    def _codes(self, saved: dict[str, Any]) -> SlotCodes:
        """Quantised keys or values."""
        names = [part for part in PARTS if part != "fresh" or saved["fresh"]]
        parts = {part: self._tensor(f"{saved['name']}.{part}").to(self._device) for part in names}
        codec = Codec(saved["bits"], saved["size"], saved["seed"])
        if saved.get("learned"):
            basis = Basis(*(self._tensor(f"{saved['name']}.{part}") for part in BASIS_PARTS))
            if len(basis.deviation) != parts["center"].shape[1]:
                raise ValueError(f"learned directions of {len(basis.deviation)} heads, and {parts['center'].shape[1]}")
            codec = LearnedCodec(saved["bits"], saved["size"], saved["seed"], basis=basis)
        slots = SlotCodes(codec, dtype=self._decode(saved["dtype"]), tail=saved.get("tail", 0), **parts)
        if misfit := slots.misfit():
            raise ValueError(f"keys or values in {codec.bits} bits do not fit together: {misfit}")
        return slots

    def _decode(self, value: Any, on_host: bool = False) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("a bare list in the description of a layer")
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            tensor = self._tensor(content)
            return tensor if on_host else tensor.to(self._device)
        if kind == "codes":
            return self._codes(content)
        if kind == "dict":
            return {key: self._decode(item) for key, item in content}
        if kind == "list":
            return [self._decode(item) for item in content]
        if kind == "dtype":
            result = getattr(torch, content)
            if isinstance(result, torch.dtype):
                return result
        if kind == "device":
            return self._device
        raise ValueError(f"unknown kind of value {kind!r} in the description of a layer")


def _require_kinds(layer: SlotLayer, saved: dict[str, Any]) -> None:
    """Raises ValueError unless counts are counts and switches are switches, as in a new layer."""
    for name, value in saved.items():
        kind = type(getattr(layer, name))
        if name == "pending":
            continue
        if type(value) is not kind or (kind is int and value < 0):
            raise ValueError(f"{name}={value!r} of a layer is not a {kind.__name__} as in a new one, or is negative")
        if name == "recording" and value not in RECORDINGS:
            raise ValueError(f"recording={value!r} of a layer is not one of {', '.join(RECORDINGS)}")


def _require_sizes(table: SlotTable, sizes: Collection[int]) -> None:
    for what, slots in (("keys", table.keys), ("values", table.values)):
        size = slots.codec.size if isinstance(slots, SlotCodes) else slots.shape[-1]
        if not table.empty and size not in sizes:
            wanted = ", ".join(map(str, sorted(sizes)))
            raise ValueError(f"the {what} of layer {table.context.layer_idx} have the size {size}, not {wanted}")


def _require_names(what: str, saved: Collection[str], wanted: Collection[str]) -> None:
    if different := set(saved) ^ set(wanted):
        raise ValueError(f"{what} has other fields here: {', '.join(sorted(different))}")
