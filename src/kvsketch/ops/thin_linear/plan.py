"""Launch sizes of the thin products."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvsketch.ops.weighted_attention.plan import Device

MATRIX_ROWS = 16  # the fewest rows that the tensor cores take


@dataclass(frozen=True)
class Tile:
    """Rows of a weight per program, columns per turn of its loop, warps, tiles on their way in shared memory."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 0

    def shared_bytes(self, rows: int) -> int:
        """Memory of the tiles of weight and input, in numbers of two bytes."""
        return 2 * max(1, self.stages) * (self.block_n + padded(rows)) * self.block_k


def padded(rows: int) -> int:
    """One row stays one; more are filled up to a power of two that the tensor cores take."""
    return 1 if rows == 1 else max(MATRIX_ROWS, 1 << (rows - 1).bit_length())


def tile_for(rows: int, outputs: int, device: Device) -> Tile:
    """What `kvsketch bench linear --tune` found best on an H200, with fewer stages where shared memory is smaller."""
    tile = _best(rows, outputs, device.multiprocessors)
    while tile.stages > 2 and tile.shared_bytes(rows) > device.shared_bytes:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    while tile.block_k > 64 and tile.shared_bytes(rows) > device.shared_bytes:
        tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
    return tile


def _best(rows: int, outputs: int, multiprocessors: int) -> Tile:
    """Few outputs need deep pipelines, for all programs run at once and each must keep its share of the memory busy;
    many are read best by programs that follow one another.
    """
    if rows == 1:
        return Tile(16, 512, 8, 4)
    if rows <= MATRIX_ROWS:
        if outputs <= 32 * multiprocessors:
            return Tile(16, 256, 2, 6)
        return Tile(16, 512, 2, 3) if outputs <= 512 * multiprocessors else Tile(64, 128, 4, 4)
    if outputs <= 32 * multiprocessors:
        return Tile(32, 128, 4, 6)
    return Tile(64, 128, 4, 4) if outputs <= 64 * multiprocessors else Tile(64, 64, 4, 5)
