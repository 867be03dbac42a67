"""Which model a cache belongs to: keys and values mean nothing to another one.

Two models are the same when they agree in shape, positions, dtype and, where both are at hand, in a sample of every
weight, those of adapters that are switched on (LoRA, by peft) among them. A folder's name plays no part, so a model may
move; an adapter that is off plays none either.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch

# Settings that keys and values, or their positions, depend on.
SETTINGS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "rope_parameters",
    "layer_types",
    "sliding_window",
)
SAMPLED = 16  # numbers of each weight that are compared


class ModelIdentity:
    """The model that a cache was made for, without keeping it alive; copies of a cache share it."""

    def __init__(self, model: Any, config: Any) -> None:
        self._config = config
        self._dtype = None if model is config else str(model.dtype).removeprefix("torch.")
        self._model = None if model is config else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelIdentity:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def require(self, config: Any) -> None:
        """Raises ValueError for a model of another family or shape; another model's weights are not noticed."""
        own, other = self._config.get_text_config(decoder=True), config.get_text_config(decoder=True)
        for name in () if own is other else ("model_type", *SETTINGS):
            made, here = getattr(own, name, None), getattr(other, name, None)
            if made != here:
                raise ValueError(
                    f"this cache was made for another model: {name} is {made} there and {here} here; make a new one "
                    "with CompressedCache(model, method)"
                )

    @property
    def head_sizes(self) -> set[int]:
        """Sizes that a key or value of the model can have: those that its config names, and their sums for latents."""
        text = self._config.get_text_config(decoder=True)
        latent = [getattr(text, name, None) or 0 for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")]
        named = [value for name, value in vars(text).items() if "head_dim" in name and type(value) is int]
        usual = text.hidden_size // max(1, text.num_attention_heads)
        return {usual, *named, latent[0], latent[0] + latent[2], latent[1] + latent[2]} - {0}

    def describe(self, head_share: Any = None) -> dict[str, Any]:
        """The identity as JSON; None for what cannot be known."""
        model = None if self._model is None else self._model()
        text_config = self._config.get_text_config(decoder=True)
        settings = {name: getattr(text_config, name, None) for name in SETTINGS}
        identity = {
            "model_type": self._config.model_type,
            **settings,
            "dtype": self._dtype,
            "share of heads": None if head_share is None else [head_share.number, head_share.parts],
            "weights": None if model is None else weights_digest(model),
            "adapters": None if model is None else adapters_digest(model),
        }
        return dict(json.loads(json.dumps(identity, default=str)))

    def differences(self, saved: dict[str, Any], head_share: Any = None) -> list[str]:
        """In what the model of a saved cache differs from this one, in words."""
        here = self.describe(head_share)
        unknown = [n for n in ("dtype", "weights", "adapters") if None in (saved.get(n), here[n])]
        differing = [name for name in here if name not in unknown and saved[name] != here[name]]
        if "model_type" in differing:
            differing = ["model_type"]
        words = [
            f"{name} is {saved[name]} in the file and {here[name]} here"
            for name in differing
            if name not in ("weights", "adapters")
        ]
        if not words and "weights" in differing:
            return ["the same shape, but other weights"]
        return words or ([_adapters_differ(saved["adapters"], here["adapters"])] if "adapters" in differing else [])


def _adapters_differ(saved: dict[str, str], here: dict[str, str]) -> str:
    if sorted(saved) != sorted(here):
        names = [f"adapter {', '.join(sorted(names))}" if names else "no adapter" for names in (saved, here)]
        return f"{names[0]} was on when it was saved, and {names[1]} is on here"
    return f"adapter {', '.join(sorted(here))} has other weights or another scale here"


def weights_digest(model: Any) -> str | None:
    """SHA-256 over a few numbers of every weight, in order of their names; None where some lie on no device."""
    of_adapters = {id(weight) for layer in _adapted_layers(model) for _, weight in _own_weights(layer)}
    weights = [
        (_plain_name(name), weight) for name, weight in model.named_parameters() if id(weight) not in of_adapters
    ]
    return _digest(sorted(weights, key=lambda pair: pair[0]))


def adapters_digest(model: Any) -> dict[str, str | None]:
    """A digest of each adapter that is switched on, by its name: its weights and the scale they are added with."""
    result: dict[str, list[tuple[str, Any]]] = {}
    scales: dict[str, set[str]] = {}
    for layer in _adapted_layers(model):
        for name in [] if layer.disable_adapters else layer.active_adapters:
            own = [pair for pair in _own_weights(layer) if name in pair[0].split(".")]
            result.setdefault(name, []).extend(own)
            scales.setdefault(name, set()).add(str(getattr(layer, "scaling", {}).get(name)))
    return {name: _digest(weights, " ".join(sorted(scales[name]))) for name, weights in result.items() if weights}


def _adapted_layers(model: Any) -> list[Any]:
    """Layers that peft has wrapped, known by what they offer: peft need not be there."""
    wanted = ("base_layer", "active_adapters", "disable_adapters")
    return [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]


def _own_weights(layer: Any) -> list[tuple[str, Any]]:
    """The weights of all adapters of a layer, without those of the layer that they adapt."""
    return [(name, weight) for name, weight in layer.named_parameters() if not name.startswith("base_layer.")]


def _plain_name(name: str) -> str:
    """A weight's name in the model as it is without wrappers (torch.compile, peft)."""
    return name.removeprefix("base_model.model.").replace("_orig_mod.", "").replace("base_layer.", "")


def _digest(weights: Iterable[tuple[str, Any]], text: str = "") -> str | None:
    digest = hashlib.sha256(text.encode())
    for name, weight in weights:
        if weight.device.type == "meta":
            return None
        flat = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def layer_devices(model: Any, count: int) -> list[torch.device]:
    """The device of each layer of a model: that of its weights, which may be spread over several devices."""
    devices = [torch.device(getattr(model, "device", "cpu"))] * count
    for name, weight in model.named_parameters() if hasattr(model, "named_parameters") else ():
        number = re.search(r"\.(\d+)\.", name)
        if number and int(number[1]) < count and weight.device.type != "meta":
            devices[int(number[1])] = weight.device
    return devices
