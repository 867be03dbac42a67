"""Launch sizes of the weighted attention kernel: slots per tile, and programs that share the slots of one head."""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Bytes of keys and values in one tile, and the shared memory of one multiprocessor that tiles in flight may fill.
TILE_BYTES = 32 * 1024
SHARED_BYTES = 200 * 1024
MAX_SPLITS = 128


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    splits: int  # programs that share the slots of one KV head
    warps: int
    stages: int  # tiles in flight per program
    overlap: bool  # start the combining kernel while the splits still run (Hopper and later)


def plan(programs: int, slots: int, slot_bytes: int, multiprocessors: int, overlap: bool) -> Plan:
    """Tiles and splits for `programs` heads (times row tiles) of `slots` slots, each with `slot_bytes` of key and value."""
    return _plan(programs, max(1, slots), slot_bytes, multiprocessors, overlap)


@functools.lru_cache(maxsize=4096)
def _plan(programs: int, slots: int, slot_bytes: int, multiprocessors: int, overlap: bool) -> Plan:
    block_n = _power_of_two_below(min(128, max(16, TILE_BYTES // slot_bytes)))
    # A short cache gives too few tiles to reach every multiprocessor; smaller tiles reach more of them.
    while block_n > 32 and programs * -(-slots // block_n) < multiprocessors:
        block_n //= 2
    stages = 3 if block_n * slot_bytes <= TILE_BYTES else 2
    per_multiprocessor = max(1, min(4, SHARED_BYTES // (stages * block_n * slot_bytes)))
    splits = best_splits(programs, -(-slots // block_n), multiprocessors * per_multiprocessor)
    return Plan(block_n, splits, warps=4, stages=stages, overlap=overlap)


def best_splits(programs: int, tiles: int, resident: int) -> int:
    """The split count with the least estimated time, in tiles read one after the other.

    `resident` programs run at a time: a wave lasts as long as its longest split, plus about one tile to start up.
    Combining the splits costs about one more.
    """

    def time(splits: int) -> tuple[int, int]:
        waves = -(-programs * splits // resident)
        return waves * (-(-tiles // splits) + 1) + (splits > 1), splits

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=time)


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
