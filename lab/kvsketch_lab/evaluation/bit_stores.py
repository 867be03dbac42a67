"""Ways to store keys and values of all tokens with fewer bits: ours, transformers' own, fp8, and our codec taken apart.

    full:bits=4  full:bits=auto  full:value_bits=2       a method of kvsketch
    rehearse:budget=1/2  snapkv:budget=25%:bits=4        one that drops tokens, whose attention error is not measured
    codec:bits=4:center=no:rotation=no:exact=no          our codec without a part of it; computed, not stored
    quanto:bits=4  hqq:bits=2                            transformers.QuantizedCache with a backend, if it is installed
    fp8                                                  torch.float8_e4m3fn, no scale

Every store reads a prompt exactly and holds it coded afterwards, so what follows the prompt reads codes.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.methods import METHODS, parse_method
from kvsketch.ops.codec import BITS, Codec, rotate, unit_step
from kvsketch.slots import codes

BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}
PARTS = ("center", "rotation", "exact")
FP8 = torch.float8_e4m3fn


class Store(ABC):
    """One way to hold keys and values, as a cache that a model can use."""

    whole = True  # whether it keeps every token, so that all can be read back
    held = True  # whether bytes and steps are those of a cache that is really there

    def __init__(self, text: str, config: Any) -> None:
        self.text, self.config = text, config

    def missing(self) -> str:
        """What is not installed; empty: nothing."""
        return ""

    @abstractmethod
    def new(self, model: Any) -> Any:
        """An empty cache."""

    def prompt_read(self, cache: Any) -> None:  # noqa: B027 (most stores do nothing then)
        """Called when the cache has read its prompt."""

    @abstractmethod
    def read_back(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer as the next token reads them, [B, H, n, D]."""

    def bytes(self, cache: Any) -> int:
        return sum(_bytes(vars(layer)) for layer in cache.layers)


