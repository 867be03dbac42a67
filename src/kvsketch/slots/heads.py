"""Tensor parallel: which heads of a model this process holds, and what processes must agree on.

transformers splits the query, key and value projections of a layer among the processes of a group, in order: of R
processes the one with number r holds the KV heads r H/R to (r + 1) H/R - 1 and the query heads that read them. A
compressed cache holds the slots of these heads. Methods treat almost everything per KV head. Two things make the result
independent of the number of processes: random draws use the number of the head in the whole model
(`SlotTable.first_head`), and the few numbers that all heads of a layer share are combined over the processes here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed
from torch import Tensor

from kvsketch.slots.table import SlotTable

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
QUERY_PROJECTIONS = ("q_proj", "q_b_proj", *KEY_PROJECTIONS[1:])
# A table names its group, so that tables can be copied and saved; a process group cannot.
_groups: dict[str, Any] = {}


@dataclass(frozen=True)
class HeadShare:
    """The share of every layer's KV heads that this process holds: the `number`-th of `parts`."""

    number: int
    parts: int
    group: str

    def place(self, table: SlotTable, heads: int) -> None:
        """Tells a table which heads of the model its `heads` KV heads are."""
        first = self.number * heads
        if (table.context.first_head, table.context.head_group) != (first, self.group):
            table.context = replace(table.context, first_head=first, head_group=self.group)


def own_heads(table: SlotTable) -> slice:
    """Which of the heads that `of_all_heads` gives are here: all of them where processes agree on nothing (vLLM's)."""
    first = table.context.first_head if table.context.head_group else 0
    return slice(first, first + table.shape[1])


def head_share(model: Any) -> HeadShare | None:
    """How the heads of a model, or of a model's config, are divided among processes; None when every process has all.

    Raises ValueError where heads cannot be told apart: keys that every process holds while the queries are divided,
    KV heads that the processes do not divide evenly, layers on different processes, a config without its model.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        sharing = getattr(getattr(model, "distributed_config", None), "tp_size", None) or 1
        if sharing > 1:
            raise ValueError(
                f"the config of a model that {sharing} processes share does not say which heads are here; "
                "make the cache from the model: CompressedCache(model, ...)"
            )
        return None
    if _size(mesh, "pp") > 1:
        raise ValueError(
            f"the layers are spread over {_size(mesh, 'pp')} processes (pp_size); a compressed cache serves models "
            "whose layers are all in one process: use tp_size or device_map instead"
        )
    parts = _size(mesh, "tp")
    if parts == 1:
        return None
    plan = model.tp_plan
    if not _splits(plan, KEY_PROJECTIONS):
        if _splits(plan, QUERY_PROJECTIONS):
            raise ValueError(
                f"tensor parallel gives each of {parts} processes all KV heads of {model.config.model_type} but a part "
                "of the query heads that read them, so that their caches would differ; use a tp_plan that divides both "
                "or neither, or device_map"
            )
        return None
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and heads % parts:
        raise ValueError(
            f"{heads} KV heads of {model.config.model_type} cannot be divided among {parts} processes; "
            f"use tp_size={' or '.join(str(n) for n in range(2, heads + 1) if heads % n == 0) or 1}"
        )
    group = mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()
    _groups[group.group_name] = group
    return HeadShare(torch.distributed.get_rank(group), parts, group.group_name)


def spread_over(model: Any) -> str | None:
    """What a model is spread over, in words: several devices (`device_map`) or processes; None for one device."""
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        return f"the devices {', '.join(devices)}"
    mesh = getattr(model, "_device_mesh", None)
    return None if mesh is None or mesh.size() == 1 else f"{mesh.size()} processes"


def require_one_device(model: Any) -> None:
    """Raises ValueError for a model of several devices whose layers read the keys of other layers.

    The copy of the keys on another device does not tell which cache it came from, nor what its slots weigh.
    """
    if getattr(model, "hf_device_map", None) and (spread := spread_over(model)) is not None:
        raise ValueError(
            f"layers of {model.config.model_type} read the keys of other layers, so that all must be on one device, "
            f"not on {spread}; load it with device_map={{'': 0}}, or use DynamicCache"
        )


def mean_over_heads(numbers: Tensor, table: SlotTable) -> Tensor:  # [B]
    """The mean of numbers [B, heads of this process] over all heads of the layer, wherever they are."""
    if not table.context.head_group:
        return numbers.mean(-1)
    group = _groups[table.context.head_group]
    total = numbers.sum(-1)
    torch.distributed.all_reduce(total, group=group)
    return total / (numbers.shape[-1] * group.size())


def least_over_heads(numbers: Tensor, table: SlotTable) -> Tensor:  # [B]
    """The least of integers [B, heads of this process] over all heads of the layer, wherever they are."""
    least = numbers.amin(-1)
    if table.context.head_group:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=_groups[table.context.head_group])
    return least


def of_all_heads(numbers: Tensor, table: SlotTable, fill: float = 0) -> Tensor:
    """Numbers [B, heads of this process, ...] of all heads of the layer, in their order; `fill` where the last
    dimension is longer elsewhere.
    """
    if not table.context.head_group:
        return numbers
    group = _groups[table.context.head_group]
    longest = torch.tensor(numbers.shape[-1], device=numbers.device)
    if numbers.dim() > 2:
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=group)
        numbers = torch.nn.functional.pad(numbers, (0, int(longest) - numbers.shape[-1]), value=fill)
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    torch.distributed.all_gather(parts, numbers.contiguous(), group=group)
    return torch.cat(parts, 1)


def _splits(plan: dict[str, str], projections: tuple[str, ...]) -> bool:
    """Whether a tensor parallel plan leaves each process a part of the output of one of these projections."""
    return any(name.rsplit(".", 1)[-1] in projections and style == "colwise" for name, style in plan.items())


def _size(mesh: Any, dimension: str) -> int:
    """Processes along one dimension of a mesh; a mesh of one dimension without a name is that of tensor parallel."""
    names = mesh.mesh_dim_names or ("tp",)
    return int(mesh.size(names.index(dimension))) if dimension in names else 1
