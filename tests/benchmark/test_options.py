"""Command lines of benchmarks: wrong input is told apart and named."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvsketch.benchmark import offload
from kvsketch.cli.bench import BENCHMARKS


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_without_a_gpu_every_benchmark_says_what_it_needs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"kvsketch.benchmark.{name.replace('-', '_')}")
    assert module.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decode", "linear", "step_profile"])
@pytest.mark.parametrize("batches", ["1,a", "0", "-1", "1.5"])
def test_batches_are_whole_numbers(name: str, batches: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"kvsketch.benchmark.{name}")
    with pytest.raises(SystemExit):
        module.main([f"--batches={batches}"])
    assert f"{batches.rpartition(',')[2]!r} is not a whole number above 0" in capsys.readouterr().err


def test_what_cannot_be_offloaded_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="snapkv keeps nothing in host memory; choose among quest"):
        offload.variants("snapkv:budget=64", 0)
    near, far = offload.variants("quest:budget=64", 0)
    assert (str(near), str(far)) == ("quest:budget=64", "quest:budget=64:offload=host")
