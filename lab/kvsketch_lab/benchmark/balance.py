"""BalanceKV, one layer: the balancing walk alone, two halvings of a prompt, and making room during decoding.

    kvsketch bench balance --out results/balance.jsonl

Shapes of Llama-3.1-8B: 32 layers, 8 KV heads, head size 128, bfloat16; 32,768 tokens, blocks of 256. The share of
prefill is the time for all layers over that of a whole prefill with transformers' own cache (`--prefill-ms`, measured
in the same process unless given); two halvings may take at most 3%. In a prefill the host runs ahead of the device. So
a compression is timed after a waiting kernel, which ends when all of it has been launched; `launched_ahead` says
whether that worked. Uniform sampling to the same budget is timed for comparison. Signs are first checked step by step
against the rule of the walk; nothing is reported if one is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import BalanceKV, Method, Uniform
from kvsketch.ops.balance_walk.reference import block_uniforms, normalized_gram
from kvsketch.slots.table import ExactTable, SlotTable
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KV_HEADS, LAYERS, SCALE, OfPrefill
from kvsketch_lab.benchmark.runner import Fields
from kvsketch_lab.options import option

BLOCK = 256
LIMIT = 0.03  # of prefill, for two halvings
WINDOW = 64  # sinks and recent tokens
# A sum below this share of its terms may have either sign if a device adds in another order.
ROUNDING = 1e-3
WAIT_CYCLES = 100_000_000


def make_tokens(device: Device, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values around common centres, as in real layers, so that centring and balancing matter."""
    generator = device.generator(seed)

    def normal(length: int) -> Tensor:
        return device.normal(generator, 1, KV_HEADS, length, HEAD_SIZE, dtype=torch.float32)

    near = torch.randint(64, (count,), generator=generator, device=device.name)
    keys, values = ((normal(1) + normal(64)[:, :, near] + 0.5 * normal(count)).to(device.dtype) for _ in range(2))
    return keys, values


