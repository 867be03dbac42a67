"""Passages of real text as token ids: the beginnings of the longest speeches, or of those named."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsketch.models import texts


def names(wanted: str) -> list[str]:
    """The speeches that `--texts` asks for: so many of the longest, or names separated by commas."""
    if not wanted.strip().isdigit():
        return [name.strip() for name in wanted.split(",") if name.strip()]
    known = texts.speeches()
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
