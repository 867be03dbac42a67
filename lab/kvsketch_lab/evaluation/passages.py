"""Passages of real text as token ids: the beginnings of the longest speeches, or of those named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kvsketch.models import texts
from kvsketch_lab.options import option
from kvsketch_lab.records.held_out import is_held_out_text

HELD_OUT = "held-out:"


def texts_option(default: str) -> Any:
    return option(default, "so many of the longest speeches (held-out:4: of those kept out of tuning), or names")


def names(wanted: str) -> list[str]:
    """The speeches that `--texts` asks for: so many of the longest, or comma-separated names."""
    apart = wanted.startswith(HELD_OUT)
    wanted = wanted.removeprefix(HELD_OUT)
    if not wanted.strip().isdigit():
        result = [name.strip() for name in wanted.split(",") if name.strip()]
        for name in result:
            texts.document(name)
        return result
    known = [name for name in texts.speeches() if not apart or is_held_out_text(name)]
    count = int(wanted)
    if not 1 <= count <= len(known):
        raise ValueError(f"--texts {wanted} is outside 1 to {len(known)}, the number of speeches; or name speeches")
    return sorted(known, key=lambda name: -len(texts.document(name)))[:count]


def token_ids(tokenizer: Any, name: str, tokens: int, device: Any) -> Tensor:  # [1, tokens]
    """The first `tokens` tokens of a speech."""
    ids = tokenizer(texts.document(name), return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"{name} has {ids.shape[1]} tokens, not {tokens}; use fewer tokens or a longer text")
    return ids.to(device)


def require(tokenizer: Any, wanted: Iterable[str], tokens: int) -> None:
    """Raises ValueError when one of the speeches has fewer tokens."""
    for name in wanted:
        token_ids(tokenizer, name, tokens, "cpu")
