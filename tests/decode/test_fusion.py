"""Fused pieces inside whole models: same logits, only inside the context, only in this thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvsketch.decode import fused as fusion
from tests.helpers import zoo

pytest.importorskip("triton", reason="needs Triton")
from kvsketch.ops.decoder_layer import kernel as decoder_layer
from kvsketch.ops.skinny_matmul import kernel as skinny_matmul

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
        return Noting({"decoder_layer": decoder_layer, "skinny_matmul": skinny_matmul}[operation])  # type: ignore[return-value]

    monkeypatch.setattr(skinny_matmul, "FEWEST_WEIGHTS", 0)
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
    exact, token = zoo.build(family, num_hidden_layers=1).to(DEVICE), zoo.tokens(2, 1).to(DEVICE)
    model = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        truth, plain = exact(token).logits, model(token).logits.float()
        with fusion.fused(model):
            ours = model(token).logits.float()
    layers = model.config.num_hidden_layers
    assert calls.count("linears") == 2 * layers + 1
    assert calls.count("gated_linear") == calls.count("linear_onto") == layers and "gated_silu" not in calls
    assert (ours - truth).norm() < 2 * (plain - truth).norm()


class Wrapped(torch.nn.Module):
    """An attention inside another module, as adapters make it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


class ScaledDecoderLayer(LlamaDecoderLayer):
    """A layer of a user's own with another formula."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + 0.3 * attended + 0.3 * self.mlp(self.post_attention_layernorm(hidden_states))


def _double_down(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def _double_mlp(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def _double_values(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0],))


def _turn_attention(layer: Any) -> None:
    def rotated(_module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": -kwargs["hidden_states"]}

    layer.self_attn.register_forward_pre_hook(rotated, with_kwargs=True)


def _replace_mlp(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * own(x)


def _other_norm(layer: Any) -> None:
    size = len(layer.post_attention_layernorm.weight)
    layer.post_attention_layernorm = torch.nn.RMSNorm(size, device=DEVICE, dtype=torch.bfloat16)


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def _hook_on_the_activation(layer: Any) -> None:
    layer.mlp.act_fn.register_forward_hook(lambda _module, _inputs, output: -output)


def _wrap_attention(layer: Any) -> None:
    layer.self_attn = Wrapped(layer.self_attn)


def _own_layer(layer: Any) -> None:
    layer.__class__ = ScaledDecoderLayer


CHANGES = [
    _double_down, _double_mlp, _double_values, _turn_attention, _replace_mlp, _other_norm, _wrap_attention, _own_layer,
    _other_activation, _hook_on_the_activation,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_in_a_layer_counts(change: Callable[[Any], None], calls: list[str]) -> None:
    model, token = zoo.build("llama", num_hidden_layers=1).to(DEVICE).bfloat16(), zoo.tokens(2, 1).to(DEVICE)
    with torch.no_grad():
        before = model(token).logits.float()
        for layer in model.model.layers:
            change(layer)
        plain = model(token).logits.float()
        with fusion.fused(model):
            ours = model(token).logits.float()
    rounding = 0.02 * plain.norm()
    assert (ours - plain).norm() < 0.2 * (before - plain).norm() + rounding


def test_the_silu_of_torch_is_fused_too(calls: list[str]) -> None:
    model, token = zoo.build("llama").to(DEVICE), zoo.tokens(2, 1).to(DEVICE)
    model.model.layers[0].mlp.act_fn = torch.nn.SiLU()
    with torch.no_grad(), fusion.fused(model):
        model(token)
    assert calls.count("gated_silu") == 2


def test_layers_can_still_be_called_by_keyword(calls: list[str]) -> None:
    model, token = zoo.build("llama").to(DEVICE), zoo.tokens(1, 4).to(DEVICE)
    hidden = model.model.embed_tokens(token)
    angles = model.model.rotary_emb(hidden, torch.arange(4, device=DEVICE)[None])
    expected = model.model.layers[0](hidden, position_embeddings=angles)
    with fusion.fused(model):
        pass
    assert torch.equal(model.model.layers[0](hidden_states=hidden, position_embeddings=angles), expected)


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
