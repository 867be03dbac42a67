"""The checks of single operations see wrong and missing results."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import ops
from kvsketch.methods import SubGen
from kvsketch_lab import records
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device, Timing
from kvsketch_lab.benchmark.operations import (
    OPERATIONS,
    Operations,
    attention,
    chunk,
    kcenter,
    layers,
    linear,
    mass,
    past,
    subgen,
)

CPU = Device("cpu")


def small_inputs() -> attention.Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20), (2, 2, 20)
    return attention.Inputs(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.mark.parametrize("contender", attention.OURS)
def test_decode_attention(contender: str) -> None:
    inputs = small_inputs().held_as(contender)
    out = inputs.ours(contender)
    assert attention.error_against_reference(inputs, contender, out) < 1e-6
    out[1, 3] *= 1.2
    assert attention.error_against_reference(inputs, contender, out) > attention.TOLERANCE
    out[0, 0, 0, 0] = float("nan")
    assert not attention.error_against_reference(inputs, contender, out) < attention.TOLERANCE


def test_every_operation_checks_its_results_first() -> None:
    assert all("wrong" in vars(operation) for operation in OPERATIONS.values())


def test_contenders_differ_in_what_they_read() -> None:
    held = [small_inputs().held_as(contender) for contender in attention.OURS]
    outs = [inputs.ours(contender) for inputs, contender in zip(held, attention.OURS, strict=True)]
    assert not any(torch.allclose(one, other) for one, other in itertools.pairwise(outs))
    assert held[3].bytes_read == held[5].bytes_read < held[0].bytes_read / 4 and held[4].layout is not None
    assert len(held[4].layout.capacity.unique()) > 2 and held[4].layout.total == 80


@pytest.mark.parametrize("part", ["plain", "keyformer", "row sums given"])
def test_attention_mass(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = mass.Mass(Operations(device="cpu", tokens=256))
    assert list(entry.wrong()) == []
    right = ops.attention_mass

    def wrong(*given: Any, **options: Any) -> torch.Tensor:
        asked = "keyformer" if options["noise"] else "row sums given" if "row_lse" in options else "plain"
        ours = os.environ.get("KVSKETCH_KERNELS") != "reference"
        return right(*given, **options) * (1.1 if ours and asked == part else 1)

    monkeypatch.setattr(ops, "attention_mass", wrong)
    assert part.replace("keyformer", "keyformer: ") in " ".join(entry.wrong())


@pytest.mark.parametrize("kind", list(layers.KEYS))
def test_keys_have_the_shape_and_repeat(kind: str) -> None:
    keys = layers.make_keys(kind, 200, 3, CPU)
    assert keys.shape == (1, layers.KV_HEADS, 200, layers.HEAD_SIZE)
    assert keys.isfinite().all() and keys.equal(layers.make_keys(kind, 200, 3, CPU))


def test_centers() -> None:
    keys = layers.make_keys("normal", 150, 0, CPU)
    right = ops.farthest_first(keys, 20)
    assert kcenter.difference(keys, right, right) is None
    assert kcenter.difference(keys, replace(right, radius=1.1 * right.radius), right) is not None
    first = torch.arange(20).expand_as(right.index)
    assert kcenter.difference(keys, replace(right, index=first), right) is not None
    assert kcenter.difference(keys, replace(right, radius=right.radius * float("nan")), right) is not None


def test_a_missed_target_is_not_called_met() -> None:
    entry = kcenter.KCenter(Operations(prefill_ms=1000.0, device="cpu"))
    for form, within in (("exact", 400.0), ("coarse", 100.0)):
        for total, met in ((0.99 * within, True), (1.01 * within, False)):
            time = Timing(1e3 * total / layers.LAYERS, 0.0, 0.0, 1, 1)
            row = entry.row(form, time, of="prefill", target=kcenter.TARGETS[form])
            assert row["within_target"] is met and ("MISSED" in str(runner.target_text(row))) is not met


def test_floors_rates_and_rivals_of_a_row() -> None:
    given = Operations(device="cpu", only="linear")
    given.copy_bandwidth = 1e9
    entry = given.chosen["linear"]
    ours, theirs = (
        {"operation": "linear", "batch": 1} | entry.row(who, Timing(us, us, us, 1, 1), bytes_read=1000, flops=4e6)
        for who, us in (("ours", 2.0), ("torch", 4.0))
    )
    assert (ours["floor_us"], ours["share_of_copy_bandwidth"], ours["tflop_per_s"]) == (1.0, 0.5, 2.0)
    shown = given.shown(ours, [ours, theirs, theirs | {"batch": 8, "median_us": 1.0}])
    assert (shown["ratio"], shown["inputs"]) == (0.5, "batch 1") and given.shown(theirs, [ours, theirs])[
        "ratio"
    ] is None


def test_linear_layers_further_from_fp32_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = linear.Linear(Operations(device="cpu", batches="1"))
    assert list(entry.wrong()) == []
    right = linear.by_kernel
    monkeypatch.setattr(linear, "by_kernel", lambda *given: [1.01 * each for each in right(*given)])
    assert len(list(entry.wrong())) == len(linear.PRODUCTS)


def test_the_subgen_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(subgen.check("normal", 160, 128, 0, CPU, steps=2)) == []
    right = ops.reservoir
    calls = iter(range(10**6))

    def wrong(state: torch.Tensor, *arguments: object) -> torch.Tensor:
        # Every second call, one of the two that are compared, draws other numbers.
        return right(state + next(calls) // 2 % 2, *arguments)

    monkeypatch.setattr(ops, "reservoir", wrong)
    assert any("slots are the reference's" in line for line in subgen.check("normal", 160, 128, 0, CPU, steps=2))


def test_subgen_bytes() -> None:
    method = SubGen(budget=128, normalizer="clipped")
    table = subgen.folded(method, subgen.make_table("normal", 160, 0, CPU))
    assert subgen.bytes_off(method, table, 128) is None
    table.state.squares = torch.zeros(subgen.table_bytes(table) // 100)
    assert "1.0" in str(subgen.bytes_off(method, table, 128))


def test_chunk_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk.kernel_error(CPU) < 1e-6
    right = chunk.by_reference
    monkeypatch.setattr(chunk, "by_reference", lambda call: 1.05 * right(call))
    assert chunk.kernel_error(CPU) > chunk.TOLERANCE


def test_past_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert past.kernel_error(CPU) < 1e-6
    right = past.by_reference
    monkeypatch.setattr(past, "by_reference", lambda call: 1.05 * right(call))
    assert past.kernel_error(CPU) > past.TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_small_runs_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "operations.jsonl"
    options = {
        "batches": "1",
        "slots": "1024",
        "tokens": 2048,
        "chunks": "512",
        "queries": "64",
        "budgets": "512",
        "repeats": 2,
    }
    assert runner.run(Operations(prefill_ms=100.0, out=str(path), **options)) == 0
    rows = [record["data"] for record in records.read(path)]
    assert {row["operation"] for row in rows} == {*OPERATIONS}
    assert {row["contender"] for row in rows} >= {*attention.OURS, "h2o", "keyformer step"}
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