class Ours(Store):
    """A method of kvsketch."""

    def __init__(self, text: str, config: Any) -> None:
        super().__init__(text, config)
        self.whole = parse_method(text).name == "full"

    def new(self, model: Any) -> Any:
        return CompressedCache(model, self.text)

    def read_back(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        table = cache.layers[layer].table
        return table.key_slots()[:, :, : table.seen], table.value_slots()[:, :, : table.seen]

    def bytes(self, cache: Any) -> int:
        return int(cache.device_bytes)


class Taken(Store):
    """Our codec without one or more of its parts: what it would read, held in the dtype of the model."""

    held = False

    def __init__(self, text: str, config: Any) -> None:
        super().__init__(text, config)
        settings = dict(part.split("=") for part in text.split(":")[1:])
        self.bits = int(settings.pop("bits", 4))
        unknown = settings.keys() - set(PARTS)
        if unknown or self.bits not in BITS or set(settings.values()) - {"no"}:
            choices = f"codec:bits={'|'.join(map(str, BITS))}, and center=no, rotation=no, exact=no"
            raise ValueError(f"{text!r} is no form of the codec; use {choices}")
        self.without = set(settings)

    def new(self, model: Any) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def prompt_read(self, cache: Any) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = self.coded(layer.keys), self.coded(layer.values)

    def coded(self, x: Tensor) -> Tensor:
        """x [B, H, n, D] as it comes back."""
        codec = Codec(self.bits, x.shape[-1])
        position = torch.arange(x.shape[2], device=x.device).expand(x.shape[:3])
        center = codes.center_of(x).unsqueeze(2)
        y = x.float() - (0.0 if "center" in self.without else center)
        turn = codec.rotation(x.device)
        y = y if "rotation" in self.without else rotate(y, codec.signs(x.device), codec.block)
        first = y.norm(dim=-1, keepdim=True) * unit_step(codec)
        z = (y / first.clamp_min(1e-30) + 2.0 ** (self.bits - 1)).floor().clamp(0, 2**self.bits - 1) - codec.half_range
        y = z * ((y * z).sum(-1, keepdim=True) / (z * z).sum(-1, keepdim=True)).half().float()
        y = y if "rotation" in self.without else y @ turn
        y = (y + (0.0 if "center" in self.without else center)).to(x.dtype)
        return y if "exact" in self.without else torch.where(position.unsqueeze(-1) < codes.EXACT, x, y)

    def read_back(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        return cache.layers[layer].keys, cache.layers[layer].values


class Quantized(Store):
    """transformers.QuantizedCache, with the axes that its documentation names for the backend."""

    def __init__(self, text: str, config: Any) -> None:
        super().__init__(text, config)
        self.backend, _, bits = text.partition(":bits=")
        if bits not in ("2", "4"):
            raise ValueError(f"{text!r} is not possible; use {self.backend}:bits=4 or {self.backend}:bits=2")
        self.bits = int(bits)

    def missing(self) -> str:
        return "" if _installed(BACKENDS[self.backend]) else f"{BACKENDS[self.backend]} is not installed"

    def new(self, model: Any) -> Any:
        from transformers import QuantizedCache

        if self.backend == "quanto" and model.device.type == "cuda":
            _unpack_without_compiler()
        axis = {"axis_key": 1, "axis_value": 1} if self.backend == "hqq" else {}
        return QuantizedCache(self.backend, self.config, nbits=self.bits, **axis)

    def read_back(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        held = cache.layers[layer]
        return held._dequantize(held._quantized_keys), held._dequantize(held._quantized_values)


class Fp8(Store):
    """Keys and values as float8_e4m3fn."""

    def new(self, model: Any) -> Any:
        from transformers import Cache
        from transformers.cache_utils import DynamicLayer

        class Layer(DynamicLayer):
            def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self.is_initialized:
                    self.lazy_initialization(key_states, value_states)
                    self.keys, self.values = _narrow(key_states), _narrow(value_states)
                    return key_states, value_states
                assert self.keys is not None and self.values is not None
                read = (
                    torch.cat([_wide(self.keys, key_states), key_states], 2),
                    torch.cat([_wide(self.values, value_states), value_states], 2),
                )
                self.keys = torch.cat([self.keys, _narrow(key_states)], 2)
                self.values = torch.cat([self.values, _narrow(value_states)], 2)
                return read

        return Cache(layers=[Layer() for _ in range(self.config.get_text_config(decoder=True).num_hidden_layers)])

    def read_back(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        held = cache.layers[layer]
        like = torch.empty(0, dtype=held.dtype)
        return _wide(held.keys, like), _wide(held.values, like)


def _narrow(x: Tensor) -> Tensor:
    # As bytes: not every device concatenates float8. The largest value takes what lies beyond it.
    most = torch.finfo(FP8).max
    return x.clamp(-most, most).to(FP8).view(torch.uint8)


def _wide(held: Tensor, like: Tensor) -> Tensor:
    return held.view(FP8).to(like.dtype)


def store(text: str, config: Any) -> Store:
    """The store that a text names; ValueError with the forms for another one."""
    name = text.partition(":")[0]
    kinds: dict[str, Callable[[str, Any], Store]] = {
        **dict.fromkeys(METHODS, Ours), "codec": Taken, "quanto": Quantized, "hqq": Quantized, "fp8": Fp8,
    }  # fmt: skip
    if name not in kinds or (name == "fp8" and text != "fp8"):
        forms = "full:bits=4, codec:bits=4:center=no, quanto:bits=4, hqq:bits=4, fp8 or another method of kvsketch"
        raise ValueError(f"--methods {text} is no quantised cache; use {forms}")
    return kinds[name](text, config)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _unpack_without_compiler() -> None:
    """quanto compiles its CUDA program at first use. Where there is no compiler, its own definition in torch serves."""
    import optimum.quanto.tensor.packed as packed  # type: ignore[import-not-found, unused-ignore]

    try:
        torch.ops.quanto.unpack(torch.zeros(8, 8, dtype=torch.uint8, device="cuda"), 4)
    except Exception:
        unpack = sys.modules["optimum.quanto.library.unpack"].unpack
        packed.PackedTensor.unpack = lambda self: unpack(self._data, self._bits)[: self.shape[0]]


def _bytes(held: Any) -> int:
    """Bytes of every tensor inside, those of tensor subclasses as they are stored."""
    if isinstance(held, dict):
        return sum(_bytes(each) for each in held.values())
    if isinstance(held, (list, tuple)):
        return sum(_bytes(each) for each in held)
    if not isinstance(held, Tensor):
        return 0
    if hasattr(held, "__tensor_flatten__"):
        names: Iterable[str] = held.__tensor_flatten__()[0]
        return sum(_bytes(getattr(held, name)) for name in names)
    return held.numel() * held.element_size()
