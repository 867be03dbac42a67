"""check=True: a nan or inf in a key or value is named in the forward that brings it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.checks import require_finite
from tests.helpers import zoo

METHOD = "streamingllm:budget=16:sinks=2"


def poisoned(model: Any, token: int, value: float, projection: str, layer: int, head: int) -> None:
    """From here on one token has a wrong number in one key or value head of one layer."""

    def spoil(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if ids[-1].shape[1] == output.shape[1]:
            output = output.clone()
            output[..., head * 8] = torch.where(ids[-1] == token, value, output[..., head * 8])
        return output

    ids: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: ids.append(inputs[0]))
    getattr(model.model.layers[layer].self_attn, projection).register_forward_hook(spoil)


@pytest.mark.parametrize(
    ("projection", "value", "named"),
    [
        ("v_proj", float("nan"), "nan in the value"),
        ("v_proj", float("-inf"), "inf in the value"),
        ("k_proj", float("nan"), "nan in the key"),
    ],
)
@pytest.mark.parametrize("place", [30, 41], ids=["prompt", "step"])
def test_layer_head_row_and_token_are_named(projection: str, value: float, named: str, place: int) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(3, 43)
    ids[ids == 5] = 6
    ids[2, place] = 5
    poisoned(model, 5, value, projection, layer=1, head=1)
    cache = CompressedCache(model, METHOD, check=True)
    pattern = f"llama, layer 1: {named} of batch row 2, KV head 1, token {place}\\. .*cache.reset"
    pieces = [(0, 40), *((i, i + 1) for i in range(40, 43))]

    def read_all() -> None:
        for start, end in pieces:
            model(ids[:, start:end], past_key_values=cache)
            assert end <= place, "noticed too late"

    with torch.no_grad(), pytest.raises(ValueError, match=pattern):
        read_all()


def test_off_it_does_not_look_and_on_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("gemma3"), zoo.tokens(2, 40)
    answers = [
        model.generate(ids, past_key_values=CompressedCache(model, METHOD, check=check), max_new_tokens=9).tolist()
        for check in (False, True)
    ]
    assert answers[0] == answers[1]
    monkeypatch.setattr("kvsketch.cache.compressed.require_finite", lambda *args: pytest.fail("looked"))
    model.generate(ids, past_key_values=CompressedCache(model, METHOD), max_new_tokens=3)


def test_many_wrong_numbers_are_counted_and_float16_is_advised() -> None:
    keys = torch.zeros(3, 12, 4, 8, dtype=torch.float16)
    keys[1:, 2:, 1:] = torch.inf
    with pytest.raises(ValueError, match=r"row 1, KV head 2, token 6, one of 60 .*rows 1, 2; .* and 2 more.*bfloat16"):
        require_finite(keys, keys, layer=4, seen=5, model_name="llama")
    require_finite(torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1, 8), 3e38), 0, 0, "llama")


def test_captured_decoding_steps_aside() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 20)
    with pytest.warns(RuntimeWarning, match="check=True"):
        out = kvsketch.generate(model, ids, CompressedCache(model, METHOD, check=True), max_new_tokens=4)
    assert out.shape == (1, 24)
