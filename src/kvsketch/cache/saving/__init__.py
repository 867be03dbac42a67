"""A compressed cache in a file, to be continued later, elsewhere, or many times.

    cache.save("prompt.kvs")
    cache = CompressedCache.load("prompt.kvs", model)

The file (sealed_file.py) holds the method, what identifies the model (model_identity.py) and the state of every layer
(layer_state.py). Loading checks everything before it builds a new cache: bytes, version, method, model, layers.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

import kvsketch
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.saving.layer_state import LayerReader, encode_layer, layer_devices
from kvsketch.methods import METHODS
from kvsketch.methods.base import Method
from kvsketch.methods.text import parse
from kvsketch.slots.tensors import plain

if TYPE_CHECKING:
    from torch import Tensor

    from kvsketch.cache.compressed import CompressedCache

KIND = "kvsketch-cache"
VERSION = "1"
# Raised by a description that fits its checksum and still is none that this version writes.
MISFITS = (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


def save(cache: CompressedCache, path: str | os.PathLike[str]) -> None:
    """Writes the cache to `path` in one step: there is the old file or the new one, whatever happens meanwhile."""
    require_whole(cache)
    tensors: dict[str, Tensor] = {}
    content = {
        "method": _method_text(cache.method),
        "options": _options(cache),
        "model": cache.identity.describe(cache.head_share),
        "layers": [encode_layer(layer, str(number), tensors) for number, layer in enumerate(cache.layers)],
    }
    text = {"kind": KIND, "version": VERSION, "kvsketch": kvsketch.__version__, "cache": json.dumps(content)}
    sealed_file.write(Path(path), tensors, text)


def require_whole(cache: CompressedCache) -> None:
    """Raises ValueError unless every layer has been through the same forwards."""
    if any(layer.prompt is not None for layer in cache.slot_layers):
        raise ValueError("this cache is in the middle of a prompt; save it when the whole prompt has been read")
    what = cache.broken_off()
    if what:
        raise ValueError(
            f"what was last read into this cache was broken off: {what}; start again with cache.reset(), or load the "
            "file that was saved before"
        )


def _options(cache: CompressedCache) -> dict[str, Any]:
    """How the cache was made, beside model and method; `check` is for whoever looks for a mistake and is not kept."""
    parameters = inspect.signature(type(cache).__init__).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("check", "seed")]
    return {"seed": cache.slot_layers[0].table.seed, **{name: getattr(cache, name) for name in names}}


def load(path: str | os.PathLike[str], model: Any, new_cache: type[CompressedCache]) -> CompressedCache:
    """The cache in the file `path`, on the devices of `model`; ValueError says what is wrong with a file."""
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
        with plain():
            cache = _rebuilt(file, json.loads(text["cache"]), model, new_cache)
    except (SafetensorError, *MISFITS) as error:
        raise ValueError(
            f"{file} does not hold what kvsketch {kvsketch.__version__} expects ({type(error).__name__}: {error}); "
            "save the cache again"
        ) from error
    after = file.stat()
    if (after.st_ino, after.st_size, after.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise ValueError(f"{file} was replaced while it was read; load it again")
    return cache


def _rebuilt(file: Path, content: Any, model: Any, new_cache: type[CompressedCache]) -> CompressedCache:
    cache = new_cache(model, _method(file, content["method"]), **content["options"])
    differences = cache.identity.differences(content["model"], cache.head_share)
    if differences:
        raise ValueError(f"{file} belongs to another model: {'; '.join(differences)}. Load it with its own model")
    if len(content["layers"]) != len(cache.layers):
        raise ValueError(f"{file} holds {len(content['layers'])} layers; this model caches {len(cache.layers)}")
    devices = layer_devices(model, len(cache.layers))
    with safe_open(file, framework="pt") as tensors:

        def copied(name: str) -> Tensor:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor.clone()  # the file's own pages must not change with the cache

        for layer, saved, device in zip(cache.layers, content["layers"], devices, strict=True):
            LayerReader(copied, device).fill(layer, saved)
    share = cache.head_share
    for table in (layer.table for layer in cache.slot_layers):
        if share is not None and not table.empty:
            share.place(table, table.shape[1])
    require_whole(cache)
    return cache


def _method_text(method: Method) -> str:
    text = method.full_text()
    with contextlib.suppress(ValueError):
        if type(parse(text, METHODS, importing=False)) is type(method):
            return text
    raise ValueError(f"no reader of a file would find the method {text!r}; define its class at the top of a module")


def _method(file: Path, text: Any) -> Method:
    """The method that a file names. A file runs no code: a method from outside has to be imported or installed."""
    try:
        method = parse(text, METHODS, importing=False)
        named = {part.partition("=")[0] for part in text.split(":")}
        earlier = [f"{name}={value}" for name, value in method.earlier_defaults.items() if name not in named]
        return parse(":".join([text, *earlier]), METHODS, importing=False)
    except ValueError as error:
        raise ValueError(
            f"{file} was saved with a method that kvsketch {kvsketch.__version__} does not know: {error}"
        ) from error
