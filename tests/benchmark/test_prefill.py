"""The k-center and prefill benchmarks refuse to run without a GPU and to report wrong results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsketch import ops
from kvsketch.benchmark import kcenter, prefill
from kvsketch.cache.compressed import CompressedCache
from tests.helpers import zoo


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
@pytest.mark.parametrize(("benchmark", "name"), [(kcenter, "k-center"), (prefill, "prefill")])
def test_without_a_gpu_it_says_so(
    benchmark: object, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert benchmark.main(["--out", str(tmp_path / "records.jsonl")]) == 2  # type: ignore[attr-defined]
    assert capsys.readouterr().err == f"The {name} benchmark needs an NVIDIA GPU; torch sees none here.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", list(kcenter.KEYS))
def test_keys_have_the_shape_and_repeat(kind: str) -> None:
    keys = kcenter.make_keys(kind, 200, 3, "cpu")
    assert keys.shape == (1, kcenter.KV_HEADS, 200, kcenter.HEAD_SIZE) and keys.dtype == torch.bfloat16
    assert keys.isfinite().all() and keys.equal(kcenter.make_keys(kind, 200, 3, "cpu"))


def test_the_check_sees_wrong_centers() -> None:
    assert kcenter.check_all(150, 20, 0, "cpu") == []
    keys = kcenter.make_keys("normal", 150, 0, "cpu")
    right = ops.farthest_first(keys, 20)
    assert kcenter.difference(keys, right, right) is None
    assert kcenter.difference(keys, replace(right, radius=1.1 * right.radius), right) is not None
    first = torch.arange(20).expand_as(right.index)
    assert kcenter.difference(keys, replace(right, index=first), right) is not None
    assert kcenter.difference(keys, replace(right, radius=right.radius * float("nan")), right) is not None


def test_a_missed_target_is_not_called_met() -> None:
    for form, within in (("exact", 400.0), ("coarse", 100.0)):
        for total, met in ((0.99 * within, True), (1.01 * within, False)):
            row = kcenter.describe("normal", form, 100, 10, [total / kcenter.LAYERS], 1000.0, [1.0])
            assert row["within_target"] is met


def test_the_prefill_check_sees_wrong_caches() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "snapkv:budget=16")
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    assert prefill.problems(cache, logits, logits) is None
    assert "differ" in str(prefill.problems(cache, 1.1 * logits, logits))
    table = cache.slot_layers[1].table
    table.log_den[:] = 0.0
    assert prefill.problems(cache, logits, logits) == "layer 1 holds 17 slots, its budget is 16"
    table.log_den[..., -1] = float("-inf")
    table.keys[0, 0, 0, 0] = float("nan")
    assert "not finite" in str(prefill.problems(cache, logits, logits))
