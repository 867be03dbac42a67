"""The text form of a method, `name:key=value:key=value`, for command lines, records and reports.

streamingllm:budget=1024            a method of the index
keynorm:budget=1024                 one that an installed package offers: entry point group `kvsketch.methods`
package.module:KeyNorm:budget=1024  any class that can be imported
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_type_hints

from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size

GROUP = "kvsketch.methods"
OUTSIDE = re.compile(r"((?:[^\W\d]\w*\.)*[^\W\d]\w*):([A-Z]\w*)")  # module:Class
# The types of the parameters of a class: Python compiles every annotation for them, which takes milliseconds.
_types_of: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse(text: str, methods: Mapping[str, type[Method]], importing: bool = True) -> Method:
    """Reads the text form; every mistake is a ValueError that names the valid choices."""
    if not isinstance(text, str):
        raise ValueError(f"a method is a text such as 'streamingllm:budget=1024' or a Method, not {text!r}")
    name, *settings = text.strip().split(":")
    if name not in methods and settings and OUTSIDE.fullmatch(f"{name}:{settings[0]}"):
        name = f"{name}:{settings.pop(0)}"
    method = find(name, methods, importing)
    hints = _types_of(method)
    valid = parameters_of(method)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{name}: {setting!r} is not of the form key=value; parameters: {_list(valid)}")
        if key not in valid and key in method.removed and value.strip() == method.removed[key].value:
            continue
        if key not in valid and (reason := _reason(key, method)) is not None:
            having = [other for other, each in methods.items() if key in parameters_of(each)]
            others = f"; methods with {key}: {_list(having)}" if having else ""
            raise ValueError(f"{name}: {setting} is refused, {reason}{others}")
        if key not in valid:
            raise ValueError(f"{name}: unknown parameter {key!r}{_guess(key, valid)}; parameters: {_list(valid)}")
        if key in values:
            raise ValueError(f"{name}: parameter {key!r} is given twice")
        try:
            values[key] = _convert(f"{name}: {key}", value.strip(), hints[key])
        except ValueError as error:
            meaning = next((each.meaning for each in method.options() if each.name == key), "")
            raise ValueError(f"{error}{meaning and f' ({meaning})'}") from None
    return method(**values)


def parameters_of(method: type[Method]) -> list[str]:
    """The names of the parameters that a text may set."""
    return [each.name for each in method.options()]


def _reason(key: str, method: type[Method]) -> str | None:
    """Why a method has no such parameter, where there is more to say than that."""
    reason = method().capabilities.of_option(key).reason
    if reason is None and key in method.removed:
        reason = f"it always means {method.removed[key].value}: {method.removed[key].why}"
    return reason


def find(name: str, methods: Mapping[str, type[Method]], importing: bool = True) -> type[Method]:
    """The class of a method by its name in `methods`, by that of an entry point, or as `module:Class`.

    Without `importing` no module is imported that the user has neither imported nor installed as an entry point.
    """
    if name in methods:
        return methods[name]
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in entries:
        return _load(entries[name])
    if outside := OUTSIDE.fullmatch(name):
        module, cls = outside.groups()
        installed = any(entry.value == name for entry in entries.values())
        if not (importing or installed or module in sys.modules):
            raise ValueError(f"the module {module!r} of the method {name!r} is not imported; import it first")
        return _load(EntryPoint(cls, name, GROUP))
    known = [*methods, *entries]
    raise ValueError(
        f"unknown method {name!r}{_guess(name, known)}; choose one of: {', '.join(known)}; "
        "or name a class of your own as package.module:Class"
    )


def installed(methods: Mapping[str, type[Method]]) -> dict[str, type[Method]]:
    """The methods that installed packages offer beside `methods`, by name."""
    return {entry.name: _load(entry) for entry in entry_points(group=GROUP) if entry.name not in methods}


def _load(entry: EntryPoint) -> type[Method]:
    module, _, cls = entry.value.partition(":")
    try:
        result = getattr(importlib.import_module(module), cls, None)
    except Exception as error:
        raise ValueError(
            f"method {entry.value!r}: the module {module!r} cannot be imported ({type(error).__name__}: {error}); "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    if not isinstance(result, type) or not issubclass(result, Method):
        there = [k for k, v in vars(sys.modules[module]).items() if isinstance(v, type) and issubclass(v, Method)]
        raise ValueError(f"method {entry.value!r}: {cls!r} is no Method; the module has: {_list(there)}")
    if "__dataclass_params__" not in vars(result) or not getattr(result, "name", ""):
        raise ValueError(f"method {entry.value!r}: needs @dataclass(frozen=True) and a name: ClassVar[str]")
    return result


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
