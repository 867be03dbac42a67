"""subgen: time to fold a prompt, its parts, the decode step, and bytes against the formula.

Times of a prompt are of whole calls, host included; the decode step is timed in a graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kvsketch import ops
from kvsketch.methods import SubGen
from kvsketch.methods.subgen.sketch import Sketch, fold_denominator, fold_numerator
from kvsketch.methods.subgen.slots import Structure, covering_radii, exact_tokens, layout_of, state_of
from kvsketch.slots import LayerContext, SlotTable
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, LAYERS, make_keys
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference

TARGET = 0.10  # share of prefill
# Keys equally near to two representatives may go to either, and their slots with them.
SAME_SLOTS = 0.98
BYTES_TOLERANCE = 0.02
STEPS_CHECKED = 64


def make_table(kind: str, length: int, seed: int, device: Device) -> SlotTable:
    """An exact table of one layer that holds a prompt."""
    table = SlotTable(LayerContext(0, LAYERS))
    values = device.normal(device.generator(seed), 1, KV_HEADS, length, HEAD_SIZE, dtype=torch.float32)
    table.append(make_keys(kind, length, seed, device), values.to(device.dtype))
    return table


def folded(method: SubGen, table: SlotTable) -> SlotTable:
    """The table after the method; the exact one stays as it is."""
    copied = table.like(state=Structure())
    method.compress(copied, table.key_slots()[:, :, -1:])
    return copied


def check(kind: str, length: int, budget: int, seed: int, device: Device, steps: int = STEPS_CHECKED) -> Iterator[str]:
    """What is wrong with our results for one kind of keys, one line each."""
    method, table = SubGen(budget=budget, normalizer="clipped"), make_table(kind, length, seed, device)
    ours, expected = folded(method, table), by_reference(functools.partial(folded, method, table))
    for stage in ("prompt", "decoding"):
        same = float((ours.index == expected.index).float().mean())
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


class SubGenLayer(Operation):
    name, of_prefill = "subgen", True
    budgets = (1024, 4096)

    def wrong(self) -> Iterator[str]:
        for kind in self.given.keys:
            yield from check(kind, min(8192, self.tokens), min(1024, *self.budgets), self.seed, self.on)

    def cells(self) -> Iterator[Fields]:
        sizes = itertools.product(self.budgets, self.given.keys)
        return ({"keys": kind, "tokens": self.tokens, "budget": budget} for budget, kind in sizes)

    def measure(self, keys: str, tokens: int, budget: int) -> Iterator[Fields]:
        method, table = SubGen(budget=budget, normalizer="clipped"), make_table(keys, tokens, self.seed, self.on)
        return (row | {"method": str(method)} for row in self._rows(method, table, budget))

    def _rows(self, method: SubGen, table: SlotTable, budget: int) -> Iterator[Fields]:
        bounded = folded(method, table)
        key, value = table.key_slots()[:, :, :1], table.value_slots()[:, :, :1]
        alive = (bounded.state_of(Structure).counts > 0).sum(-1).float()
        size = table_bytes(bounded)
        told: Fields = {
            "plan": method.plan(budget)._asdict(), "clusters_opened": float(alive.mean()),
            "bytes": size, "bytes_over_formula": size / KV_HEADS / formula_bytes(method, budget, key.element_size()),
        }  # fmt: skip
        whole = self.with_host(lambda: folded(method, table))
        yield self.row("prompt", whole, of="prefill", target=TARGET, **told)
        for name, part in parts(method, table, budget).items():
            yield self.row(name, self.with_host(part), of="prefill")

        def step() -> None:
            bounded.append(key, value)
            ops.fold_token(state_of(bounded), layout_of(bounded), method.coalesce)

        yield self.row("append", [lambda: bounded.append(key, value)])
        yield self.row("step", [step])
