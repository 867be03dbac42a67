"""Shares, pages and steps are those of attention that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch_lab import records
from kvsketch_lab.evaluation import concentration
from kvsketch_lab.evaluation.attention_protocol import Captured
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model


def peaks(places: list[list[int]], count: int = 64) -> torch.Tensor:
    """Attention [1, Q, count] that lies on some places of each query, nine tenths of it in equal parts."""
    weights = torch.full((1, len(places), count), 0.1 / count)
    for step, own in enumerate(places):
        weights[0, step, own] += 0.9 / len(own)
    return weights


def test_the_fewest_tokens_that_hold_a_share() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert concentration.tokens_holding(weights[:1], 0.75) == 0.5
    assert concentration.tokens_holding(weights, 0.75) == pytest.approx((2 + 3) / 2 / 4)


def test_pages_and_steps_of_important_tokens() -> None:
    together, apart = [0, 1, 2, 3], [0, 16, 32, 48]
    same = concentration.outcome(peaks([together] * 3), 4)
    assert same["in_page"] == 4 and same["still"] == {"1": 1.0} and same["sparse"] == pytest.approx(60 / 64, abs=1e-4)
    moved = concentration.outcome(peaks([apart, [16, 32, 48, 63], apart]), 4)
    assert moved["in_page"] == pytest.approx((1 + 4 / 3 + 1) / 3, abs=1e-3) and moved["still"] == {"1": 0.75}
    assert concentration.outcome(peaks([apart], count=60), 4)["in_page"] == 1, "the last page may be shorter"


def test_attention_is_that_of_each_head_over_the_context_alone() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    weights = concentration.attention(Captured(queries, keys, keys, 0.3, 0, 1), 7)
    assert weights.shape == (4, 3, 7)
    expected = torch.softmax(0.3 * queries[0, 3, 8] @ keys[0, 1, :7].T, -1)
    torch.testing.assert_close(weights[3, 1], expected)


def test_a_record_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    line = ["--model", str(model), "--tokens", "96", "--steps", "24", "--important", "8", "--out", str(tmp_path)]
    assert run_experiment(concentration.Concentration, line) == 0
    made = list(records.read(tmp_path / "concentration.jsonl"))
    assert [each["data"]["layer"] for each in made] == list(range(len(made))) and made
    for each in made:
        assert 0 < each["data"]["tokens_90"] <= 1 and 1 <= each["data"]["in_page"] <= 8
        assert list(each["data"]["still"]) == ["1", "20"]
    assert "still important" in capsys.readouterr().out
