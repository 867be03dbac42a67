"""What operations ask of the tensors they are given; a call that does not fit raises ValueError."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops.common.tensors import DTYPES


def check(name: str, tensor: Tensor | None, shape: tuple[int | str, ...], dtype: torch.dtype | None = None) -> None:
    """An optional tensor has this shape, in which a word names any size, and the dtype, if one is given."""
    if tensor is None or (tensor.shape == shape and (dtype is None or dtype == tensor.dtype)):
        return
    sizes = [wanted if isinstance(wanted, str) else size for size, wanted in zip(tensor.shape, shape, strict=False)]
    if tensor.dim() != len(shape) or sizes != [*shape] or dtype not in (None, tensor.dtype):
        kind, given = ("", "") if dtype is None else (f"{dtype} ".removeprefix("torch."), f"{tensor.dtype} ")
        wanted = f"{kind}[{', '.join(map(str, shape))}]"
        raise ValueError(f"{name} must be {wanted}, got {given}{list(tensor.shape)}.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.")


def check_least(name: str, value: float, least: int, unit: str = "") -> None:
    if not value >= least:
        raise ValueError(f"{name}={value} must be {least}{unit} or more.")


def check_dtypes(**tensors: Tensor) -> None:
    """Tensors share one dtype that operations take."""
    kind, *others = (tensor.dtype for tensor in tensors.values())
    if kind not in DTYPES or any(other != kind for other in others):
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(
            f"{' and '.join(tensors)} must share one dtype of float32, bfloat16, float16, float64; got {got}. "
            "Cast them first."
        )


def check_groups(query_heads: int, heads: int, keys: str = "k", queries: str = "q") -> None:
    """As many query heads for each KV head."""
    if heads == 0 or query_heads % heads:
        raise ValueError(f"{queries} has {query_heads} heads, which is not a multiple of the {heads} heads of {keys}.")


def check_keys(keys: Tensor) -> None:
    """Keys [B, H, n, D] of a dtype that operations take."""
    check("keys", keys, ("batch", "heads", "keys", "size"))
    if keys.dtype not in DTYPES:
        raise ValueError(f"keys must be float32, bfloat16, float16 or float64, got {keys.dtype}. Cast them first.")
