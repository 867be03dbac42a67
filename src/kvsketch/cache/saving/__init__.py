"""A compressed cache in a file, to be continued later, elsewhere, or many times.

    cache.save("prompt.kvs")
    cache = CompressedCache.load("prompt.kvs", model)

The file (sealed_file.py) holds the method, what identifies the model (model_identity.py), what was read (read.py) and
the state of every layer (layer_state.py). Loading checks everything before it builds a new cache: bytes, version,
method, model, layers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

import kvsketch
from kvsketch.cache.interrupted import left_behind
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.saving.layer_state import LayerReader, encode_layer
from kvsketch.cache.saving.model_identity import ModelIdentity, layer_devices
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.slots.heads import HeadShare
from kvsketch.slots.tensors import plain

KIND = "kvsketch-cache"
VERSION = "3"
# Raised by a description that fits its checksum and still is none that this version writes.
MISFITS = (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


def save(
    path: str | os.PathLike[str],
    method: Method,
    options: dict[str, Any],
    model: dict[str, Any],
    read: dict[str, Any],
    layers: Sequence[Any],
    about: Mapping[str, str],
    promise: dict[str, Any] | None = None,
) -> None:
    """Writes a cache to `path` in one step: there is the old file or the new one, whatever happens meanwhile.

    options: how the cache was made, beside model and method; model, read: what identifies the model and the text;
    promise: what was promised of the loss (`promise`).
    """
    tensors: dict[str, Tensor] = {}
    content = {
        "method": _method_text(method),
        "options": options,
        "model": model,
        "read": read,
        "about": dict(about),
        "promise": promise,
        "layers": [encode_layer(layer, str(number), tensors) for number, layer in enumerate(layers)],
    }
    text = {"kind": KIND, "version": VERSION, "kvsketch": kvsketch.__version__, "cache": json.dumps(content)}
    sealed_file.write(Path(path), tensors, text)


def require_complete(layers: Sequence[Any], broken_off: str) -> None:
    """Raises ValueError in the middle of a prompt, and after a forward that was broken off."""
    if any(isinstance(layer, SlotLayer) and layer.forward.prompt is not None for layer in layers):
        raise ValueError("this cache is in the middle of a prompt; save it when the whole prompt has been read")
    if broken_off:
        raise ValueError(
            f"the last read into this cache was interrupted: {broken_off}; start again with cache.reset(), or load "
            "the file that was saved before"
        )


def about(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `about` of a saved cache, and the dtype of its model; ValueError for a file that is no saved cache."""
    with opened(path) as saved:
        return {**saved.about, "dtype": str(saved.model.get("dtype"))}


class SavedCache:
    """The content of a file: what a cache is made with, and the state of its layers."""

    def __init__(self, file: Path, content: Any, tensors: Any) -> None:
        self._file, self._tensors = file, tensors
        self.method = _method(file, content["method"])
        self.options, self.model, self.read = content["options"], content["model"], content["read"]
        self.about: dict[str, str] = content["about"]
        self.promise: dict[str, Any] | None = content["promise"]
        self._layers = content["layers"]
        for what, value, kind in (
            ("seed", self.options["seed"], int), ("tokens", self.read["tokens"], int),
            ("checksum", self.read["checksum"], int), ("open", self.read["open"], bool),
        ):  # fmt: skip
            if type(value) is not kind:
                raise ValueError(f"{file} says {what}={value!r}, which is no {kind.__name__}; save the cache again")

    def fill(self, layers: Sequence[Any], model: Any, identity: ModelIdentity, head_share: HeadShare | None) -> None:
        """Gives the layers of a new cache the saved state, on the devices of the model; ValueError for another one."""
        if differences := identity.differences(self.model, head_share):
            words = "; ".join(differences)
            raise ValueError(f"{self._file} belongs to another model: {words}. Load it with its own model")
        if len(self._layers) != len(layers):
            raise ValueError(f"{self._file} holds {len(self._layers)} layers; this model caches {len(layers)}")
        devices, sizes = layer_devices(model, len(layers)), identity.head_sizes
        for layer, saved, device in zip(layers, self._layers, devices, strict=True):
            LayerReader(self._copied, device, sizes).fill(layer, saved)
            if head_share is not None and isinstance(layer, SlotLayer) and not layer.table.empty:
                head_share.place(layer.table, layer.table.shape[1])
        require_complete(layers, left_behind(layers))

    def _copied(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor.clone()  # the file's own pages must not change with the cache


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[SavedCache]:
    """The cache in the file `path`, to be built inside the block; ValueError says what is wrong with a file."""
    file = Path(path)
    before = file.stat()
    text = sealed_file.verified(file)
    if text.get("kind") != KIND:
        raise ValueError(f"{file} is no saved cache; save one with cache.save()")
    if text.get("version") != VERSION:
        raise ValueError(
            f"{file} has format {text.get('version')}, written by kvsketch {text.get('kvsketch')}; kvsketch "
            f"{kvsketch.__version__} reads format {VERSION}: use that version, or save the cache again with this one"
        )
    try:
        with plain(), safe_open(file, framework="pt") as tensors:
            yield SavedCache(file, json.loads(text["cache"]), tensors)
    except (SafetensorError, *MISFITS) as error:
        raise ValueError(
            f"{file} does not hold what kvsketch {kvsketch.__version__} expects ({type(error).__name__}: {error}); "
            "save the cache again"
        ) from error
    after = file.stat()
    if (after.st_ino, after.st_size, after.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise ValueError(f"{file} was replaced while it was read; load it again")


def _method_text(method: Method) -> str:
    text = method.full_text()
    with contextlib.suppress(ValueError):
        if type(parse_method(text, importing=False)) is type(method):
            return text
    raise ValueError(f"a saved file could not find the method {text!r}; define its class at the top of a module")


def _method(file: Path, text: Any) -> Method:
    """The method that a file names. A file runs no code: a method from outside has to be imported or installed."""
    try:
        return parse_method(text, importing=False)
    except ValueError as error:
        raise ValueError(
            f"{file} was saved with a method that kvsketch {kvsketch.__version__} does not know: {error}"
        ) from error
