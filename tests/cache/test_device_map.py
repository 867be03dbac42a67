"""A model whose layers lie on several devices: what a layer stores and computes stays on the layer's own device.

One machine for tests has one kind of device, so homes stand in for devices: each decoder layer has one, every tensor
that comes out of a computation has the home of what went in, and a computation on tensors of two homes is an error, as
it would be on two devices. What accelerate's hooks do between layers of different devices, a hook does here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvsketch import CompressedCache
from kvsketch.decode import captured as decoding
from kvsketch.methods.clusterkv import clusters
from kvsketch.slots import heads as parallel
from tests.helpers import zoo
from tests.helpers.common import FED, generate, padded, thinned, with_budget

# Layers that decide together meet on one device, which homes do not allow.
ALONE = [name if name != "rehearse" else "rehearse:share=layer:refit=none" for name in FED]
METHODS = [*ALONE, "balancekv:form=stream", "clusterkv:offload=host"]


def text_form(method: str) -> str:
    name, *options = method.split(":")
    return ":".join([with_budget(name, 16), *options])


def home_of(value: Any) -> int | None:
    return getattr(value, "home", None) if isinstance(value, Tensor) else None


def at_home(home: int | None) -> Any:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            # A new tensor, as a copy to another device would be.
            value = value.detach().view(value.shape)
            value.home = home  # type: ignore[attr-defined]
        return value

    return move


class Homes(TorchDispatchMode):
    """Hands homes on from operands to results and refuses operands of several homes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tree_leaves((args, kwargs))
        homes = {home for home in map(home_of, operands) if home is not None}
        # Numbers of one element may be read anywhere, as on devices.
        if len({home_of(x) for x in operands if home_of(x) is not None and x.dim() > 0}) > 1:
            raise RuntimeError(f"{func} mixes tensors of the layers {sorted(homes)}")
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and homes:
                output.home = min(homes)  # type: ignore[attr-defined]
        return result


@contextmanager
def homes(layers: nn.ModuleList) -> Iterator[None]:
    """Inside the block each layer has a home of its own; hidden states leave a layer without one."""
    handles = []
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.home = number  # type: ignore[attr-defined]

        def arrive(module: nn.Module, args: Any, kwargs: Any, home: int = number) -> Any:
            # The cache is not moved: transformers leaves it out as well.
            moved = {k: v if k == "past_key_values" else tree_map(at_home(home), v) for k, v in kwargs.items()}
            return tree_map(at_home(home), args), moved

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(at_home(None), output)

        handles.append(layer.register_forward_pre_hook(arrive, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    try:
        # Layers of one device share the places that they read; those of two homes do not.
        with Homes(), mock.patch.object(clusters, "_are_alike", return_value=False):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in layers.parameters():
            del parameter.home


def run(model: Any, method: str) -> tuple[Any, CompressedCache]:
    """Two turns of a padded batch."""
    cache = CompressedCache(model, text_form(method), seed=1)
    tokens, mask = padded(zoo.tokens(2, 40), [0, 7])
    for _ in range(2):
        tokens = generate(model, tokens, cache, attention_mask=mask, max_new_tokens=4).sequences
        tokens = torch.cat([tokens, zoo.tokens(2, 3)], 1)
        mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    return tokens.tolist(), cache


@pytest.mark.parametrize("method", thinned(METHODS))
def test_no_computation_mixes_layers(method: str) -> None:
    model = zoo.build("llama")
    expected, _ = run(model, method)
    with homes(model.model.layers):
        actual, cache = run(model, method)
    assert actual == expected
    for number, layer in enumerate(cache.slot_layers):
        assert home_of(layer.table.keys.read) == home_of(layer.table.values.read) == number
        assert {home_of(tensor) for tensor in layer.table.tensors()} <= {number, None}


def test_beams_reorder_rows_on_each_layers_device() -> None:
    model = zoo.build("llama")
    with homes(model.model.layers):
        cache = CompressedCache(model, text_form("h2o"))
        generate(model, zoo.tokens(1, 40), cache, num_beams=3)
    assert [home_of(layer.table.keys.read) for layer in cache.slot_layers] == [0, 1]


def test_a_computation_on_tensors_of_two_layers_is_noticed() -> None:
    model = zoo.build("llama")
    with homes(model.model.layers):
        cache = run(model, "streamingllm")[1]
        first, second = (layer.table.key_slots() for layer in cache.slot_layers)
        with pytest.raises(RuntimeError, match="mixes tensors of the layers"):
            first + second


def test_layers_on_disk(tmp_path: Path) -> None:
    """accelerate's own hooks, which `device_map` installs."""
    pytest.importorskip("accelerate")
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "model")
    near = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    places = {**{f"model.{name}": "cpu" for name in near}, "model.layers.1": "disk", "lm_head": "cpu"}
    spread = type(model).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    for method in ("full", "h2o", "uniform", "clusterkv"):
        assert run(spread, method)[0] == run(model, method)[0]
    cache = CompressedCache(spread, text_form("h2o"))
    with pytest.warns(RuntimeWarning, match="spread over the devices cpu, disk"):
        decoding.generate(spread, zoo.tokens(1, 30), cache, max_new_tokens=3)


def test_layers_that_read_the_keys_of_others_must_be_on_one_device() -> None:
    config = SimpleNamespace(model_type="gemma3n_text")
    parallel.require_one_device(SimpleNamespace(config=config, hf_device_map={"": 0}))
    with pytest.raises(ValueError, match=r"gemma3n_text.*one device, not on the devices 0, 1"):
        parallel.require_one_device(SimpleNamespace(config=config, hf_device_map={"layers.0": 0, "layers.1": 1}))
