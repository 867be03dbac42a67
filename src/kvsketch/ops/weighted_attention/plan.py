"""Launch sizes of the weighted attention kernel: slots per tile, and programs that share the slots of one head."""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Keys and values of one tile. Two programs per multiprocessor with two tiles each in flight keep the memory busy.
TILE_BYTES = 32 * 1024
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_SPLITS = 128
# Programs that start early are dealt unevenly over the multiprocessors, which costs more than a launch when they are
# long.
EARLY_BYTES = 16 << 20


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    splits: int  # programs that share the slots of one KV head
    warps: int
    stages: int  # tiles in flight per program, the one being worked on included
    overlap: bool  # start the combining program while the splits still run
    early: bool = False  # start the splits while the kernel before still runs


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of the GPU."""

    multiprocessors: int
    shared_bytes: int  # the most one program may use
    overlap: bool  # a kernel may start before the one it depends on has ended (Hopper and later)


@functools.lru_cache(maxsize=4096)
def plan(heads: int, slots: int, slot_bytes: int, device: Device) -> Plan:
    """Tiles and splits for `heads` KV heads (times row tiles) of `slots` slots; `slot_bytes` is a key and a value."""
    block_n = _power_of_two_below(min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    # A short cache gives too few tiles to reach every multiprocessor; smaller tiles reach more of them.
    while block_n > 32 and heads * _ceil_div(slots, block_n) < device.multiprocessors:
        block_n //= 2
    resident = device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    splits = best_splits(heads, _ceil_div(slots, block_n), resident)
    early = device.overlap and heads * slots * slot_bytes <= EARLY_BYTES
    return Plan(max(16, block_n), splits, warps=4, stages=3, overlap=device.overlap, early=early)


def best_splits(heads: int, tiles: int, resident: int) -> int:
    """The fewest splits within 4% of the least estimated time, in tiles read one after the other.

    `resident` programs run at a time: a wave lasts as long as its longest split, plus about one tile to start up.
    Combining the splits costs about one more.
    """

    def time(splits: int) -> int:
        waves = _ceil_div(heads * splits, resident)
        return waves * (_ceil_div(tiles, splits) + 1) + (splits > 1)

    choices = range(1, min(tiles, MAX_SPLITS) + 1)
    enough = 1.04 * min(map(time, choices))
    return next(splits for splits in choices if time(splits) <= enough)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)
