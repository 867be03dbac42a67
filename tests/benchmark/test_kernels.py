"""The kernel benchmark refuses to run without a GPU and to report wrong results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch.benchmark import kernels


def small_inputs() -> kernels.Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20), (2, 2, 20)
    return kernels.Inputs(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert kernels.main(["--out", str(tmp_path / "kernels.jsonl")]) == 2
    assert capsys.readouterr().err == "The kernel benchmark needs an NVIDIA GPU; torch sees none here.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("contender", kernels.OURS)
def test_the_check_sees_wrong_and_missing_results(contender: str) -> None:
    inputs = small_inputs()
    out = kernels.our_call(inputs, contender)()
    assert kernels.error_against_reference(inputs, contender, out) < 1e-6
    out[1, 3] *= 1.2
    assert kernels.error_against_reference(inputs, contender, out) > kernels.TOLERANCE
    out[0, 0, 0, 0] = float("nan")
    assert not kernels.error_against_reference(inputs, contender, out) < kernels.TOLERANCE


def test_contenders_differ_in_their_weights() -> None:
    inputs = small_inputs()
    assert inputs.weights("unweighted") == (None, None)
    num, den = inputs.weights("tied weights")
    assert num is den is inputs.log_num
    num, den = inputs.weights("separate weights")
    assert num is inputs.log_num
    assert den is inputs.log_den


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_small_run(tmp_path: Path) -> None:
    from kvsketch import records

    path = tmp_path / "kernels.jsonl"
    assert kernels.main(["--batch", "1", "--slots", "1024", "--out", str(path)]) == 0
    rows = [record["data"] for record in records.read(path)]
    assert {row["contender"] for row in rows} >= set(kernels.OURS)
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
