"""Checks that cost time and are done on request: `CompressedCache(model, method, check=True)`."""

from __future__ import annotations

import torch
from torch import Tensor


def require_finite(keys: Tensor, values: Tensor, layer: int, seen: int, model_name: str) -> None:
    """Raises ValueError when a new token's key or value [B, H, n, D] is nan or inf; asks the device."""
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
