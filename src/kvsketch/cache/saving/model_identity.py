"""Which model a cache belongs to: keys and values mean nothing to another one.

Two models are the same when they agree in shape, positions, dtype and, where both are at hand, in a sample of every
weight. A folder's name plays no part, so a model may move.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
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
        }
        return dict(json.loads(json.dumps(identity, default=str)))

    def differences(self, saved: dict[str, Any], head_share: Any = None) -> list[str]:
        """In what the model of a saved cache differs from this one, in words."""
        here = self.describe(head_share)
        unknown = [n for n in ("dtype", "weights") if None in (saved[n], here[n])]
        differing = [name for name in here if name not in unknown and saved[name] != here[name]]
        words = [
            f"{name} is {saved[name]} in the file and {here[name]} here" for name in differing if name != "weights"
        ]
        return words or ["the same shape, but other weights"] * ("weights" in differing)


def weights_digest(model: Any) -> str | None:
    """SHA-256 over a few numbers of every weight, in order of their names; None where some lie on no device."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if weight.device.type == "meta":
            return None
        flat = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
        digest.update(f"{name.replace('_orig_mod.', '')} {tuple(weight.shape)}".encode())
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
