"""Launch sizes of indexed attention: slots per tile, and programs that share what one query reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvsketch.ops.common.device import Device

# Rows lie anywhere, so that many small programs hide the wait for them better than a few with more tiles in flight.
TILE_BYTES = 16 * 1024
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_PIECES = 128


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    list_splits: int  # programs that share one list of rows
    span_splits: int  # programs that share the spans of one KV head
    extra_splits: int  # programs that share the extra slots of one KV head
    warps: int
    stages: int
    overlap: bool  # start the combining program while the pieces still run

    @property
    def pieces(self) -> int:
        """Partial sums of one query."""
        return self.list_splits + self.span_splits + self.extra_splits


@functools.lru_cache(maxsize=4096)
def plan(heads: int, lists: int, rows: int, spans: int, extras: int, slot_bytes: int, device: Device) -> Plan:
    """Tiles and splits for `heads` KV heads, each with `lists` lists of `rows`, and slots in spans and extra slots."""
    block_n = max(16, min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    block_n = 1 << (block_n.bit_length() - 1)
    parts = tuple(_ceil_div(slots, block_n) for slots in (rows, spans, extras))
    tiles = heads * (lists * parts[0] + parts[1] + parts[2])
    # Every program has about the same number of tiles, so that all end together.
    share = max(1, _ceil_div(tiles, device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR))
    while sum(_ceil_div(part, share) for part in parts) > MAX_PIECES:
        share *= 2
    list_splits, span_splits, extra_splits = (_ceil_div(part, share) for part in parts)
    return Plan(block_n, list_splits, span_splits, extra_splits, warps=2, stages=2, overlap=device.overlap)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
