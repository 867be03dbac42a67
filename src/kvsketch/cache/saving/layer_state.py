"""The state of a cache layer as JSON and named tensors, and back.

A value is written as JSON where it is plain, else as one of

    {"tensor": name}  {"store": name}  {"dict": [[key, value], ...]}  {"list": [...]}  {"dtype": name}  {"device": ...}

Layers are told apart by the name of their class; what transformers' own layers hold is written in the same way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.saving.ranges import require_in_range
from kvsketch.slots.host import HostStore
from kvsketch.slots.hot_set import MAPS
from kvsketch.slots.offloaded import host_capacity
from kvsketch.slots.table import SlotTable

# Numbers that a method keeps in host memory wherever the model runs, so that a step can read them without waiting.
ON_HOST = ("row_state.schedule", "row_state.host")
# What a new layer brings along, and what lives only during a forward.
NOT_STATE = ("table", "method", "model_name", "keys_are_shared", "before", "waiting", "refused", "is_read", "whole")
# Where a table belongs; the process group goes by another name in every run.
PLACE = ("layer_idx", "num_layers", "rank", "compressed_layers", "head_group", "rotary", "positions")
IN_FORWARD = ("previous", "row_lse", "row_logits")


def encode_layer(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a layer; its tensors go to `tensors` under names that begin with `name`."""
    state = {key: value for key, value in vars(layer).items() if key not in NOT_STATE}
    found = {"class": type(layer).__name__, "layer": _encode_all(state, name, tensors)}
    if isinstance(layer, SlotLayer):
        table = layer.table
        fields = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.name not in PLACE + IN_FORWARD}
        fields["extra_keys"] = 0
        if table.keys is not None and table.exact:
            # What lies beyond the tokens in use was never written.
            fields["keys"], fields["values"] = table.key_slots(), table.value_slots()
        found["table"] = _encode_all(fields, f"{name}.table", tensors)
    return found


def _encode_all(values: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: _encode(value, f"{name}.{key}", tensors) for key, value in values.items()}


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, HostStore):
        value.synchronize()
        for part in ("keys", "values"):
            tensors[f"{name}.{part}"] = getattr(value, part)[:, :, : value.length]
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


class LayerReader:
    """Builds the state of a layer from JSON and named tensors; ValueError for what does not fit together."""

    def __init__(self, tensor: Callable[[str], Tensor], device: torch.device) -> None:
        self._tensor, self._device = tensor, device

    def fill(self, layer: Any, saved: dict[str, Any]) -> None:
        """Gives a new layer the saved state."""
        if saved["class"] != type(layer).__name__:
            raise ValueError(f"a layer of class {saved['class']} was saved where {type(layer).__name__} belongs")
        for name, value in saved["layer"].items():
            if name in NOT_STATE or callable(getattr(type(layer), name, None)):
                raise ValueError(f"{type(layer).__name__} has no state named {name!r}")
            setattr(layer, name, self._decode(value))
        if isinstance(layer, SlotLayer):
            layer.table = self._table(layer.table, saved["table"])

    def _table(self, new: SlotTable, saved: dict[str, Any]) -> SlotTable:
        saved.pop("extra_keys", 0)
        fields = {f.name for f in dataclasses.fields(SlotTable)} - {*PLACE, *IN_FORWARD}
        if saved.keys() != fields:
            raise ValueError(f"a table has other fields here: {', '.join(sorted(saved.keys() ^ fields))}")
        values = {name: self._decode(value) for name, value in saved.items() if name != "host"}
        table = SlotTable(**{name: getattr(new, name) for name in PLACE}, **values)
        require_sound(table)
        if saved["host"] is not None:
            table.host = self._store(table, saved["host"]["store"])
        require_in_range(table)
        return table

    def _store(self, table: SlotTable, name: str) -> HostStore:
        keys, values = self._tensor(f"{name}.keys"), self._tensor(f"{name}.values")
        near = table.keys
        if near is None or table.values is None or keys.dim() != 4 or values.shape[:3] != keys.shape[:3]:
            raise ValueError("the keys and values in host memory do not fit those on the device")
        if keys.shape[1::2] != near.shape[1::2] or values.shape[3] != table.values.shape[3] or keys.dtype != near.dtype:
            raise ValueError("the keys and values in host memory do not fit those on the device")
        places = table.row_state.get(MAPS[0])
        capacity = host_capacity(keys.shape[2]) if places is None else places.shape[2]
        if capacity < keys.shape[2]:
            raise ValueError("the hot set has no place for some tokens in host memory")
        store = HostStore(near, table.values, keys.shape[0], capacity)
        store.write(0, keys, values)
        return store

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("a bare list in the description of a layer")
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            tensor = self._tensor(content)
            return tensor if content.endswith(ON_HOST) else tensor.to(self._device)
        if kind == "dict":
            return {key: self._decode(item) for key, item in content}
        if kind == "list":
            return [self._decode(item) for item in content]
        if kind == "dtype":
            found = getattr(torch, content)
            if isinstance(found, torch.dtype):
                return found
        if kind == "device":
            return self._device
        raise ValueError(f"unknown kind of value {kind!r} in the description of a layer")


def require_sound(table: SlotTable) -> None:
    """Raises ValueError unless the parts of a table agree in shape; what they point to is for `ranges`."""
    counts = [table.seed, table.seen, table.length, table.appended, table.new_tokens, table.prompt_tokens]
    counts += [table.first_head, *table.marks.values()]
    if not all(type(count) is int for count in counts) or min(counts[1:]) < 0:
        raise ValueError("a counter of a table is no whole number of 0 or more")
    if table.keys is None or table.values is None:
        if table.keys is not table.values or table.seen:
            raise ValueError("a table has keys without values or counts tokens that it does not hold")
        return
    if table.keys.dim() != 4 or not table.keys.is_floating_point() or table.keys.dtype != table.values.dtype:
        raise ValueError("the keys and values of a table are not alike")
    batch, heads, slots = table.keys.shape[:3]
    parts: list[tuple[Tensor | None, tuple[int, ...], torch.dtype]] = [
        (table.index, (batch, heads, table.length), torch.int32),
        (table.log_num, (batch, heads, table.length), torch.float32),
        (table.log_den, (batch, heads, table.length), torch.float32),
        (table.next_slot, (batch, heads, 1), torch.int64),
        (table.clock, (1,), torch.int64),
        (table.padding, (batch,), torch.int64),
    ]
    sound = all(t is None or (tuple(t.shape) == shape and t.dtype == dtype) for t, shape, dtype in parts)
    sound &= table.values.dim() == 4 and table.values.shape[:2] == (batch, heads)
    sound &= table.length <= slots and table.values.shape[2] <= slots and table.new_tokens <= table.seen
    sound &= all(t.shape[:3] == (batch, heads, table.length) for t in table.slot_state.values())
    sound &= all(t.shape[:1] == (batch,) for t in table.row_state.values())
    sound &= len({t is None for t in (table.index, table.log_den, table.next_slot, table.clock)}) == 1
    if not sound:
        raise ValueError("the tensors of a table do not fit each other")


def layer_devices(model: Any, count: int) -> list[torch.device]:
    """The device of each layer of a model: that of its weights, which may be spread over several devices."""
    devices = [torch.device(getattr(model, "device", "cpu"))] * count
    for name, weight in model.named_parameters() if hasattr(model, "named_parameters") else ():
        number = re.search(r"\.(\d+)\.", name)
        if number and int(number[1]) < count and weight.device.type != "meta":
            devices[int(number[1])] = weight.device
    return devices