def blocks_of(device: Device, count: int, block: int = BLOCK) -> Tensor:  # [1, H, N, b]
    """The slots 0 .. count - 1 in blocks of neighbours, -1 beyond the last."""
    slots = torch.arange(-(-count // block) * block, device=device.name)
    return torch.where(slots < count, slots, -1).view(1, 1, -1, block).repeat(1, KV_HEADS, 1, 1)


def broken_steps(k: Tensor, v: Tensor | None, slots: Tensor, signs: Tensor, walk: str, c: float) -> tuple[int, float]:
    """Signs that break the rule given the signs before them, and the share of the steps that could be judged."""
    broken, judged = 0, 0
    uniforms = block_uniforms(slots, 0, None)
    for head in range(slots.shape[1]):
        for start in range(0, slots.shape[2], 64):
            rows = slice(start, start + 64)
            part = slots[0, head, rows]
            real, at = part >= 0, part.clamp_min(0)
            values = None if v is None else v[0, head][at].double()
            gram = normalized_gram(k[0, head][at].double(), values, real, SCALE, True, 0.025, by_row=walk == "greedy")
            eta, u = signs[0, head, rows].double(), uniforms[0, head, rows].double()
            y = (gram.tril(-1) * eta[:, None]).sum(-1)
            if walk == "greedy":
                sure, up = y.abs() > ROUNDING * gram.tril(-1).abs().sum(-1), y < 0
            else:
                up = u < 0.5 - y / (2 * c)
                sure = (u - 0.5 + y / (2 * c)).abs() > ROUNDING
            broken += int((real & sure & (up != (eta > 0))).sum()) + int((real != (eta != 0)).sum())
            judged += int((real & sure).sum())
    return broken, judged / max(1, int((slots >= 0).sum()))


def fresh_table(k: Tensor, v: Tensor) -> SlotTable:
    table = ExactTable(0, LAYERS)
    table.note(scale=SCALE)
    table.append(k, v)
    return table


def behind_a_wait(
    device: Device, prepare: Callable[[], Callable[[], object]], repeats: int
) -> tuple[list[float], bool]:
    """Milliseconds of the call that `prepare` returns, and whether all was launched before the device began."""
    if not device.is_gpu:
        times = [device.milliseconds(prepare(), 1, warm_up=0)[0] for _ in range(repeats)]
        return times, False
    times, ahead = [], []
    for _ in range(repeats + 2):
        call = prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(WAIT_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        ahead.append(not start.query())
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    # The first two compile and fill the allocator.
    return times[2:], all(ahead[2:])


@dataclass
class Balance(OfPrefill):
    name, kind, operation, title = "balance", "balance", "balance_walk", "BalanceKV, one layer"
    columns = (
        "what=contender | tokens:,d | ms=median_ms:.3f | least=least_ms:.3f | most=most_ms:.3f | "
        "share of prefill=share_of_prefill:.1% | limit:.0% | extra bytes=extra_bytes:,d | "
        "ms per token, all layers=ms_per_token_all_layers:.3f"
    )
    tokens: int = option(32768, "tokens of the prompt", least=4 * WINDOW)
    slots: int = option(2048, "slots of the table that decoding makes room in", least=2 * WINDOW)
    repeats: int = option(20, "compressions that are timed", least=1)

    def wrong(self) -> Iterator[str]:
        sizes = ((1, 256), (63, 256), (1000, 100), (700, 512)) if self.on.is_gpu else ((1, 32), (63, 32))
        cases = [(count, block, walk, values) for count, block in sizes
                 for walk in ("greedy", "random") for values in (True, False)]  # fmt: skip
        for count, block, walk, values in [*cases, (self.tokens, BLOCK, "greedy", True)]:
            k, v = make_tokens(self.on, count, self.seed)
            used, slots = v if values else None, blocks_of(self.on, count, block)
            signs = ops.balance_walk(k, used, slots, SCALE, walk=walk, c=0.5, constant=0.025)
            broken, judged = broken_steps(k, used, slots, signs, walk, 0.5)
            if broken or (count > 1 and judged < 0.5):
                yield f"{count} tokens, {walk}, values {values}: {broken} wrong signs, {judged:.0%} could be judged"

    def cells(self) -> list[Fields]:
        whole = self.tokens - WINDOW
        walks = [("walk, first halving", whole), ("walk, second halving", whole // 2)]
        others = [("two halvings", self.tokens), ("uniform sample", self.tokens), ("making room", self.slots)]
        return [{"contender": name, "tokens": tokens} for name, tokens in walks + others]

    def measure(self, contender: str, tokens: int) -> Iterator[Fields]:
        if contender.startswith("walk"):
            k, v = make_tokens(self.on, self.tokens, self.seed)
            slots = blocks_of(self.on, tokens)
            walk = functools.partial(ops.balance_walk, k, v, slots, SCALE, constant=0.025)
            timing = self.on.time([walk], replays=10, least_calls=2)
            yield _row(contender, tokens, [1e-3 * timing.median_us], self.on.dtype_name) | dataclasses.asdict(timing)
        elif contender == "making room":
            yield self._making_room(tokens)
        else:
            yield self._compression(contender, tokens)

    def _compression(self, contender: str, tokens: int) -> Fields:
        """Whole compressions of one layer to a quarter of the middle."""
        k, v = make_tokens(self.on, tokens, self.seed)
        budget = WINDOW + (tokens - WINDOW) // 4
        halving = contender == "two halvings"
        method: Method = BalanceKV(budget=budget) if halving else Uniform(budget=budget, sinks=32, recent=32)

        def prepare() -> Callable[[], object]:
            table = fresh_table(k, v)
            return lambda: method.compress(table, k)

        self.on.free()
        before = self.on.allocated
        times, ahead = behind_a_wait(self.on, prepare, self.repeats)
        row = _row(contender, tokens, times, self.on.dtype_name) | {"budget": budget, "launched_ahead": ahead}
        row |= self.share_of_prefill(row["median_ms"], tokens) | {"limit": LIMIT if halving else None}
        return row | {"extra_bytes": None if before is None or self.on.peak is None else self.on.peak - before}

    def _making_room(self, slots: int) -> Fields:
        """Making room in a full table, which happens once every `freed` tokens."""
        method = BalanceKV(budget=slots)
        k, v = make_tokens(self.on, 4 * slots, self.seed)

        def prepare() -> Callable[[], object]:
            table = fresh_table(k, v)
            method.compress(table, k)
            assert method.maintenance_due(table)
            table.append(k[:, :, :1], v[:, :, :1])
            return lambda: method.compress(table, k[:, :, :1])

        freed = method.rows(fresh_table(k, v))[0].freed
        times, ahead = behind_a_wait(self.on, prepare, self.repeats)
        row = _row("making room", slots, times, self.on.dtype_name) | {"launched_ahead": ahead, "every": freed}
        return row | {"ms_per_token_all_layers": LAYERS * row["median_ms"] / freed}


def _row(name: str, tokens: int, times: list[float], dtype: str) -> Fields:
    return {
        "operation": "balancekv", "contender": name, "tokens": tokens, "median_ms": statistics.median(times),
        "least_ms": min(times), "most_ms": max(times), "layers": LAYERS, "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE, "block": BLOCK, "dtype": dtype,
    }  # fmt: skip


command = functools.partial(runner.command, Balance)
