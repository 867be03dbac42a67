"""What a compressed cache refuses: attention that a slot table cannot serve, and numbers that are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.cache.layer import LayerView

UNSUPPORTED = {"position_bias", "indices", "block_indices"}  # arguments of attention that a slot table cannot serve


def require_supported(module: nn.Module, view: LayerView, query: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
    """Raises for attention that a slot table cannot serve, naming the model's attention class."""
    if kwargs.get("use_cache") is False and view.layer.table.context.rank == 0 and _comes_again(view, query, kwargs):
        raise ValueError(
            "use_cache=False feeds the whole text to the cache again at every step; leave it "
            "out or pass no cache, and call cache.reset() to use it again"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention, which kvsketch cannot "
                f"compress; use DynamicCache"
            )
    if value is not view.values and value.shape != view.handed_shape:
        raise ValueError(
            f"{type(module).__name__} changes keys or values between the cache and its attention, "
            "which kvsketch cannot compress; use DynamicCache"
        )


def _comes_again(view: LayerView, query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the new tokens start at position 0 again, although the cache has read tokens before.

    `use_cache=False` alone proves nothing: some models always pass the default of their layers to attention. Where a
    model passes no positions: whether the previous forward brought all tokens and this one brings one more.
    """
    new, positions = query.shape[2], kwargs.get("position_ids")
    before = view.seen - new
    if new == 1 or before == 0:
        return False
    if positions is None:
        return new == before + 1 == view.layer.read_before + 1
    return bool((positions.amin(-1) == 0).all() & (positions[..., -1] < new).all())


def require_finite(keys: Tensor, values: Tensor, layer: int, seen: int, model_name: str) -> None:
    """Raises ValueError when a new token's key or value [B, H, n, D] is nan or inf; synchronises with the GPU.

    Done on request: `CompressedCache(model, method, check=True)`.
    """
    for name, tensor in (("key", keys), ("value", values)):
        wrong = ~tensor.isfinite()
        if bool(wrong.any()):
            raise ValueError(_message(name, tensor, wrong, layer, seen, model_name))


def _message(name: str, tensor: Tensor, wrong: Tensor, layer: int, seen: int, model_name: str) -> str:
    places = wrong.any(-1).nonzero()  # [m, 3]: batch row, KV head, token
    row, head, token = places[0].tolist()
    numbers = tensor[row, head, token].float()
    kind = "nan" if bool(numbers.isnan().any()) else "inf"
    rows, heads = (_list(sorted(set(places[:, i].tolist()))) for i in (0, 1))
    more = "" if len(places) == 1 else f", one of {len(places)} such {name}s (batch rows {rows}; KV heads {heads})"
    overflow = " (float16 overflows at 65,504; try bfloat16)" if tensor.dtype == torch.float16 else ""
    return (
        f"{model_name}, layer {layer}: {kind} in the {name} of batch row {row}, KV head {head}, token {seen + token}"
        f"{more}. Check the model's weights, dtype{overflow} and inputs, then begin again with cache.reset()"
    )


def _list(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
