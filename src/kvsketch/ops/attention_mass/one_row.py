"""Attention mass of a single query on a GPU: launches of the programs of `decode.py`, from keys or from logits."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from kvsketch.ops import early_start
from kvsketch.ops.attention_mass import Noise, Temperature, stream
from kvsketch.ops.attention_mass.decode import logits_kernel, shares_kernel, soften_kernel, update_kernel
from kvsketch.ops.attention_mass.device import INTERPRETED

KEY_COLUMNS = 64
MAX_TILES = 512
LOGITS_TILE = 2048  # logits that one program reads, those of all query heads of a KV head together


class Softmax:
    """What every program is told of the softmax that it sums up; `like` is [B, Hq, ..]."""

    def __init__(
        self,
        like: Tensor,
        kv_heads: int,
        columns: int,
        seen: int | Tensor,
        index: Tensor | None,
        padding: Tensor | None,
        temperature: Temperature,
        noise: Noise | None,
    ) -> None:
        self.device = like.device
        self.batch, self.query_heads = like.shape[:2]
        self.kv_heads, self.columns = kv_heads, columns
        self.group = self.query_heads // kv_heads
        self.index = None if index is None else dense_last(index)
        self.padding = None if padding is None else padding.contiguous()
        self.seen_on_device = seen if isinstance(seen, Tensor) else None
        self.seen = seen if isinstance(seen, int) else 0
        self.ptx = like.is_cuda and not INTERPRETED.value and torch.version.hip is None
        self.noise = noise
        self.stream = 0 if noise is None else signed(stream(noise))
        self.first_head = 0 if noise is None else noise.first_head * self.group
        self.temperature: tuple[float, ...] = (
            temperature.start, temperature.slope, temperature.steps, temperature.since,
        )  # fmt: skip

    @property
    def context(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.index, self.padding, self.seen_on_device

    @property
    def index_strides(self) -> tuple[int, int]:
        return (0, 0) if self.index is None else (self.index.stride(0), self.index.stride(1))

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "SLOTS": self.index is not None,
            "PADDED": self.padding is not None,
            "SEEN": self.seen_on_device is not None,
        }

    def row_buffers(self, tiles: int) -> tuple[Tensor, Tensor]:
        """Room for the row [B, Hq, S] itself and for the maximum and sum of each of its tiles."""
        shape = (self.batch, self.query_heads)
        row = torch.empty((*shape, self.columns), dtype=torch.float32, device=self.device)
        return row, torch.empty((*shape, tiles, 2), dtype=torch.float32, device=self.device)


def add_from_keys(
    call: Softmax, q: Tensor, k: Tensor, scale: float, sizes: dict[str, Any], reduce: str, into: Tensor, fade: float
) -> Tensor:
    """Adds the mass of q [B, Hq, 1, D] on k [B, H, S, D] to the scores `into`; `sizes` are those of the programs."""
    block_g = max(16, triton.next_power_of_2(call.group))
    block_n = _columns_per_tile(call.columns, KEY_COLUMNS)
    grid = (triton.cdiv(call.columns, block_n), call.batch * call.kv_heads)
    x, parts = call.row_buffers(grid[0])
    logits_kernel[grid](
        q, k, *call.context, x, parts, scale, *call.temperature,
        call.stream, call.first_head, call.seen, call.columns, call.kv_heads,
        *q.stride()[:2], *k.stride()[:3], *call.index_strides,
        D=q.shape[3], BLOCK_G=block_g, BLOCK_N=block_n, **sizes,
    )  # fmt: skip
    return _update(call, grid, x, parts, block_g, block_n, reduce, into, fade)


def mass_from_logits(
    logits: Tensor,
    *,
    seen: int | Tensor,
    index: Tensor,
    row_lse: Tensor | None,
    padding: Tensor | None,
    temperature: Temperature,
    noise: Noise | None,
    reduce: str,
    into: Tensor,
    fade: float = 1.0,
) -> Tensor:
    """See `kvsketch.ops.mass_from_logits`."""
    call = Softmax(logits, index.shape[1], index.shape[2], seen, index, padding, temperature, noise)
    logits = logits.contiguous()
    block_g = triton.next_power_of_2(call.group)
    block_n = _columns_per_tile(call.columns, max(64, min(256, LOGITS_TILE // block_g)))
    grid = (triton.cdiv(call.columns, block_n), call.batch * call.kv_heads)
    with torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext():
        if row_lse is not None:
            shares_kernel[grid](
                logits, row_lse.float().contiguous(), call.index, call.padding, into,
                fade, call.columns, call.kv_heads, *call.index_strides,
                GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n, PADDED=padding is not None, REDUCE=reduce,
                **early_start.launch(logits.device),
            )  # fmt: skip
            return into
        x, parts = call.row_buffers(grid[0])
        soften_kernel[grid](
            logits, *call.context, x, parts, *call.temperature,
            call.stream, call.first_head, call.seen, call.columns, call.kv_heads, *call.index_strides,
            GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n,
            PADDED=padding is not None, SEEN=call.seen_on_device is not None, NOISE=noise is not None, PTX=call.ptx,
            **early_start.launch(logits.device),
        )  # fmt: skip
        return _update(call, grid, x, parts, block_g, block_n, reduce, into, fade)


def _update(
    call: Softmax, grid: tuple[int, int], x: Tensor, parts: Tensor, block_g: int, block_n: int, reduce: str,
    into: Tensor, fade: float,
) -> Tensor:  # fmt: skip
    update_kernel[grid](
        x, parts, into, fade, call.columns,
        GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n, BLOCK_T=triton.next_power_of_2(grid[0]), REDUCE=reduce,
        **early_start.launch(into.device),
    )  # fmt: skip
    return into


def _columns_per_tile(columns: int, least: int) -> int:
    """Few enough tiles for one program to add up what all of them found."""
    while least < 256 and triton.cdiv(columns, least) > MAX_TILES:
        least *= 2
    return least


def dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def signed(number: int) -> int:
    """The same 32 bits as a signed number, so that one compiled program serves every seed."""
    return number - 2**32 if number >= 2**31 else number
