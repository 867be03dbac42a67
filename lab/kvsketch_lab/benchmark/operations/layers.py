"""One layer of Llama-3.1-8B: its sizes, and random keys of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsketch_lab.benchmark.device import Device

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE = 32, 32, 8, 128
WORDS = 8192  # of rotated keys
SCALE = HEAD_SIZE**-0.5
SIZES = {"query_heads": QUERY_HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE}


def normal_keys(length: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, KV_HEADS, length, HEAD_SIZE, generator=generator, device=generator.device)


def clustered_keys(length: int, generator: torch.Generator) -> Tensor:
    """Tight clusters, each a run of neighbouring tokens: a center rules out many candidates, so rounds are many."""
    clusters = max(1, length // 64)
    middle = normal_keys(clusters, generator).repeat_interleave(-(-length // clusters), 2)[:, :, :length]
    return middle + 0.1 * normal_keys(length, generator)


def rotated_keys(length: int, generator: torch.Generator) -> Tensor:
    """Words of a vocabulary drawn by Zipf's law, a key each with a little noise, rotated by position as Llama does."""
    words = normal_keys(WORDS, generator)
    chance = 1.0 / torch.arange(1, WORDS + 1, device=generator.device)
    drawn = torch.multinomial(chance, length, replacement=True, generator=generator)
    keys = words[:, :, drawn] + 0.3 * normal_keys(length, generator)
    steps = torch.linspace(0, 1, HEAD_SIZE // 2, device=keys.device)
    angle = torch.arange(length, device=keys.device).unsqueeze(-1) * 5e5**-steps
    first, second = keys.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


KEYS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": normal_keys,
    "clustered": clustered_keys,
    "rotated": rotated_keys,
}


def make_keys(kind: str, length: int, seed: int, device: Device) -> Tensor:  # [1, KV_HEADS, length, HEAD_SIZE]
    return KEYS[kind](length, device.generator(seed)).to(device.dtype)
