"""The text form of a method, `name:key=value:key=value`, for command lines, records and reports."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse(text: str, methods: Mapping[str, type[Method]]) -> Method:
    """Reads the text form; every mistake is a ValueError that names the valid choices."""
    if not isinstance(text, str):
        raise ValueError(f"a method is a text such as 'streamingllm:budget=1024' or a Method, not {text!r}")
    name, *settings = text.strip().split(":")
    if name not in methods:
        raise ValueError(f"unknown method {name!r}{_guess(name, methods)}; choose one of: {', '.join(methods)}")
    method = methods[name]
    hints = get_type_hints(method)
    valid = [f.name for f in dataclasses.fields(method) if f.init]
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{name}: {setting!r} is not of the form key=value; parameters: {_list(valid)}")
        if key not in valid:
            raise ValueError(f"{name}: unknown parameter {key!r}{_guess(key, valid)}; parameters: {_list(valid)}")
        if key in values:
            raise ValueError(f"{name}: parameter {key!r} is given twice")
        values[key] = _convert(f"{name}: {key}", value.strip(), hints[key])
    return method(**values)


def _convert(name: str, value: str, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if Size in kinds:
        return value
    if type(None) in kinds and value.lower() == "none":
        return None
    if bool in kinds:
        if value.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{name}={value!r} is not a yes or no; use true or false")
        return value.lower() in _TRUE
    for kind, wanted in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                if str not in kinds:
                    raise ValueError(f"{name}={value!r} is not {wanted}") from None
    return value


def _guess(word: str, choices: Any) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _list(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
