"""Fused pieces inside whole models: same logits, only inside the context, only in this thread."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import zoo
from kvsketch import fusion

pytest.importorskip("triton", reason="needs Triton")
from kvsketch.ops.decoder_layer import kernel as decoder_layer
from kvsketch.ops.thin_linear import kernel as thin_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which fused pieces ran; the kernels serve any device (on a CPU in Triton's interpreter)."""
    made: list[str] = []

    class Noting:
        def __init__(self, kernel: ModuleType) -> None:
            self.kernel = kernel

        def __getattr__(self, name: str) -> Any:
            made.append(name)
            return getattr(self.kernel, name)

    def kernel_for(operation: str, device: torch.device) -> ModuleType:
        return Noting({"decoder_layer": decoder_layer, "thin_linear": thin_linear}[operation])  # type: ignore[return-value]

    monkeypatch.setattr(thin_linear, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(fusion.ops, "kernel_for", kernel_for)
    return made


@pytest.mark.parametrize("family", fusion.FAMILIES)
def test_the_fused_model_gives_the_same_logits(family: str, calls: list[str]) -> None:
    model, token = zoo.build(family).to(DEVICE), zoo.tokens(2, 1).to(DEVICE)
    with torch.no_grad():
        plain = model(token).logits
        assert not calls
        with fusion.fused(model):
            ours = model(token).logits
        layers = model.config.num_hidden_layers
        assert calls.count("rms_norm") == layers + 1
        assert calls.count("add_rms_norm") == calls.count("gated_silu") == calls.count("rotate_both") == layers
        assert "linears" not in calls
        calls.clear()
        again = model(token).logits
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(again, plain) and not calls


@pytest.mark.parametrize("family", fusion.FAMILIES)
def test_half_precision_models_use_the_thin_products(family: str, calls: list[str]) -> None:
    """Queries, keys and values in one launch, the output, gate and up, down with the residual, and the head."""
    exact, token = zoo.build(family).to(DEVICE), zoo.tokens(2, 1).to(DEVICE)
    model = zoo.build(family).to(DEVICE).bfloat16()
    with torch.no_grad():
        truth, plain = exact(token).logits, model(token).logits.float()
        with fusion.fused(model):
            ours = model(token).logits.float()
    layers = model.config.num_hidden_layers
    assert calls.count("linears") == 2 * layers + 1
    assert calls.count("gated_linear") == calls.count("linear_onto") == layers and "gated_silu" not in calls
    assert (ours - truth).norm() < 2 * (plain - truth).norm()


def test_hooks_of_a_part_see_what_they_expect(calls: list[str]) -> None:
    model, token = zoo.build("llama").to(DEVICE), zoo.tokens(1, 1).to(DEVICE)
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model(token)
        with fusion.fused(model):
            model(token)
    plain, ours = seen
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_weights_of_other_types_keep_their_own_products(calls: list[str]) -> None:
    class Quantized(torch.Tensor):
        """Stands for a weight that is not what its dtype says."""

    model = zoo.build("llama").to(DEVICE).bfloat16()
    for name, parameter in list(model.named_parameters()):
        if "proj" in name or "head" in name:
            owner, _, own = name.rpartition(".")
            weight = torch.nn.Parameter(parameter.detach().as_subclass(Quantized), requires_grad=False)
            setattr(model.get_submodule(owner), own, weight)
    with torch.no_grad(), fusion.fused(model):
        model(zoo.tokens(1, 1).to(DEVICE))
    assert "rms_norm" in calls and not {"linears", "gated_linear", "linear_onto"} & set(calls)


def test_prompts_and_other_threads_run_the_models_own_code(calls: list[str]) -> None:
    model = zoo.build("llama")
    with fusion.fused(model), torch.no_grad():
        model(zoo.tokens(1, 5))
        thread = threading.Thread(target=lambda: model(zoo.tokens(1, 1)))
        thread.start()
        thread.join()
    assert not {"rms_norm", "linears", "gated_linear"} & set(calls)


def test_unknown_families_are_left_alone(calls: list[str]) -> None:
    model, token = zoo.build("gemma2"), zoo.tokens(1, 1)
    with torch.no_grad():
        plain = model(token).logits
        with fusion.fused(model):
            assert torch.equal(model(token).logits, plain)
    assert not calls
