"""The attention mass benchmark refuses to run without a GPU and to report wrong results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch.benchmark import mass


def small_inputs() -> mass.Inputs:
    generator = torch.Generator().manual_seed(0)
    return mass.Inputs(torch.randn(1, 4, 9, 16, generator=generator), torch.randn(1, 2, 20, 16, generator=generator))


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert mass.main(["--out", str(tmp_path / "mass.jsonl")]) == 2
    assert capsys.readouterr().err == "The attention mass benchmark needs an NVIDIA GPU; torch sees none here.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("noise", [None, mass.NOISE])
def test_the_check_sees_wrong_and_missing_results(noise: mass.Noise | None) -> None:
    inputs = small_inputs()
    result = inputs.mass(noise)
    assert mass.error_against_reference(inputs, result, noise) < 1e-6
    assert mass.error_against_reference(inputs, result * 1.1, noise) > mass.TOLERANCE
    assert mass.error_against_reference(inputs, result, mass.NOISE._replace(seed=9)) > mass.TOLERANCE
    result[0, 1, 3] = float("nan")
    assert not mass.error_against_reference(inputs, result, noise) < mass.TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_small_run(tmp_path: Path) -> None:
    from kvsketch import records

    path = tmp_path / "mass.jsonl"
    assert mass.main(["--tokens", "2048", "--slots", "512", "--prefill-ms", "100", "--out", str(path)]) == 0
    rows = [record["data"] for record in records.read(path)]
    assert [row["contender"] for row in rows] == [*mass.PREFILL, *mass.DECODE]
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
