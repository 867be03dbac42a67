"""SubGen, one layer: time to fold a prompt, its parts, the decode step, and bytes against the formula.

    kvsketch bench subgen --out results/subgen.jsonl

Shapes of Llama-3.1-8B: 8 KV heads, head size 128, bfloat16; a prompt of 32,768 tokens, 32 layers. A layer's time is
judged against its share of a prefill (`--prefill-ms`, measured in the same process unless given): at most 10%. Times
of a prompt are of whole calls, host included; the decode step is timed in a CUDA graph. Results are first compared
with the reference, bytes with the formula, and nothing is reported when they differ.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvsketch import ops
from kvsketch.methods.subgen import SubGen
from kvsketch.methods.subgen.sketch import Sketch, fold_denominator, fold_numerator
from kvsketch.methods.subgen.slots import Structure, covering_radii, exact_tokens, layout_of, state_of
from kvsketch.slots.table import ExactTable, SlotTable
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KEYS, KV_HEADS, LAYERS, OfPrefill, make_keys
from kvsketch_lab.benchmark.runner import Fields, by_reference, target_text
from kvsketch_lab.options import option

TARGET = 0.10  # share of prefill
# Keys equally near to two representatives may go to either, and their slots with them.
SAME_SLOTS = 0.98
BYTES_TOLERANCE = 0.02
STEPS_CHECKED = 64


def make_table(kind: str, length: int, seed: int, device: Device) -> SlotTable:
    """An exact table of one layer that holds a prompt."""
    table = ExactTable(0, LAYERS)
    values = device.normal(device.generator(seed), 1, KV_HEADS, length, HEAD_SIZE, dtype=torch.float32)
    table.append(make_keys(kind, length, seed, device), values.to(device.dtype))
    return table


def folded(method: SubGen, table: SlotTable) -> SlotTable:
    """The table after the method; the exact one stays as it is."""
    copied = replace(table, state=Structure())
    method.compress(copied, table.key_slots()[:, :, -1:])
    return copied


def check(kind: str, length: int, budget: int, seed: int, device: Device, steps: int = STEPS_CHECKED) -> Iterator[str]:
    """What is wrong with our results for one kind of keys, one line each."""
    method, table = SubGen(budget=budget, normalizer="clipped"), make_table(kind, length, seed, device)
    ours, expected = folded(method, table), by_reference(functools.partial(folded, method, table))
    for stage in ("prompt", "decoding"):
        same = float((ours.bounded.index == expected.bounded.index).float().mean())
        mine, its = ours.state_of(Structure), expected.state_of(Structure)
        mu = float((mine.mu / its.mu - 1).abs().max())
        counts = mine.counts.sum(-1) == its.counts.sum(-1)
        if same < SAME_SLOTS or mu > 1e-6 or not bool(counts.all()):
            yield f"{kind} keys, {stage}: {same:.1%} of the slots are the reference's, mu off by {mu:.1e}"
        for step in range(steps if stage == "prompt" else 0):
            for one in (ours, expected):
                one.append(table.key_slots()[:, :, step : step + 1], table.value_slots()[:, :, step : step + 1])
            method.compress(ours, torch.empty(0))
            by_reference(lambda: method.compress(expected, torch.empty(0)))
    if problem := bytes_off(method, ours, budget):
        yield problem


def formula_bytes(method: SubGen, budget: int, element: int) -> int:
    """e [m (t + 1) d + (s + sinks + recent + 1) 2 d] + 12 per slot + 4 (m + s), per KV head."""
    plan = method.plan(budget)
    exact = plan.sinks + plan.recent + 1
    keys = plan.clusters * (plan.per_cluster + 1) + 2 * (plan.samples + exact)
    slots = exact + plan.samples + plan.clusters * plan.per_cluster
    return element * HEAD_SIZE * keys + 12 * slots + 4 * (plan.clusters + plan.samples)


def table_bytes(table: SlotTable) -> int:
    return sum(t.nbytes for t in table.tensors())


def bytes_off(method: SubGen, table: SlotTable, budget: int) -> str | None:
    ratio = table_bytes(table) / KV_HEADS / formula_bytes(method, budget, table.key_slots().element_size())
    return None if abs(ratio - 1) < BYTES_TOLERANCE else f"bytes are {ratio:.3f} times the formula"


def parts(method: SubGen, table: SlotTable, budget: int) -> dict[str, Callable[[], object]]:
    """The operations a prompt needs, each on its own."""
    tokens, plan = exact_tokens(table, None), method.plan(budget)
    radius = covering_radii(tokens, [plan])
    sketch = replace(Sketch.empty(tokens, plan.samples, plan.clusters, plan.per_cluster), delta=radius)
    return {
        "radius": lambda: covering_radii(tokens, [plan]),
        "numerator": lambda: fold_numerator(sketch, tokens),
        "denominator": lambda: fold_denominator(sketch, tokens, method.policy),
    }


@dataclass
class SubGenLayer(OfPrefill):
    name, kind, operation = "subgen", "subgen", "reservoir"
    columns = (
        "method | keys | ms a layer=layer_ms:.2f | parts, ms=parts | of prefill=share_of_prefill:.1% | "
        "target=judged | µs a step=step_us:.1f | bytes / formula=bytes_over_formula:.3f"
    )
    length: int = option(32768, "tokens of the prompt", least=1)
    budgets: tuple[int, ...] = option("1024,4096", "budgets, comma-separated", least=1)
    keys: tuple[str, ...] = option(tuple(KEYS), "kinds of keys, comma-separated", choices=tuple(KEYS))
    repeats: int = option(7, "calls that are timed", least=1)

    def headline(self, rows: list[Fields]) -> str:
        return f"SubGen, one layer; prefill {rows[0]['prefill_ms']:.0f} ms"

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        return {
            "judged": target_text(row),
            "parts": ", ".join(f"{name} {ms:.2f}" for name, ms in row["parts_ms"].items()),
        }

    def check_options(self) -> None:
        super().check_options()
        if max(self.budgets) > self.length:
            raise ValueError(f"--budgets {max(self.budgets)} is more than the --length {self.length} of the prompt")
        for budget in self.budgets:
            SubGen(budget=budget, normalizer="clipped")

    def wrong(self) -> Iterator[str]:
        for kind in self.keys:
            yield from check(kind, min(8192, self.length), min(1024, *self.budgets), self.seed, self.on)

    def cells(self) -> Iterator[Fields]:
        for budget in self.budgets:
            method = str(SubGen(budget=budget, normalizer="clipped"))
            yield from ({"method": method, "keys": kind} for kind in self.keys)

    def measure(self, method: str, keys: str) -> Iterator[Fields]:
        from kvsketch.methods import parse_method

        chosen, table = parse_method(method), make_table(keys, self.length, self.seed, self.on)
        assert isinstance(chosen, SubGen)
        budget = chosen.budget_tokens(table)
        times = self.on.milliseconds(lambda: folded(chosen, table), self.repeats)
        each = {
            name: statistics.median(self.on.milliseconds(part, self.repeats))
            for name, part in parts(chosen, table, budget).items()
        }
        bounded = folded(chosen, table)
        key, value = table.key_slots()[:, :, :1], table.value_slots()[:, :, :1]

        def step(folds: bool = True) -> None:
            bounded.append(key, value)
            if folds:
                ops.fold_token(state_of(bounded), layout_of(bounded), chosen.coalesce)

        append_only, whole = self.on.time([lambda: step(False)]), self.on.time([step])
        alive = (bounded.state_of(Structure).counts > 0).sum(-1).float()
        layer_ms = statistics.median(times)
        share = self.share_of_prefill(layer_ms, self.length)
        yield {
            "operation": "subgen", "method": method, "plan": chosen.plan(budget)._asdict(), "keys": keys,
            "length": self.length, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": self.on.dtype_name,
            "layer_ms": layer_ms, "least_ms": min(times), "most_ms": max(times), "repeats": len(times),
            "parts_ms": each, "layers": LAYERS, **share, "target": TARGET,
            "within_target": share["share_of_prefill"] <= TARGET,
            "step_us": whole.median_us, "step_p10_us": whole.p10_us, "step_p90_us": whole.p90_us,
            "append_us": append_only.median_us, "clusters_opened": float(alive.mean()), "bytes": table_bytes(bounded),
            "bytes_over_formula": table_bytes(bounded) / KV_HEADS / formula_bytes(chosen, budget, key.element_size()),
        }  # fmt: skip


command = functools.partial(runner.command, SubGenLayer)
