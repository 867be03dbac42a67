"""The parameters of a method, and its text form `name:key=value:key=value`, which `text.py` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from kvsketch.ops.codec import BITS
from kvsketch.ops.codec.basis import LEARNED_BITS, Bases
from kvsketch.slots.codes import AUTO, FEW, UNQUANTISED, QuantBits

BY_PROMPT = "auto"
BIT_CHOICES = f"{', '.join(map(str, BITS))}, or {UNQUANTISED} for the dtype of the model"
RANDOM, LEARNED, LEARNED_KEYS = "random", "learned", "learned-keys"  # directions of quantised vectors
BASES = (RANDOM, LEARNED, LEARNED_KEYS)
BASIS_MEANING = (
    "directions in which keys and values are rounded: random ones, or those that `kvsketch fit` has learned, for keys "
    "alone or both"
)
BITS_MEANING = f"bits of a stored key and value: {BIT_CHOICES}; {BY_PROMPT}: 4, and 8 for keys of layers that need them"


class Removed(NamedTuple):
    """A parameter that a method had, and that has one value for good; a text may still say that value."""

    value: str
    why: str


SEED = "seed of random draws; added to the seed of the cache"
NO_DRAWS = Removed("0", "it draws nothing at random")


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


def carried() -> Any:
    """A field that no text form names: what a method is given once its model is known."""
    return dataclasses.field(default=None, metadata={"carried": True}, kw_only=True, repr=False)


@dataclass(frozen=True)
class Parameters:
    """Base of `Method`: its fields, what they may be, and how they are written."""

    name: ClassVar[str]
    removed: ClassVar[Mapping[str, Removed]] = {}  # parameters that it had

    bits: int | str = option(UNQUANTISED, BITS_MEANING, kw_only=True)
    key_bits: int | str | None = option(None, "bits of a key, where they differ", kw_only=True)
    value_bits: int | None = option(None, "bits of a value, where they differ", kw_only=True)
    basis: str = option(RANDOM, BASIS_MEANING, BASES, kw_only=True)
    bases: Bases | None = carried()  # what `basis` asks for, once the model is known

    def __post_init__(self) -> None:
        for name, _, choices, _ in self.options():
            if choices:
                self._require(
                    name, getattr(self, name) in choices, (" or " if len(choices) < 3 else ", ").join(choices)
                )
        if "seed" in (each.name for each in dataclasses.fields(self)):
            self._require("seed", isinstance(getattr(self, "seed"), int), "a whole number")  # noqa: B009
        for name in ("bits", "key_bits", "value_bits"):
            value, chosen = getattr(self, name), name != "value_bits"
            whole = isinstance(value, int) and value in (*BITS, UNQUANTISED)
            kind = "" if isinstance(value, int) else f"a whole number, not {value!r}: "
            known = whole or (chosen and value == BY_PROMPT) or (value is None and name != "bits")
            self._require(name, known, kind + f"{BY_PROMPT}, " * chosen + BIT_CHOICES)
        self._require_bits_of_basis()

    def _require_bits_of_basis(self) -> None:
        """Raises ValueError for bits that learned directions do not have."""
        asked = {RANDOM: 0, LEARNED_KEYS: 1, LEARNED: 2}[self.basis]
        for what, count in [*zip(("keys", "values"), self.stored_bits.pair, strict=True)][:asked]:
            if count not in LEARNED_BITS:
                raise ValueError(
                    f"{self.name}: basis={self.basis} is for {what} in {', '.join(map(str, LEARNED_BITS[:-1]))} or "
                    f"{LEARNED_BITS[-1]} bits, not {BY_PROMPT if count == AUTO else count}; use such as "
                    f"bits={LEARNED_BITS[0]}, or basis={RANDOM}"
                )

    @property
    def stored_bits(self) -> QuantBits:
        """Bits of a stored key and of a stored value."""
        keys = self.bits if self.key_bits is None else self.key_bits
        values = self.bits if self.value_bits is None else self.value_bits
        return QuantBits(
            AUTO if keys == BY_PROMPT else int(keys), FEW if values == BY_PROMPT else int(values), self.bases
        )

    def with_bases(self, learned: Bases) -> Self:
        """The method with the bases of a model, as far as it asks for them (`cache.replay.fitting`)."""
        return dataclasses.replace(self, bases=learned if self.basis == LEARNED else Bases(learned.keys, {}))

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
        """The start of its method string: its name, or `module:Class` for a class outside kvsketch."""
        own = cls.__module__.partition(".")[0] == "kvsketch"
        return cls.name if own else f"{cls.__module__}:{cls.__qualname__}"

    def __str__(self) -> str:
        texts = {f.name: (_text(getattr(self, f.name)), _text(f.default)) for f in _parameters(self)}
        changed = [f"{name}={text}" for name, (text, default) in texts.items() if text != default]
        return ":".join([self.text_name(), *changed])

    def full_text(self) -> str:
        """The method string with every parameter, independent of defaults."""
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
    """The fields of a method that its text form may name, its own before those that all have."""
    named = [field for field in dataclasses.fields(method) if not field.metadata.get("carried")]
    return sorted(named, key=lambda field: field.kw_only is True)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
