"""The parameters of a method, and its text form `name:key=value:key=value`, which `text.py` reads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from kvsketch.ops.codec import BITS
from kvsketch.slots.codes import AUTO, FEW, PLAIN, FewBits

BY_PROMPT = "auto"
BIT_CHOICES = f"{', '.join(map(str, BITS))}, or {PLAIN} for the dtype of the model"
BITS_MEANING = f"bits of a stored key and value: {BIT_CHOICES}; {BY_PROMPT}: 4, and 8 for keys of layers that need them"


class Option(NamedTuple):
    """A parameter of a method."""

    name: str
    default: Any
    choices: tuple[str, ...]
    meaning: str


def option(default: Any, meaning: str, choices: Sequence[str] = (), kw_only: bool = False) -> Any:
    """A field of a method: its default, what it means, and what it may be; another value is refused.

    A subclass that changes the default alone writes `sinks: int = 0` and inherits the rest.
    """
    metadata = {"meaning": meaning, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


@dataclass(frozen=True)
class Parameters:
    """Base of `Method`: its fields, what they may be, and how they are written."""

    name: ClassVar[str]
    chosen_keys: ClassVar[tuple[int, ...]] = ()  # bits of the keys of each layer, chosen for all prompts together

    bits: int | str = option(PLAIN, BITS_MEANING, kw_only=True)
    key_bits: int | str | None = option(None, "bits of a key, where they differ", kw_only=True)
    value_bits: int | None = option(None, "bits of a value, where they differ", kw_only=True)

    def __post_init__(self) -> None:
        for name, _, choices, _ in self.options():
            if choices:
                self._require(
                    name, getattr(self, name) in choices, (" or " if len(choices) < 3 else ", ").join(choices)
                )
        for name in ("bits", "key_bits", "value_bits"):
            value, chosen = getattr(self, name), name != "value_bits"
            whole = isinstance(value, int) and value in (*BITS, PLAIN)
            kind = "" if isinstance(value, int) else f"a whole number, not {value!r}: "
            known = whole or (chosen and value == BY_PROMPT) or (value is None and name != "bits")
            self._require(name, known, kind + f"{BY_PROMPT}, " * chosen + BIT_CHOICES)

    @property
    def stored_bits(self) -> FewBits:
        """Bits of a stored key and of a stored value."""
        keys = self.bits if self.key_bits is None else self.key_bits
        values = self.bits if self.value_bits is None else self.value_bits
        return FewBits(AUTO if keys == BY_PROMPT else int(keys), FEW if values == BY_PROMPT else int(values))

    def with_keys(self, bits: Sequence[int]) -> Self:
        """The method of `bits=auto` with these bits for the keys of each layer: no prompt chooses any more."""
        result = copy.copy(self)
        result._set("chosen_keys", tuple(bits))
        return result

    @classmethod
    def options(cls) -> list[Option]:
        """The parameters in order, each as the nearest class that explains it does."""
        result = []
        for field in _parameters(cls):
            told = [vars(base).get("__dataclass_fields__", {}).get(field.name) for base in cls.__mro__]
            said: Mapping[str, Any] = next((each.metadata for each in told if each is not None and each.metadata), {})
            if field.init:
                result.append(Option(field.name, field.default, said.get("choices", ()), said.get("meaning", "")))
        return result

    @classmethod
    def text_name(cls) -> str:
        """What its text form begins with: its name, or `module:Class` where the class is no part of kvsketch."""
        own = cls.__module__.partition(".")[0] == "kvsketch"
        return cls.name if own else f"{cls.__module__}:{cls.__qualname__}"

    def __str__(self) -> str:
        texts = {f.name: (_text(getattr(self, f.name)), _text(f.default)) for f in _parameters(self)}
        changed = [f"{name}={text}" for name, (text, default) in texts.items() if text != default]
        return ":".join([self.text_name(), *changed])

    def full_text(self) -> str:
        """The text form with every parameter: it means the same to a version with other defaults."""
        named = [f"{f.name}={_text(getattr(self, f.name))}" for f in _parameters(self) if f.init]
        return ":".join([self.text_name(), *named])

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _require(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise ValueError(f"{self.name}: {name}={_text(getattr(self, name))} is not valid; use {wanted}")

    def _require_whole(self, *names: str, least: int = 1, unit: str = "") -> None:
        for name in names:
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
            self._require(name, ok, f"a whole number{unit and ' of ' + unit}, {least} or more")


def _parameters(method: Parameters | type[Parameters]) -> list[dataclasses.Field[Any]]:
    """The fields of a method, its own before those that all have."""
    return sorted(dataclasses.fields(method), key=lambda field: field.kw_only is True)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
