"""balancekv: the balancing walk alone, two halvings of a prompt, and making room during decoding.

In a prefill the host runs ahead of the device. So a compression is timed after a waiting kernel, which ends when all of
it has been launched; `launched_ahead` says whether that worked. Uniform sampling to the same budget is timed for
comparison. Signs are checked step by step against the rule of the walk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import BalanceKV, Method, Uniform
from kvsketch.ops.balance_walk.reference import block_uniforms, normalized_gram
from kvsketch.slots import LayerContext, SlotTable
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, LAYERS, SCALE
from kvsketch_lab.benchmark.operations.operation import Operation, as_timing
from kvsketch_lab.benchmark.runner import Fields

BLOCK = 256
TARGET = 0.03  # of prefill, for two halvings
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
    table = SlotTable(LayerContext(0, LAYERS))
    table.forward.scale = SCALE
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


class Balance(Operation):
    name, of_prefill = "balance", True

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
        others = [("two halvings", self.tokens), ("uniform sample", self.tokens)]
        rooms = [("making room", slots) for slots in self.slots]
        return [{"contender": name, "tokens": tokens} for name, tokens in walks + others + rooms]

    def measure(self, contender: str, tokens: int) -> Iterator[Fields]:
        if contender.startswith("walk"):
            k, v = make_tokens(self.on, self.tokens, self.seed)
            walk = functools.partial(ops.balance_walk, k, v, blocks_of(self.on, tokens), SCALE, constant=0.025)
            yield self.row(contender, [walk], timing={"replays": 10, "least_calls": 2}, block=BLOCK)
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
        times, ahead = behind_a_wait(self.on, prepare, self.given.repeats)
        extra = None if before is None or self.on.peak is None else self.on.peak - before
        given: Fields = {"budget": budget, "launched_ahead": ahead, "extra_bytes": extra}
        return self.row(contender, as_timing(times), of="prefill", target=TARGET if halving else None, **given)

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
        times, ahead = behind_a_wait(self.on, prepare, self.given.repeats)
        row = self.row("making room", as_timing(times), launched_ahead=ahead, every=freed)
        return row | {"ms_per_token_all_layers": LAYERS * row["median_us"] / 1e3 / freed}
