"""Models to time: shapes with random weights, and checkpoints by any name that models.load takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch.benchmark.shapes import SHAPES, build, weight_bytes
from tests.helpers import tiny


def test_a_shape_has_random_weights_and_as_many_layers_as_asked() -> None:
    model = build("tiny", layers=2, device="cpu")
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
    assert model.dtype == torch.bfloat16
    assert weight_bytes(model) == 2 * sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


def test_a_checkpoint_is_loaded_and_shortened(tmp_path: Path) -> None:
    folder = str(tiny.save_tiny_model(tmp_path))
    whole, short = build(folder, device="cpu"), build(folder, layers=1, device="cpu")
    assert whole.dtype == torch.bfloat16 and len(whole.model.layers) > 1
    assert len(short.model.layers) == short.config.num_hidden_layers == 1
    ids = torch.arange(5)[None]
    assert short(ids).logits.shape == whole(ids).logits.shape


def test_a_name_that_is_neither_is_refused() -> None:
    assert "no-such-shape" not in SHAPES
    with pytest.raises((ValueError, OSError), match="no-such-shape"):
        build("no-such-shape", device="cpu")
