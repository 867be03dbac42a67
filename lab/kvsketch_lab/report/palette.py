"""How methods look in figures: one colour and marker for each.

A method's class defines its colours. A report is made without torch, so without these classes: `kvsketch report --docs`
writes the colours to looks.json, and a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple


class Look(NamedTuple):
    """Family, colour on a light ground, marker, dash pattern of lines."""

    family: str
    colour: str
    marker: str = "o"
    dash: str = ""


SPARE = ("#6d4c41", "#ad1457", "#33691e", "#283593")
DASHES = ("5 3", "2 2", "8 3 2 3", "3 5")
FILE = "looks.json"


def look_file(methods: Iterable[Mapping[str, Any]]) -> str:
    """The text of looks.json for methods with a name, a family and a look, in their order."""
    lines = (f"{json.dumps(m['name'])}: {json.dumps([m['family'], *m['look']])}" for m in methods)
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _base(text: str) -> dict[str, Look]:
    result: dict[str, Look] = {}
    for name, (family, *own) in json.loads(text).items():
        result[name] = Look(family, *(own or [SPARE[len(result) % len(SPARE)]]))
    # Two references: `full` reads everything, `oracle` the tokens with the largest inner products.
    oracle = Look("oracle", "#222222", "*", "2 3")
    return {"full": result["full"]._replace(dash="6 4"), "oracle": oracle} | {
        n: x for n, x in result.items() if n != "full"
    }


BASE = _base((resources.files("kvsketch_lab.report") / FILE).read_text(encoding="utf-8"))


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for each method text: variants of a method share its colour and differ by dash."""
    result: dict[str, Look] = {}
    variants: dict[str, int] = {}
    unknown: dict[str, Look] = {}
    for method in sorted(set(methods), key=order):
        name = name_of(method)
        if name not in BASE and name not in unknown:
            unknown[name] = Look("other", SPARE[len(unknown) % len(SPARE)])
        look = BASE.get(name) or unknown[name]
        if name != method:
            look = look._replace(dash=DASHES[variants.get(name, 0) % len(DASHES)])
            variants[name] = variants.get(name, 0) + 1
        result[method] = look
    return result


def name_of(method: str) -> str:
    """The text form without its settings: `snapkv`, or `package.module:Class` of a method from outside."""
    return ":".join(part for part in method.split(":") if "=" not in part)


def without_budget(method: str) -> str:
    """The text form without its budget."""
    return ":".join(part for part in method.split(":") if not part.startswith("budget="))


def order(method: str) -> tuple[int, str]:
    """Methods in the order of the index of methods, variants after their method."""
    names, name = list(BASE), name_of(method)
    return (names.index(name) if name in names else len(names), method)
