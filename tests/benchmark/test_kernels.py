"""The checks of single operations see wrong and missing results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsketch import ops
from kvsketch.methods import SubGen
from kvsketch_lab import records
from kvsketch_lab.benchmark import chunk, kcenter, kernels, layers, mass, runner, subgen
from kvsketch_lab.benchmark.device import Device

CPU = Device("cpu")


def small_inputs() -> kernels.Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20), (2, 2, 20)
    return kernels.Inputs(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.mark.parametrize("contender", kernels.OURS)
def test_decode_attention(contender: str) -> None:
    inputs = small_inputs().held_as(contender)
    out = inputs.ours(contender)
    assert kernels.error_against_reference(inputs, contender, out) < 1e-6
    out[1, 3] *= 1.2
    assert kernels.error_against_reference(inputs, contender, out) > kernels.TOLERANCE
    out[0, 0, 0, 0] = float("nan")
    assert not kernels.error_against_reference(inputs, contender, out) < kernels.TOLERANCE


def test_contenders_differ_in_what_they_read() -> None:
    held = [small_inputs().held_as(contender) for contender in kernels.OURS]
    outs = [inputs.ours(contender) for inputs, contender in zip(held, kernels.OURS, strict=True)]
    assert not any(torch.allclose(one, other) for one, other in itertools.pairwise(outs))
    assert held[3].bytes_read == held[5].bytes_read < held[0].bytes_read / 4 and held[4].layout is not None
    assert len(held[4].layout.capacity.unique()) > 2 and held[4].layout.total == 80


@pytest.mark.parametrize("noise", [None, mass.NOISE])
def test_attention_mass(noise: mass.Noise | None) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = mass.Inputs(torch.randn(1, 4, 9, 16, generator=generator), torch.randn(1, 2, 20, 16, generator=generator))
    result = inputs.mass(noise)
    assert mass.error_against_reference(inputs, result, noise) < 1e-6
    assert mass.error_against_reference(inputs, result * 1.1, noise) > mass.TOLERANCE
    assert mass.error_against_reference(inputs, result, mass.NOISE._replace(seed=9)) > mass.TOLERANCE


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
    benchmark = kcenter.KCenter(prefill_ms=1000.0)
    for form, within in (("exact", 400.0), ("coarse", 100.0)):
        for total, met in ((0.99 * within, True), (1.01 * within, False)):
            row = benchmark.row("normal", form, [total / layers.LAYERS], [1.0])
            assert row["within_target"] is met and ("MISSED" in str(runner.target_text(row))) is not met


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_small_runs_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    assert runner.run(kernels.Kernels(batch="1", slots="1024", out=str(path))) == 0
    assert runner.run(mass.Mass(tokens=2048, slots=512, prefill_ms=100.0, out=str(path))) == 0
    rows = [record["data"] for record in records.read(path)]
    assert {row["contender"] for row in rows} >= {*kernels.OURS, "h2o", "keyformer step"}
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
