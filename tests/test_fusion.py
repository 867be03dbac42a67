"""Fused pieces inside whole models: same logits, only inside the context, only in this thread."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import zoo
from kvsketch import fusion

kernel = pytest.importorskip("kvsketch.ops.decoder_layer.kernel", reason="needs Triton")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which fused pieces ran; the kernels serve any device (on a CPU in Triton's interpreter)."""
    made: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            made.append(name)
            return getattr(kernel, name)

    def kernel_for(operation: str, device: torch.device) -> ModuleType:
        return Noting()  # type: ignore[return-value]

    monkeypatch.setattr(fusion.ops, "kernel_for", kernel_for)
    return made


@pytest.mark.parametrize("family", fusion.FAMILIES)
def test_the_fused_model_gives_the_same_logits(family: str, calls: list[str]) -> None:
    model, token = zoo.build(family), zoo.tokens(2, 1)
    with torch.no_grad():
        plain = model(token).logits
        assert not calls
        with fusion.fused(model):
            ours = model(token).logits
        layers = model.config.num_hidden_layers
        assert calls.count("rms_norm") == 2 * layers + 1
        assert calls.count("gated_silu") == calls.count("rotate_both") == layers
        calls.clear()
        again = model(token).logits
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(again, plain) and not calls


def test_prompts_and_other_threads_run_the_models_own_code(calls: list[str]) -> None:
    model = zoo.build("llama")
    with fusion.fused(model), torch.no_grad():
        model(zoo.tokens(1, 5))
        thread = threading.Thread(target=lambda: model(zoo.tokens(1, 1)))
        thread.start()
        thread.join()
    assert not calls


def test_unknown_families_are_left_alone(calls: list[str]) -> None:
    model, token = zoo.build("gemma2"), zoo.tokens(1, 1)
    with torch.no_grad():
        plain = model(token).logits
        with fusion.fused(model):
            assert torch.equal(model(token).logits, plain)
    assert not calls
